"""Norms, rotary positions and cache writes of rounds by the kernel of Hopper GPUs.

The kernel (`models.kernels.gpu.heads_gpu`) differs from XLA in the order of the sums of norms, and
is not used with `sums_in_order_on_accelerators`.

Shape suffixes: B rows or slots, T tokens, X = B · T, H heads, K key/value heads, h head size,
N pages of a slot.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType

import jax

from reprise.models import sums_in_order_on_accelerators
from reprise.models.attention.cached_attention import Split
from reprise.models.attention.entries import pin, place_of
from reprise.models.attention.kv_cache import Pages, places_of_windows
from reprise.models.config import Layer, ModelConfig
from reprise.models.kernels.find import find
from reprise.models.sharding import by_device

Heads = tuple[jax.Array, jax.Array, jax.Array]
HEAD_AXES = "batch", "heads", None  # logical axes of queries, one row a token
KV_HEAD_AXES = "batch", "kv_heads", None
TOKEN_AXES = "batch", None
NORM_AXES = (None,)


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """Norms and rotates the queries and keys of a layer; `norms` are weights [h], or none."""

    kernel: ModuleType
    norms: tuple[jax.Array, ...]
    eps: float
    rope: tuple[jax.Array, jax.Array]

    def __call__(self, q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> Heads:
        inputs = self.by_token(q_BTHh, k_BTKh, v_BTKh)
        axes = [HEAD_AXES, KV_HEAD_AXES, KV_HEAD_AXES, TOKEN_AXES, TOKEN_AXES]
        axes += [NORM_AXES for _ in self.norms]
        results = [(x.shape, of) for x, of in zip(inputs[:2], axes[:2], strict=True)]
        turn = partial(self.kernel.turn, eps=self.eps)
        q_XHh, k_XKh = by_device(turn, inputs, axes, results)
        return q_XHh.reshape(q_BTHh.shape), k_XKh.reshape(k_BTKh.shape), v_BTKh

    def appending(self, pages: Pages, start_B: jax.Array) -> Append:
        """Return the turn that also writes to the pages."""
        return Append(self, pages, start_B)

    def by_token(self, *heads: jax.Array) -> list[jax.Array]:
        """Return the arguments of the kernel: one row a token, cos and sin as in `rotate`."""
        turns = [jax.lax.reduce_precision(x, 8, 15) for x in self.rope]
        return [*(x.reshape(-1, *x.shape[2:]) for x in (*heads, *turns)), *self.norms]


@dataclasses.dataclass(eq=False)
class Append:
    """A turn that also writes the keys and values of T tokens of each slot, from `start` on.

    `layer` then has them. Places without a page are not written, and values are finite, as by
    `finite_values`. The keys and values that it returns are not turned, for the pages have them.
    """

    turn: Turn
    layer: Pages
    start_B: jax.Array

    def __call__(self, q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array) -> Heads:
        T = q_BTHh.shape[1]
        layer = self.layer
        kernel = self.turn.kernel
        split = Split.of_cache(layer.values_PKTh)
        heads = split.spec(batch=0, heads=1)
        of_slots = split.spec(batch=0)

        def local(
            keys: jax.Array,
            values: jax.Array,
            table_BN: jax.Array,
            start_B: jax.Array,
            *new: jax.Array,
        ) -> Heads:
            own_BN = split.own(table_BN, len(keys))
            row_X, position_X = places_of_windows(start_B, T)
            page_X, offset_X = place_of(own_BN, row_X, position_X, values)
            places = kernel.Places(keys, values, page_X, offset_X)
            return kernel.append(places, *new, eps=self.turn.eps)

        new = self.turn.by_token(q_BTHh, k_BTKh, v_BTKh)
        of_new = [heads, heads, heads, of_slots, of_slots, *[split.spec()] * len(self.turn.norms)]
        inputs = (heads, heads, of_slots, of_slots, *of_new)
        append = split.mapped(local, inputs, (heads,) * 3)
        q_XHh, keys, values = append(
            layer.keys_PKTh, layer.values_PKTh, layer.table_BN, self.start_B, *new
        )
        self.layer = dataclasses.replace(layer, keys_PKTh=pin(keys), values_PKTh=pin(values))
        return q_XHh.reshape(q_BTHh.shape), k_BTKh, v_BTKh


def turn_of(
    config: ModelConfig, layer: Layer, rope: tuple[jax.Array, jax.Array], pages: Pages
) -> Turn | None:
    """Return the turn of a layer in rounds; None if the kernel does not take its sizes."""
    dtype = layer.attention_norm_D.dtype
    if sums_in_order_on_accelerators() or dtype != pages.values_PKTh.dtype:
        return None
    kernel = find("heads", "cuda", config.head_dim, dtype)
    if isinstance(kernel, str):
        return None
    norms = (layer.query_norm_h, layer.key_norm_h) if config.qk_norm else ()
    return Turn(kernel, norms, config.norm_eps, rope)
