"""Attention of tokens to pages of keys and values: the kernels for TPUs.

`append_and_attend` also writes a new entry of each slot. Tiles of tokens of a slot are processed in
sequence; their pages come through buffers (`page_buffers_tpu`). All queries of a key/value head are
rows of one product, and a page is a block of keys. Formulas: see `softmax_tpu`.

B slots, N tiles, H heads, K key/value heads, G = H/K, h head size, X rows of a tile and key/value
head, P pages, S = `KEYS` positions of a page, M pages of a slot at most. Sources: arXiv 1805.02867
(running softmax), arXiv 2309.06180 (pages).
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

from reprise.models.kernels.shared.page_reads import Reads, heads_of_rows, rows_by_head
from reprise.models.kernels.shared.powers import NEGATIVE
from reprise.models.kernels.tpu.page_buffers_tpu import ANYWHERE, Buffers, Call, Pages
from reprise.models.kernels.tpu.page_entries_tpu import Entry, NewTokens
from reprise.models.kernels.tpu.softmax_tpu import KEYS, LANES, Softmax, scores

_NO_LAST = 2**30  # a position after all others
TABLE_BYTES = 512 << 10  # of page numbers in scalar memory, which has 1 MiB
TOKEN_BYTES = 32 << 20  # keys and values of tokens; TPUs since v5e have 64 MiB of VMEM and more


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim % LANES:
        return (
            f"expected a head size that is a multiple of {LANES}, got {head_dim}; "
            "fix: use the portable attention"
        )
    if page_tokens != KEYS:
        return (
            f"expected pages of {KEYS} positions, got {page_tokens}; "
            f"fix: set Engine.page_tokens to {KEYS}, or use the portable attention"
        )
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return (
            f"expected float32 or bfloat16 keys and values, got {jnp.dtype(dtype).name}; "
            "fix: set Trainer.compute_dtype to one of them, or use the portable attention"
        )
    return None


def why_too_large(
    table: tuple[int, int], num_tokens: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> str | None:
    """Return why the memories of a core do not hold the page table, or new tokens; or None."""
    num_slots, max_pages = table
    if not _takes_table(table):
        return (
            f"expected slots of at most {TABLE_BYTES // 4:,} pages together on a device, got "
            f"{num_slots:,} of {max_pages:,}"
        )
    num_bytes = 2 * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize
    if num_tokens * num_bytes > TOKEN_BYTES:
        return (
            f"expected at most {TOKEN_BYTES // num_bytes:,} tokens of drafts, or of prompts, in a "
            f"round on devices with {num_kv_heads} key/value heads, got {num_tokens:,}"
        )
    return None


def _takes_table(table: tuple[int, ...]) -> bool:
    return 4 * table[0] * table[1] <= TABLE_BYTES


def attend_tiles(
    q_NKXh: jax.Array,
    keys_PKSh: jax.Array,
    values_PKSh: jax.Array,
    table_BM: jax.Array,
    position_NX: jax.Array,
    path_NX: jax.Array,
    reads: Reads,
    source: Sequence[jax.Array] = (),
    *,
    is_partial: bool = False,
    buffers: Buffers | None = None,
    interpret: Any = None,
) -> Any:
    """Return the attention of tiles, [N, K, X, h] in the dtype of the queries.

    A row sees the whole pages of its tile, and other pages of its path up to its position. `source`
    has the tokens at the positions of paths, [S, E], −1 for positions that the last page of a slot
    holds, and the keys and values of the tokens, [Z, K, h]. With `is_partial`, return the softmax
    instead, float32 [N, K, X, h] and [N, K, X, l]: the top in lane 0, the total in other lanes.
    Table entries after the live entries are not read. Raises ValueError with the reason of `takes`.
    """
    N, K, X, h = q_NKXh.shape
    P, _, S, _ = keys_PKSh.shape
    assert values_PKSh.shape == keys_PKSh.shape == (P, K, S, h)
    assert q_NKXh.dtype == keys_PKSh.dtype == values_PKSh.dtype
    if why := takes(h, S, keys_PKSh.dtype):
        raise ValueError(why)
    call = Call.of(q_NKXh, table_BM, reads, buffers)
    rows = call.of_tile(K, X, h)
    sums = call.of_tile(K, X, LANES)
    numbers = call.of_tile(X, 2)
    number_NX2 = jnp.stack([position_NX, path_NX], axis=2)
    pages = [(ANYWHERE, keys_PKSh), (ANYWHERE, values_PKSh)]
    result = [(rows, q_NKXh.shape, q_NKXh.dtype)]
    if is_partial:
        result = [(rows, q_NKXh.shape, jnp.float32), (sums, (N, K, X, LANES), jnp.float32)]
    out = call.run(
        partial(_kernel, call, len(result)),
        table_BM,
        reads,
        [(rows, q_NKXh), (numbers, number_NX2), *pages],
        result,
        resident=NewTokens.inputs(source, q_NKXh.dtype),
        name="page_attention",
        interpret=interpret or False,
    )
    return out if is_partial else out[0]


def _kernel(call: Call, num_results: int, *refs: Any) -> None:
    table_X, scalars_X, q_ref, number_ref, *sources = refs[:6]
    rest = refs[6:]
    tokens = None
    if call.path_pages:
        source_ZS, *new = rest[:3]
        rest = rest[3:]
        tokens = NewTokens(source_ZS, tuple(new))
    out_ref, *sums_ref = rest[:num_results]
    rest = rest[num_results:]
    keys, values, *softmax, state, copied = rest
    pages = Pages.of_core(call, table_X, scalars_X, tuple(sources), (keys, values), copied, state)
    tile = _Tile(pages, q_ref, number_ref[0], tuple(softmax), tokens=tokens)
    tile.attend()
    for head in range(call.num_kv_heads):
        one = tile.held(head)
        if not sums_ref:
            out_ref[0, head] = one.attention().astype(out_ref.dtype)
            continue
        lane_Xl = jax.lax.broadcasted_iota(jnp.int32, one.top_Xl.shape, 1)
        out_ref[0, head] = one.sum_Xh
        sums_ref[0][0, head] = jnp.where(lane_Xl == 0, one.top_Xl, one.total())


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The current tile: its pages, queries, positions and paths of rows, and softmax by head."""

    pages: Pages
    q_ref: Any
    number_X2: jax.Array
    softmax: tuple[Any, Any, Any]
    entry: Entry | None = None
    tokens: NewTokens | None = None

    def attend(self) -> None:
        """Attend to all pages, and store the softmax of each head."""
        pages = self.pages
        call = self.pages.call
        pl.when(pl.program_id(1) == 0)(pages.begin)
        for head in range(call.num_kv_heads):
            self._hold(head, Softmax.over_none(call.num_rows, call.head_dim))
        num_steps = pl.cdiv(pages.num(pages.tile), call.buffers.pages)
        jax.lax.fori_loop(0, num_steps, self._of_buffer, None)

    def held(self, head: int) -> Softmax:
        return Softmax(*(ref[head] for ref in self.softmax))

    def _hold(self, head: int, softmax: Softmax) -> None:
        for ref, x in zip(self.softmax, softmax, strict=True):
            ref[head] = x

    def _of_buffer(self, step: jax.Array, _: None) -> None:
        pages = self.pages
        n = self.pages.call.buffers.pages
        pages.fetch()
        first = step * n
        buffer = pages.take(first)
        left = pages.num(pages.tile) - first
        is_whole = first + n <= pages.whole(pages.tile)
        if self.entry is not None:
            pl.when(left <= n)(partial(self.entry.begin, pages, buffer))
        pl.when(is_whole)(partial(self._whole, buffer))
        one = partial(self._masked, first, buffer)
        all_masked = partial(jax.lax.fori_loop, 0, jnp.minimum(left, n), one, None)
        pl.when(jnp.logical_not(is_whole))(all_masked)
        if self.entry is not None:
            pl.when(left <= n)(partial(self.entry.end, pages, buffer))

    def _whole(self, buffer: jax.Array) -> None:
        """Attend to all pages of a buffer, which every row sees in full."""
        for head in range(self.pages.call.num_kv_heads):
            keys_Yh, values_Yh = (
                x[buffer, :, head].reshape(-1, x.shape[-1]) for x in self.pages.buffers
            )
            scores_XY = scores(self.q_ref[0, head], keys_Yh)
            self._hold(head, self.held(head).with_blocks(scores_XY, values_Yh))

    def _masked(self, first: jax.Array, buffer: jax.Array, i: jax.Array, _: None) -> None:
        """Attend to page i of a buffer; rows may see only some of its positions."""
        pages = self.pages
        page = first + i
        whole = pages.whole(pages.tile)
        nth, path = pages.place(pages.tile, page)
        is_whole = page < whole
        if self.tokens is not None:
            pl.when(jnp.logical_not(is_whole))(partial(self.tokens.put, pages, page, buffer, i))
        last_X1 = jnp.where(self.number_X2[:, 1:] == path, self.number_X2[:, :1], -1)
        last_X1 = jnp.where(is_whole, _NO_LAST, last_X1)
        for head in range(pages.call.num_kv_heads):
            keys_Sh, values_Sh = (x[buffer, i, head] for x in pages.buffers)
            scores_XS = scores(self.q_ref[0, head], keys_Sh)
            lane_XS = jax.lax.broadcasted_iota(jnp.int32, scores_XS.shape, 1)
            is_seen_XS = (whole + nth) * KEYS + lane_XS <= last_X1
            scores_XS = jnp.where(is_seen_XS, scores_XS, NEGATIVE)
            self._hold(head, self.held(head).with_blocks(scores_XS, values_Sh))


