"""Queries, keys and values of tokens: norms, rotary positions, and their way into the cache.

On Hopper GPUs, rounds use a kernel (`models.kernels.gpu.heads_gpu`), which differs from XLA in the
order of the sums of norms; not with `sums_in_order_on_accelerators`.

Shape suffixes: B rows or slots, T tokens, X = B · T, H heads, K key/value heads, h head size,
D model width, P pages, N pages of a slot.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType

import jax

from reprise.models import sums_in_order_on_accelerators
from reprise.models.attention.attention import finite_values
from reprise.models.attention.cached_attention import Split
from reprise.models.attention.entries import pin, place_of
from reprise.models.attention.kv_cache import Pages, places_of_windows
from reprise.models.decoder.layers import rms_norm, rotate
from reprise.models.kernels.find import find
from reprise.models.sharding import by_device, platform_in_use

Heads = tuple[jax.Array, jax.Array, jax.Array]
HEAD_AXES = "batch", "heads", None  # logical axes of queries, one token after the other
KV_HEAD_AXES = "batch", "kv_heads", None
TOKEN_AXES = "batch", None
NORM_AXES = (None,), (None,)


@dataclasses.dataclass(frozen=True)
class Projections:
    """The projected queries, keys and values of tokens.

    `norms` are the weights [h] of the norms of queries and keys, or none.
    """

    q_BTHh: jax.Array
    k_BTKh: jax.Array
    v_BTKh: jax.Array
    norms: tuple[jax.Array, ...]
    eps: float
    cos_BTh: jax.Array
    sin_BTh: jax.Array

    def turned(self) -> Heads:
        """Return queries, keys and values with norms and rotary positions; [B, T, H or K, h]."""
        q_BTHh = self.q_BTHh
        k_BTKh = self.k_BTKh
        if self.norms:
            query_norm_h, key_norm_h = self.norms
            q_BTHh = rms_norm(q_BTHh, query_norm_h, self.eps)
            k_BTKh = rms_norm(k_BTKh, key_norm_h, self.eps)
        q_BTHh = rotate(q_BTHh, self.cos_BTh, self.sin_BTh)
        return q_BTHh, rotate(k_BTKh, self.cos_BTh, self.sin_BTh), self.v_BTKh

    def of_round(self) -> Heads:
        """Return `turned`, with finite values; by the kernel if there is one."""
        q_BTHh, k_BTKh, v_BTKh = self.turned()
        kernel = self._kernel()
        if kernel is not None:
            inputs = self._by_token()
            axes = [HEAD_AXES, KV_HEAD_AXES, KV_HEAD_AXES, TOKEN_AXES, TOKEN_AXES, *NORM_AXES]
            results = [(x.shape, of) for x, of in zip(inputs[:2], axes[:2], strict=True)]
            turn = partial(kernel.turn, eps=self.eps)
            q_XHh, k_XKh = by_device(turn, inputs, axes[: len(inputs)], results)
            q_BTHh = q_XHh.reshape(q_BTHh.shape)
            k_BTKh = k_XKh.reshape(k_BTKh.shape)
        return q_BTHh, *finite_values(k_BTKh, v_BTKh)

    def appended(self, layer: Pages, start_B: jax.Array) -> tuple[jax.Array, Pages] | None:
        """Return the queries, and the layer with the keys and values of T tokens of each slot.

        They go to `start … start+T−1`; places without a page are not written. None without a
        kernel that does both.
        """
        kernel = self._kernel()
        is_taken = layer.values_PKTh.dtype == self.q_BTHh.dtype and not layer.anywhere
        if kernel is None or not is_taken:
            return None
        T = self.q_BTHh.shape[1]
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
            return kernel.append(places, *new, eps=self.eps)

        new = self._by_token()
        whole = split.spec()
        of_new = heads, heads, heads, of_slots, of_slots, whole, whole
        inputs = heads, heads, of_slots, of_slots, *of_new[: len(new)]
        append = split.mapped(local, inputs, (heads,) * 3)
        q_XHh, keys, values = append(
            layer.keys_PKTh, layer.values_PKTh, layer.table_BN, start_B, *new
        )
        held = dataclasses.replace(layer, keys_PKTh=pin(keys), values_PKTh=pin(values))
        return q_XHh.reshape(self.q_BTHh.shape), held

    def _kernel(self) -> ModuleType | None:
        if platform_in_use() != "cuda" or sums_in_order_on_accelerators():
            return None
        found = find("heads", "cuda", self.q_BTHh.shape[-1], self.q_BTHh.dtype)
        return None if isinstance(found, str) else found

    def _by_token(self) -> list[jax.Array]:
        """Return the arguments of the kernel: one row a token, cos and sin as in `rotate`."""
        cos_BTh, sin_BTh = (
            jax.lax.reduce_precision(x, 8, 15) for x in (self.cos_BTh, self.sin_BTh)
        )
        arrays = self.q_BTHh, self.k_BTKh, self.v_BTKh, cos_BTh, sin_BTh
        return [*(x.reshape(-1, *x.shape[2:]) for x in arrays), *self.norms]
