"""The layout of arrays on a mesh and in blocks: plain arithmetic, without jax.

Mesh axes: `data` (copies of the weights), `fsdp` (batch, and weights split over it), `tensor`
(heads, feed-forward and vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

AXES = ("data", "fsdp", "tensor")
Entry = str | tuple[str, ...] | None  # the mesh axes of one dimension

RULES: dict[str, Entry] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "copies": "data",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "logits": ("tensor", "fsdp"),  # a vocabulary over all devices that share a copy of the weights
    "features": "tensor",
}
CACHE_AXES = ("batch", "kv_heads", None, None)  # of cached keys and values
FEATURE_AXES = ("batch", None, None, "features")  # of cached hidden states
ENTRY_AXES = (None, "kv_heads", None)  # keys and values of nodes; hidden states [P, W] use two axes
CAUSAL_BLOCKS = 4
MIN_BLOCK_TOKENS = 64  # shorter rows are one block
# Attention and feed-forward run in pieces for rows of at least this many tokens.
LONG_ROW_TOKENS = 4096
LONG_ROW_BLOCK_TOKENS = 512  # of queries, and of keys
LONG_ROW_FEED_FORWARD_PARTS = 4
WHOLE_FEED_FORWARD_BYTES = 2**27  # of all features on a device, below which rows are not cut
PAGE_BLOCK_POSITIONS = 512  # of a slot, read at a time by paged attention without a kernel


def mesh_axes(axes: Sequence[str | None]) -> list[Entry]:
    """Return the mesh axes of each dimension of an array with these logical axes."""
    entries = [None if axis is None else RULES[axis] for axis in axes]
    used = [name for entry in entries for name in entry_names(entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} map to {entries}: a mesh axis is used twice")
    return entries


def fitting_axes(
    sizes: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None]
) -> list[Entry]:
    """Return `mesh_axes`, None for dimensions that do not divide; `sizes` by mesh axis."""
    return [
        entry if (ways := entry_ways(sizes, entry)) > 1 and size % ways == 0 else None
        for size, entry in zip(shape, mesh_axes(axes), strict=True)
    ]


def shard_shape(
    sizes: Mapping[str, int], shape: Sequence[int], axes: Sequence[str | None]
) -> tuple[int, ...]:
    """Return the shape of one shard of an array, on a mesh with these sizes by axis."""
    entries = fitting_axes(sizes, shape, axes)
    return tuple(n // entry_ways(sizes, entry) for n, entry in zip(shape, entries, strict=True))


def rollout_tensor(
    num_devices: int,
    weight_ways: int,
    num_kv_heads: int,
    asked: int | Literal["auto"] = "auto",
) -> int:
    """Return how many ways to split the weights of an engine; the other ways split its requests.

        auto = gcd(weight_ways, num_devices, num_kv_heads)

    Raises ValueError if a given number does not divide the devices and the key/value heads.
    """
    if asked == "auto":
        return math.gcd(weight_ways, num_devices, num_kv_heads)
    sizes = {"key/value heads of the policy": num_kv_heads, "devices of an engine": num_devices}
    for what, size in sizes.items():
        if size % asked:
            raise ValueError(
                f"expected Mesh.rollout_tensor to divide the {size} {what}, got {asked}: lower it, "
                "or set it to 'auto'; the devices beyond it share out the requests"
            )
    return asked


def causal_block_tokens(num_tokens: int) -> int:
    """Return the number of queries in a block of causal attention; `num_tokens` for one block."""
    size = num_tokens // CAUSAL_BLOCKS
    return num_tokens if num_tokens % CAUSAL_BLOCKS or size < MIN_BLOCK_TOKENS else size


def axis_ways(sizes: Mapping[str, int], axis: str) -> int:
    """Return how many ways a mesh splits a logical axis; `sizes` by mesh axis."""
    return entry_ways(sizes, RULES[axis])


def logits_axes(sizes: Mapping[str, int], vocab_size: int) -> tuple[str, str]:
    """Return the logical axes of logits in training: of the rows, and of the vocabulary.

    Devices that share a copy of the weights split the vocabulary and hold all rows of that copy; if
    the vocabulary does not divide, each device holds its batch rows and under fsdp the whole head.
    """
    ways = entry_ways(sizes, RULES["logits"]) if sizes else 1
    return ("copies", "logits") if vocab_size % ways == 0 else ("batch", "vocab")


def layers_per_input(remat: str) -> int:
    """Return N if the input of every N-th layer is kept (`decoder.training`); 0: none and dots."""
    if remat in ("none", "dots"):
        return 0
    name, colon, number = remat.partition(":")
    if name != "layer" or (colon and not (number.isdecimal() and int(number))):
        raise ValueError(f"expected 'none', 'dots', 'layer' or 'layer:N' with N ≥ 1, got {remat!r}")
    return int(number or 1)


def entry_names(entry: Entry) -> tuple[str, ...]:
    """Return the mesh axes of one dimension."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def entry_ways(sizes: Mapping[str, int], entry: Entry) -> int:
    """Return how many ways a dimension is split; `sizes` by mesh axis."""
    return math.prod(sizes[name] for name in entry_names(entry))
