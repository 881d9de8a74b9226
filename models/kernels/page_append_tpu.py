"""Decoding's attention to pages, which writes each slot's new entry on its way: the TPU kernel.

The block that has a slot's last position is in VMEM anyway (`page_attention_tpu`). The new entry is
put there, attended to with the rest, and the tile of rows around it is copied to its page. XLA's
own write would be one row at a time, in a program of its own before attention.

    keys[page, :, t] = k,   values[page, :, t] = v,   out = softmax(q·keys/√h)·values

Shapes are those of `page_attention_tpu`, with one node a slot: X = G.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.page_attention_tpu import (
    TABLE_BYTES,
    attend_slot,
    heads_of_rows,
    rows_by_head,
    takes,
    wide,
)
from models.kernels.page_blocks import ANYWHERE, Call, call_of
from models.kernels.tiles import PageTiles


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
    priced_positions: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write a slot's entry at position `length` − 1, and attend to its first `length` positions.

    Returns attention of the queries' dtype, [B, 1, H, h], and the pages, which are written in
    place. Slots of length 0 write nothing and get 0. No two slots may write to one page; what lies
    behind the entry in its page may change.
    Everything else is as in `page_attention_tpu.attend_pages`, and so are the errors.
    """
    (B, _, H, h), (P, K, T, _), N = q_B1Hh.shape, keys_PKTh.shape, table_BN.shape[1]
    assert H % K == 0 and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert k_BKh.shape == v_BKh.shape == (B, K, h)
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    if B * N * 4 > TABLE_BYTES and B > 1:
        outs, more = [], dict(tiles=tiles, interpret=interpret, priced_positions=priced_positions)
        for x in (slice(0, B // 2), slice(B // 2, B)):
            new, pages = (q_B1Hh[x], k_BKh[x], v_BKh[x]), (keys_PKTh, values_PKTh)
            found = append_and_attend(*new, *pages, table_BN[x], length_B[x], **more)
            out, keys_PKTh, values_PKTh = found
            outs.append(out)
        return jnp.concatenate(outs), keys_PKTh, values_PKTh
    q_BKXh = rows_by_head(q_B1Hh, K)
    call = call_of(q_BKXh, keys_PKTh, N, tiles)
    rows, entry = call.of_slot(*q_BKXh.shape[1:]), call.of_slot(K, 1, h)
    stays = [(ANYWHERE, keys_PKTh), (ANYWHERE, values_PKTh)]
    out_BKXh, keys, values = call.run(
        partial(_kernel, call),
        (table_BN, length_B),
        [(rows, q_BKXh), (entry, k_BKh[:, :, None]), (entry, v_BKh[:, :, None]), *stays],
        [(spec, x.shape, x.dtype) for spec, x in ((rows, q_BKXh), *stays)],
        in_place={3: 1, 4: 2},
        scratch=[pltpu.VMEM(q_BKXh.shape[1:], jnp.float32), pltpu.SemaphoreType.DMA],
        name="page_append",
        interpret=interpret,
        priced_positions=priced_positions,
    )
    return heads_of_rows(out_BKXh, 1, H), keys, values


def _kernel(
    call: Call,
    table_X: Any,
    length_B: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    _keys: Any,
    _values: Any,
    out_ref: Any,
    keys_PKTh: Any,
    values_PKTh: Any,
    *scratch: Any,
) -> None:
    """One slot; pages are read and written where the results are, which is where they came from."""
    *shared, sum_ref, semaphore = scratch
    pages, total_ref = (keys_PKTh, values_PKTh), shared[3]
    entry = _Entry(call, table_X, length_B, (k_ref, v_ref), pages, shared[:2], semaphore)
    attend_slot(call, table_X, length_B, q_ref, pages, sum_ref, shared, entry)
    total = wide(total_ref[...], call.head_dim)
    out = jnp.where(total > 0, sum_ref[...] / jnp.where(total > 0, total, 1.0), 0.0)
    out_ref[0] = out.astype(out_ref.dtype)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """The new entry of the slot in turn, on its way to its page."""

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
        """Return the entry's row in its tile, and the tile in the buffers of keys and values."""
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
        """The rows of a tile, of 32 bytes a column."""
        return 32 // self.call.dtype.itemsize