def attend_pages(
    q_BWHh: jax.Array,
    keys_PKSh: jax.Array,
    values_PKSh: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    buffers: Buffers | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return Σ 2^(score − top) v, top and Σ 2^(score − top) over `length` positions of each slot.

    They are float32 [B, W, H, h] and twice [B, W, H, 1]; 0, −1e30 and 0 if the length is 0. No
    length may exceed M·S. Otherwise as `attend_tiles`.
    """
    B, W, H, _ = q_BWHh.shape
    K = keys_PKSh.shape[1]
    assert H % K == 0
    options: dict[str, Any] = dict(buffers=buffers, interpret=interpret)
    if halves := _halves(table_BM):
        result = [
            attend_pages(q_BWHh[x], keys_PKSh, values_PKSh, table_BM[x], length_B[x], **options)
            for x in halves
        ]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *result)
    q_BKXh = rows_by_head(q_BWHh, K)
    last_BX = jnp.broadcast_to(length_B[:, None] - 1, (B, q_BKXh.shape[2])).astype(jnp.int32)
    reads = Reads(jnp.arange(B), length_B, length_B)
    out_BKXh, sums_BKXl = attend_tiles(
        q_BKXh,
        keys_PKSh,
        values_PKSh,
        table_BM,
        last_BX,
        jnp.zeros_like(last_BX),
        reads,
        is_partial=True,
        **options,
    )
    sums_BWHl = heads_of_rows(sums_BKXl[..., :2], W, H)
    return heads_of_rows(out_BKXh, W, H), sums_BWHl[..., :1], sums_BWHl[..., 1:]


def _halves(table_BM: jax.Array) -> tuple[slice, ...]:
    """Return halves of the slots if scalar memory does not hold the whole table, else ()."""
    B = len(table_BM)
    return () if _takes_table(table_BM.shape) or B == 1 else (slice(0, B // 2), slice(B // 2, B))


def append_and_attend(
    q_B1Hh: jax.Array,
    k_BKh: jax.Array,
    v_BKh: jax.Array,
    keys_PKSh: jax.Array,
    values_PKSh: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    buffers: Buffers | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the entry of a slot at position `length` − 1; attend to its first `length` positions.

    The entry is put into the last page in VMEM, and the tile of rows around the entry is copied to
    the page. Returns attention in the dtype of the queries, [B, 1, H, h], and the pages, written in
    place. Slots of length 0 write nothing and get 0. No two slots may write to one page; positions
    after the entry in its page may change. Otherwise as `attend_pages`.
    """
    B, _, H, h = q_B1Hh.shape
    P, K, S, _ = keys_PKSh.shape
    assert H % K == 0 and values_PKSh.shape == keys_PKSh.shape == (P, K, S, h)
    assert k_BKh.shape == v_BKh.shape == (B, K, h)
    if why := takes(h, S, keys_PKSh.dtype):
        raise ValueError(why)
    options: dict[str, Any] = dict(buffers=buffers, interpret=interpret)
    if halves := _halves(table_BM):
        outs = []
        for x in halves:
            result = append_and_attend(
                q_B1Hh[x],
                k_BKh[x],
                v_BKh[x],
                keys_PKSh,
                values_PKSh,
                table_BM[x],
                length_B[x],
                **options,
            )
            out, keys_PKSh, values_PKSh = result
            outs.append(out)
        return jnp.concatenate(outs), keys_PKSh, values_PKSh
    q_BKXh = rows_by_head(q_B1Hh, K)
    reads = Reads(jnp.arange(B), length_B, length_B)
    call = Call.of(q_BKXh, table_BM, reads, buffers)
    rows = call.of_tile(*q_BKXh.shape[1:])
    entry = call.of_tile(K, 1, h)
    stays = [(ANYWHERE, keys_PKSh), (ANYWHERE, values_PKSh)]
    out_BKXh, keys, values = call.run(
        partial(_append_kernel, call),
        table_BM,
        reads,
        [(rows, q_BKXh), (entry, k_BKh[:, :, None]), (entry, v_BKh[:, :, None]), *stays],
        [(spec, x.shape, x.dtype) for spec, x in ((rows, q_BKXh), *stays)],
        in_place={3: 1, 4: 2},
        scratch=[pltpu.SemaphoreType.DMA],
        name="page_append",
        interpret=interpret,
    )
    return heads_of_rows(out_BKXh, 1, H), keys, values


def _append_kernel(call: Call, *refs: Any) -> None:
    """Process one slot; pages are read and written in the results, which alias the inputs."""
    table_X, scalars_X, q_ref, k_ref, v_ref, _, _, out_ref, *sources = refs[:10]
    keys, values, *softmax, state, copied, semaphore = refs[10:]
    pages = Pages.of_core(call, table_X, scalars_X, tuple(sources), (keys, values), copied, state)
    numbers = pages.last(pages.tile) - 1, 0
    number_X2 = jnp.concatenate([jnp.full((call.num_rows, 1), x, jnp.int32) for x in numbers], 1)
    tile = _Tile(pages, q_ref, number_X2, tuple(softmax), Entry((k_ref, v_ref), semaphore))
    tile.attend()
    for head in range(call.num_kv_heads):
        out_ref[0, head] = tile.held(head).attention().astype(out_ref.dtype)
