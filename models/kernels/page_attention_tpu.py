"""Attention of a round's nodes to their slots' pages of keys and values: the kernels for TPUs.

`append_and_attend` writes a new entry of each slot as well. Slots are taken in turn; their pages
come through buffers (`page_blocks`). All queries of a key/value head are rows of one product.

    score = q·k/√h · log₂e,   top = round(max score)
    total = Σ 2^(score − top),   out = Σ 2^(score − top) v

With whole tops the weights' mantissas, and so their rounding to bfloat16, do not depend on the top.

B slots, W nodes of a slot, H heads, K key/value heads, G = H/K, h head size, X = W·G rows of a
key/value head, P pages, T positions of a page, N pages of a slot at most, S positions of a block, D
buffers. Sources: arXiv 1805.02867 (running softmax), arXiv 2309.06180 (pages).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels import LOG2_E, NEGATIVE
from models.kernels.page_blocks import (
    ANYWHERE,
    LANES,
    Blocks,
    Call,
    PageTiles,
    call_of,
    heads_of_rows,
    rows_by_head,
)

TABLE_BYTES = 512 << 10  # of page numbers in scalar memory, which has 1 MiB


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim % LANES:
        return (
            f"expected a head size that is a multiple of {LANES}, got {head_dim}; "
            "mend: use the portable attention"
        )
    if page_tokens % 64:
        return (
            f"expected pages of a multiple of 64 positions, got {page_tokens}; "
            "mend: use pages of 64 or 128 positions, or the portable attention"
        )
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return (
            f"expected float32 or bfloat16 keys and values, got {jnp.dtype(dtype).name}; "
            "mend: set Trainer.compute_dtype to one of them, or use the portable attention"
        )
    return None


def attend_pages(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    tiles: PageTiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Σ 2^(score − top) v, top and Σ 2^(score − top) over the first `length` positions of a slot.

    Returns float32 [B, W, H, h] and twice [B, W, H, 1]; 0, −1e30 and 0 if the length is 0.
    `table_BN` names the pages of a slot in order; entries after the live ones are not read. No
    length may exceed N·T. Raises ValueError with the reason of `takes`.
    """
    (B, W, H, h), (P, K, T, _), N = q_BWHh.shape, keys_PKTh.shape, table_BN.shape[1]
    assert H % K == 0 and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert q_BWHh.dtype == keys_PKTh.dtype == values_PKTh.dtype
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    if B * N * 4 > TABLE_BYTES and B > 1:
        halves = (slice(0, B // 2), slice(B // 2, B))
        more = dict(tiles=tiles, interpret=interpret)
        result = [
            attend_pages(q_BWHh[x], keys_PKTh, values_PKTh, table_BN[x], length_B[x], **more)
            for x in halves
        ]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *result)
    q_BKXh = rows_by_head(q_BWHh, K)
    call = call_of(q_BKXh, keys_PKTh, N, tiles)
    rows, sums = (call.of_slot(K, q_BKXh.shape[2], width) for width in (h, LANES))
    out_BKXh, sums_BKXl = call.run(
        partial(_kernel, call),
        (table_BN, length_B),
        [(rows, q_BKXh), (ANYWHERE, keys_PKTh), (ANYWHERE, values_PKTh)],
        [(spec, (B, *spec.block_shape[1:]), jnp.float32) for spec in (rows, sums)],
        name="page_attention",
        interpret=interpret,
    )
    sums_BWHl = heads_of_rows(sums_BKXl[..., :2], W, H)
    return heads_of_rows(out_BKXh, W, H), sums_BWHl[..., :1], sums_BWHl[..., 1:]


def _kernel(call: Call, *refs: Any) -> None:
    table_X, length_B, q_ref, keys_PKTh, values_PKTh, out_ref, sums_ref, *scratch = refs
    sources, (top_ref, total_ref) = (keys_PKTh, values_PKTh), scratch[2:4]
    attend_slot(call, table_X, length_B, q_ref, sources, out_ref.at[0], scratch)
    lane = jax.lax.broadcasted_iota(jnp.int32, top_ref.shape, 2)
    sums_ref[0] = jnp.where(lane == 0, top_ref[...], total_ref[...])


def attend_slot(
    call: Call,
    table_X: Any,
    length_B: Any,
    q_ref: Any,
    sources: tuple[Any, Any],
    out_ref: Any,
    scratch: Sequence[Any],
    entry: _Entry | None = None,
) -> None:
    """Attend from the current slot; leaves Σ 2^(score − top) v in `out_ref`, [K, X, h], float32."""
    key_buffers, value_buffers, top_ref, total_ref, state, semaphores = scratch
    buffers, each = (key_buffers, value_buffers), call.grid[1]
    core, i = pl.program_id(0), pl.program_id(1)
    slot, end = core * each + i, (core + 1) * each
    pages = Blocks(call, end, table_X, length_B, sources, buffers, semaphores, state)

    @pl.when(i == 0)
    def _() -> None:
        pages.begin(core * each)

    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
    top_ref[...] = jnp.full(top_ref.shape, NEGATIVE, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    def of_block(block: jax.Array, _: None) -> None:
        pages.fetch()
        live = length_B[slot] - block * call.block_tokens
        buffer = pages.take(live)
        is_last = block + 1 == pages.num_blocks(slot)
        if entry is not None:
            pl.when(is_last)(partial(entry.begin, slot, buffer))
        for head in range(call.num_kv_heads):
            keys_Sh, values_Sh = (
                x[buffer, :, head].reshape(call.block_tokens, call.head_dim) for x in buffers
            )
            _attend_block(head, live, q_ref, keys_Sh, values_Sh, out_ref, top_ref, total_ref)
        if entry is not None:
            pl.when(is_last)(partial(entry.end, slot, buffer))

    jax.lax.fori_loop(0, pages.num_blocks(slot), of_block, None)


def _attend_block(
    head: int,
    live: jax.Array,
    q_ref: Any,
    keys_Sh: jax.Array,
    values_Sh: jax.Array,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
) -> None:
    """Add the first `live` positions of a block to a head's running softmax."""
    q_Xh, h = q_ref[0, head], keys_Sh.shape[1]
    scores_XS = _product(q_Xh, keys_Sh, 1) * (h**-0.5 * LOG2_E)
    position_XS = jax.lax.broadcasted_iota(jnp.int32, scores_XS.shape, 1)
    scores_XS = jnp.where(position_XS < live, scores_XS, NEGATIVE)
    old_Xl = top_ref[head]
    top_Xl = jnp.maximum(old_Xl, jnp.round(jnp.max(scores_XS, axis=1, keepdims=True)))
    weights_XS = jnp.exp2(scores_XS - _wide(top_Xl, scores_XS.shape[1]))
    kept_Xl = jnp.exp2(old_Xl - top_Xl)
    top_ref[head] = top_Xl
    total_ref[head] = total_ref[head] * kept_Xl + jnp.sum(weights_XS, axis=1, keepdims=True)
    new_Xh = _product(weights_XS.astype(values_Sh.dtype), values_Sh, 0)
    out_ref[head] = out_ref[head] * _wide(kept_Xl, h) + new_Xh


def _wide(x_Xl: jax.Array, width: int) -> jax.Array:
    """Return `width` identical columns."""
    return jnp.concatenate([x_Xl] * (width // LANES), axis=-1)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Multiply x's last axis with one of y's."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = ((1,), (axis,)), ((), ())
    return jax.lax.dot_general(x, y, axes, precision, preferred_element_type=jnp.float32)


def append_and_attend(
    q_B1Hh: jax.Array,
    k_BKh: jax.Array,
    v_BKh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    tiles: PageTiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write a slot's entry at position `length` − 1, and attend to its first `length` positions.

    The entry is put into the last block in VMEM, and the tile of rows around it is copied to its
    page. Returns attention of the queries' dtype, [B, 1, H, h], and the pages, written in place.
    Slots of length 0 write nothing and get 0. No two slots may write to one page; positions after
    the entry in its page may change. Otherwise as `attend_pages`.
    """
    (B, _, H, h), (P, K, T, _), N = q_B1Hh.shape, keys_PKTh.shape, table_BN.shape[1]
    assert H % K == 0 and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert k_BKh.shape == v_BKh.shape == (B, K, h)
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    if B * N * 4 > TABLE_BYTES and B > 1:
        outs, more = [], dict(tiles=tiles, interpret=interpret)
        for x in (slice(0, B // 2), slice(B // 2, B)):
            new, pages = (q_B1Hh[x], k_BKh[x], v_BKh[x]), (keys_PKTh, values_PKTh)
            result = append_and_attend(*new, *pages, table_BN[x], length_B[x], **more)
            out, keys_PKTh, values_PKTh = result
            outs.append(out)
        return jnp.concatenate(outs), keys_PKTh, values_PKTh
    q_BKXh = rows_by_head(q_B1Hh, K)
    call = call_of(q_BKXh, keys_PKTh, N, tiles)
    rows, entry = call.of_slot(*q_BKXh.shape[1:]), call.of_slot(K, 1, h)
    stays = [(ANYWHERE, keys_PKTh), (ANYWHERE, values_PKTh)]
    out_BKXh, keys, values = call.run(
        partial(_append_kernel, call),
        (table_BN, length_B),
        [(rows, q_BKXh), (entry, k_BKh[:, :, None]), (entry, v_BKh[:, :, None]), *stays],
        [(spec, x.shape, x.dtype) for spec, x in ((rows, q_BKXh), *stays)],
        in_place={3: 1, 4: 2},
        scratch=[pltpu.VMEM(q_BKXh.shape[1:], jnp.float32), pltpu.SemaphoreType.DMA],
        name="page_append",
        interpret=interpret,
    )
    return heads_of_rows(out_BKXh, 1, H), keys, values


def _append_kernel(call: Call, *refs: Any) -> None:
    """One slot; pages are read and written in the results, which are the inputs' memory."""
    table_X, length_B, q_ref, k_ref, v_ref, _, _, out_ref, keys_PKTh, values_PKTh = refs[:10]
    *shared, sum_ref, semaphore = refs[10:]
    pages, total_ref = (keys_PKTh, values_PKTh), shared[3]
    entry = _Entry(call, table_X, length_B, (k_ref, v_ref), pages, shared[:2], semaphore)
    attend_slot(call, table_X, length_B, q_ref, pages, sum_ref, shared, entry)
    total = _wide(total_ref[...], call.head_dim)
    out = jnp.where(total > 0, sum_ref[...] / jnp.where(total > 0, total, 1.0), 0.0)
    out_ref[0] = out.astype(out_ref.dtype)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """The current slot's new entry, copied once the last block is in a buffer."""

    call: Call
    table_X: Any
    length_B: Any
    new: tuple[Any, Any]
    pages: tuple[Any, Any]
    buffers: Any
    semaphore: Any

    def begin(self, slot: jax.Array, buffer: jax.Array) -> None:
        row, tiles = self._row_and_tiles(slot, buffer)
        for new_ref, tile in zip(self.new, tiles, strict=True):
            old_KRh = tile[...]
            is_new = jax.lax.broadcasted_iota(jnp.int32, old_KRh.shape, 1) == row
            tile[...] = jnp.where(is_new, new_ref[0], old_KRh)
        for copy in self._copies(slot, buffer):
            copy.start()

    def end(self, slot: jax.Array, buffer: jax.Array) -> None:
        for copy in self._copies(slot, buffer):
            copy.wait()

    def _row_and_tiles(self, slot: jax.Array, buffer: jax.Array) -> tuple[jax.Array, list[Any]]:
        """Return the entry's row in its tile, and its tiles of keys and values."""
        nth, first, row = self._place(slot)
        page = jax.lax.rem(nth, self.call.tiles.block_pages)  # of the block
        return row, [x.at[buffer, page, :, pl.ds(first, self._rows)] for x in self.buffers]

    def _copies(self, slot: jax.Array, buffer: jax.Array) -> list[Any]:
        nth, first, _ = self._place(slot)
        page = self.table_X[slot * self.call.max_pages + nth]
        _, tiles = self._row_and_tiles(slot, buffer)
        return [
            pltpu.make_async_copy(tile, to.at[page, :, pl.ds(first, self._rows)], self.semaphore)
            for tile, to in zip(tiles, self.pages, strict=True)
        ]

    def _place(self, slot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return which of the slot's pages the entry is in, its tile's first row, its row there."""
        position, T = self.length_B[slot] - 1, self.call.page_tokens
        at = jax.lax.rem(position, T)
        first = jax.lax.div(at, self._rows) * self._rows
        return jax.lax.div(position, T), pl.multiple_of(first, self._rows), at - first

    @property
    def _rows(self) -> int:
        return 32 // self.call.dtype.itemsize  # of a tile, of 32 bytes a column
