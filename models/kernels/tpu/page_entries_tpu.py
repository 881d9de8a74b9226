"""Tokens that pages do not hold yet, in TPU kernels for attention to pages.

The kernels put such tokens into buffers of pages in VMEM. The new entry of a slot is written to its
page as well; the tokens of tree paths are not.
K key/value heads, h head size, S = `KEYS` positions of a page, Z tokens or pages, W tokens of a
window, R rows of a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from reprise.models.kernels.tpu.page_buffers_tpu import Pages
from reprise.models.kernels.tpu.softmax_tpu import FIRST, KEYS, product

_NO_TOKEN = 2**30


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The tokens that the pages do not hold: keys and values, and the places of paths.

    A page of a path gets its tokens by products with a matrix of ones and zeros, which are exact,
    `WINDOW` tokens at a time, from the first missing token on.
    """

    source_ZS: Any
    new: tuple[Any, Any]

    WINDOW = KEYS + 16  # tokens of a page, from a multiple of 16 on

    @staticmethod
    def inputs(source: Sequence[jax.Array], dtype: Any) -> list[tuple[pl.BlockSpec, jax.Array]]:
        """Return the inputs of a kernel, which are whole in VMEM."""
        if not source:
            return []
        source_SE, *new = source
        over = NewTokens.WINDOW - len(new[0]) % -16
        new_KZh = [jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, over), (0, 0))) for x in new]
        token_SE = jnp.where(source_SE < len(new[0]), source_SE, -1)
        arrays = token_SE.reshape(-1, KEYS), *(x.astype(dtype) for x in new_KZh)
        mode = pl.Buffered(1)
        return [
            (pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n, pipeline_mode=mode), x)
            for x in arrays
        ]

    def put(self, pages: Pages, page: jax.Array, buffer: jax.Array, i: jax.Array) -> None:
        """Put the tokens of a page of the tile into its buffer, after the positions held before."""
        tile = pages.tile
        nth, path = pages.place(tile, page)
        row = (pages.first_path(tile) + path) * pages.call.path_pages + nth
        token_1S = self.source_ZS[pl.ds(row, 1)]
        held = jnp.where(nth == 0, pages.held(tile), 0)
        for x in pages.buffers:
            old_KSh = x[buffer, i]
            is_held_KSh = jax.lax.broadcasted_iota(jnp.int32, old_KSh.shape, 1) < held
            x[buffer, i] = jnp.where(is_held_KSh, old_KSh, 0).astype(old_KSh.dtype)

        def first(least: Any) -> jax.Array:
            return jnp.min(jnp.where(token_1S >= least, token_1S, _NO_TOKEN))

        def of_window(token: jax.Array) -> jax.Array:
            begin = pl.multiple_of(jax.lax.div(token, 16) * 16, 16)
            token_WS = begin + jax.lax.broadcasted_iota(jnp.int32, (self.WINDOW, KEYS), 0)
            one_WS = jnp.where(token_WS == token_1S, 1.0, 0.0).astype(pages.call.dtype)
            for x, new in zip(pages.buffers, self.new, strict=True):
                for head in range(pages.call.num_kv_heads):
                    some_Sh = product(one_WS, new[head, pl.ds(begin, self.WINDOW)], FIRST)
                    x[buffer, i, head] += some_Sh.astype(pages.call.dtype)
            return first(begin + self.WINDOW)

        jax.lax.while_loop(lambda token: token < _NO_TOKEN, of_window, first(0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The new entry of the current slot, copied once the last page of the slot is in a buffer."""

    new: tuple[Any, Any]
    semaphore: Any

    def begin(self, pages: Pages, buffer: jax.Array) -> None:
        row, blocks = self._row_and_blocks(pages, buffer)
        for new_ref, block in zip(self.new, blocks, strict=True):
            old_KRh = block[...]
            is_new = jax.lax.broadcasted_iota(jnp.int32, old_KRh.shape, 1) == row
            block[...] = jnp.where(is_new, new_ref[0], old_KRh)
        for copy in self._copies(pages, buffer):
            copy.start()

    def end(self, pages: Pages, buffer: jax.Array) -> None:
        for copy in self._copies(pages, buffer):
            copy.wait()

    def _row_and_blocks(self, pages: Pages, buffer: jax.Array) -> tuple[jax.Array, list[Any]]:
        """Return the row of the entry in its copy, and the copied rows of keys and values."""
        nth, first, row = self._place(pages)
        at = jax.lax.rem(nth, pages.call.buffers.pages)
        size = self._rows(pages)
        return row, [x.at[buffer, at, :, pl.ds(first, size)] for x in pages.buffers]

    def _copies(self, pages: Pages, buffer: jax.Array) -> list[Any]:
        nth, first, _ = self._place(pages)
        page = pages.table_X[pages.tile * pages.call.max_pages + nth]
        _, blocks = self._row_and_blocks(pages, buffer)
        where = page, slice(None), pl.ds(first, self._rows(pages))
        return [
            pltpu.make_async_copy(block, to.at[where], self.semaphore)
            for block, to in zip(blocks, pages.sources, strict=True)
        ]

    def _place(self, pages: Pages) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the page of the entry in its slot, the first row of its copy, its row there."""
        position = pages.last(pages.tile) - 1
        size = self._rows(pages)
        at = jax.lax.rem(position, KEYS)
        first = jax.lax.div(at, size) * size
        return jax.lax.div(position, KEYS), pl.multiple_of(first, size), at - first

    def _rows(self, pages: Pages) -> int:
        return 32 // pages.call.dtype.itemsize  # of a copy, with 32 bytes per column
