"""Attention to a cache in one order, by the kernels of CPUs, TPUs and Hopper GPUs, on any mesh.

Each part of the batch axes of a mesh holds some of the pages, and attends for the tokens of their
slots; other tokens get zeros there, so that a sum over the parts is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from reprise.models.attention.attention import After, Portable
from reprise.models.kernels.find import takes
from reprise.models.layout import CACHE_AXES, entry_names, entry_ways
from reprise.models.sharding import fitting_spec, platform_in_use


@dataclasses.dataclass(frozen=True)
class Split:
    """The axes of the mesh in use that split pages, and their heads."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    ways: int = 1
    head_ways: int = 1

    @staticmethod
    def of_cache(values: jax.Array) -> Split:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return Split()
        spec: list[Any] = [*fitting_spec(mesh.shape, values.shape, CACHE_AXES), None, None]
        batch, heads = spec[:2]
        ways = (entry_ways(mesh.shape, entry) for entry in (batch, heads))
        return Split(entry_names(batch), entry_names(heads), *ways)

    def spec(self, batch: int | None = None, heads: int | None = None) -> PartitionSpec:
        """Return the specification of an array that has these axes at these dimensions."""
        entries: list[Any] = [None] * 4
        if batch is not None:
            entries[batch] = self.batch or None
        if heads is not None:
            entries[heads] = self.heads or None
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def mapped(self, local: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        if not self.batch and not self.heads:
            return local
        return jax.shard_map(local, in_specs=inputs, out_specs=outputs, check_vma=False)

    def own(self, pages: jax.Array, num_here: int) -> jax.Array:
        """Return page numbers relative to the first page of this part, −1 for other parts."""
        if not self.batch:
            return pages
        own = pages - jax.lax.axis_index(self.batch) * num_here
        return jnp.where((own >= 0) & (own < num_here), own, -1)


def is_in_order(dtype: Any, values_PKTh: jax.Array, *, for_cpu: bool) -> str | None:
    """Return the platform if its kernel attends in one order, by position, else None.

    `dtype` is the dtype of the queries; the cache is laid out `for_cpu`, or for accelerators.
    """
    *_, page_tokens, head_dim = values_PKTh.shape
    platform = "cpu" if for_cpu else platform_in_use()
    if not for_cpu and platform == "cpu":
        return None
    dtypes = {dtype, values_PKTh.dtype}
    if all(takes("page_attention", platform, head_dim, page_tokens, x) for x in dtypes):
        return platform
    return None


def attend_in_order(
    new: tuple[jax.Array, jax.Array, jax.Array],
    held: tuple[jax.Array, jax.Array],
    after: After,
    portable: Portable,
    table_BN: jax.Array,
    *,
    for_cpu: bool,
    has_own_slots: bool,
) -> jax.Array:
    """Compute `Pages.of_new` by a kernel, else by `portable`.

    With `has_own_slots`, each part of a mesh has the same number of slots, in order, and their
    pages.
    """
    platform = is_in_order(new[0].dtype, held[1], for_cpu=for_cpu)
    if not platform:
        return portable()
    split = Split.of_cache(held[1])
    if platform == "tpu" and _is_too_large(split, new[1], after, table_BN, has_own_slots):
        return portable()
    of_parts = _of_own_slots if has_own_slots and split.batch else _of_any_slots
    kernel = partial(of_parts, partial(_by_kernel, platform), split, new, held, after, table_BN)
    if for_cpu:
        return kernel()
    return jax.lax.platform_dependent(**{platform: kernel}, default=portable)


def _is_too_large(
    split: Split, k_XKh: jax.Array, after: After, table_BN: jax.Array, has_own_slots: bool
) -> bool:
    """Return whether the memories of a TPU core are too small for the kernel of trees."""
    from reprise.models.kernels.tpu import page_attention_tpu  # Pallas: a second to import

    B, N = table_BN.shape
    X, K, h = k_XKh.shape
    table = B // (split.ways if has_own_slots else 1), N
    return (
        page_attention_tpu.why_too_large(
            table, X if after.num_paths else 0, K // split.head_ways, h, k_XKh.dtype
        )
        is not None
    )


def _by_kernel(platform: str, *given: jax.Array, after: After) -> jax.Array:
    """Compute one part of a mesh from its pages, `after`, and its table."""
    q_XHh, k_XKh, v_XKh, keys, values, table_BN = given
    if platform == "cpu":
        from reprise.models.kernels.cpu import page_attention_cpu

        return page_attention_cpu.attend(
            q_XHh,
            k_XKh,
            v_XKh,
            keys,
            values,
            table_BN,
            after.row_X,
            after.length_X,
            after.parent_X,
        )
    from reprise.models.attention import page_tiles  # Pallas: a second to import

    return page_tiles.attend(platform, q_XHh, k_XKh, v_XKh, keys, values, after, table_BN)


def _of_own_slots(
    kernel: Callable[..., jax.Array],
    split: Split,
    new: tuple[jax.Array, ...],
    held: tuple[jax.Array, jax.Array],
    after: After,
    table_BN: jax.Array,
) -> jax.Array:
    """Attend in each part for the tokens of its slots; chains are split as the slots are."""
    of_slots = split.spec(batch=0)
    is_split = not after.num_paths
    tokens = split.spec(batch=0 if is_split else None, heads=1)
    pages = split.spec(batch=0, heads=1)
    places = of_slots if is_split else PartitionSpec()

    def local(*given: jax.Array) -> jax.Array:
        *arrays, row_X, length_X, parent_X, table_BN = given
        part = jax.lax.axis_index(split.batch)
        num_here = len(table_BN)
        row_X = row_X - part * num_here
        if is_split:
            parent_X = jnp.where(parent_X < 0, -1, parent_X - part * len(row_X))
        row_X = jnp.where((row_X >= 0) & (row_X < num_here), row_X, -1)
        own = after._replace(row_X=row_X, length_X=length_X, parent_X=parent_X)
        out_XHh = kernel(*arrays, split.own(table_BN, len(arrays[3])), after=own)
        return out_XHh if is_split else jax.lax.psum(out_XHh, split.batch)

    inputs = tokens, tokens, tokens, pages, pages, *[places] * 3, of_slots
    return split.mapped(local, inputs, tokens)(*new, *held, *after.arrays, table_BN)


def _of_any_slots(
    kernel: Callable[..., jax.Array],
    split: Split,
    new: tuple[jax.Array, ...],
    held: tuple[jax.Array, jax.Array],
    after: After,
    table_BN: jax.Array,
) -> jax.Array:
    heads = split.spec(heads=1)
    whole = PartitionSpec()
    rows = split.spec(batch=0, heads=1)

    def local(*given: jax.Array) -> jax.Array:
        *arrays, row_X, length_X, parent_X, table_BN = given
        num_here = len(arrays[3])
        first_B = jnp.maximum(table_BN[:, 0], 0)  # slots without pages belong to part 0
        is_here_B = split.own(first_B, num_here) >= 0
        row_X = jnp.where(jnp.take(is_here_B, row_X, mode="clip"), row_X, -1)
        own = after._replace(row_X=row_X, length_X=length_X, parent_X=parent_X)
        out_XHh = kernel(*arrays, split.own(table_BN, num_here), after=own)
        return jax.lax.psum(out_XHh, split.batch) if split.batch else out_XHh

    inputs = heads, heads, heads, rows, rows, whole, whole, whole, whole
    return split.mapped(local, inputs, heads)(*new, *held, *after.arrays, table_BN)
