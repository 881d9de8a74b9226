"""Attention of a round's nodes to their slots' pages of keys and values: the kernel for TPUs.

Slots are taken in turn. A slot's pages come from HBM in blocks, each into one of several
buffers: while one block is computed, the next ones are on their way, those of the next slots too.
Only pages with live positions are read. All queries of a key/value head are rows of one product.

    score = q·k/√h · log₂e,   top = round(max score)
    total = Σ 2^(score − top),   out = Σ 2^(score − top) v

With a whole top the weights' mantissas, and so their rounding to bfloat16, are those of any other.

B slots, W nodes of a slot, H heads, K key/value heads, G = H/K, h head size, X = W·G rows of a
key/value head, P pages, T positions of a page, N pages of a slot at
most, S positions of a block, D buffers.
Sources: arXiv 1805.02867 (running softmax), arXiv 2309.06180 (pages).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from models.kernels.page_blocks import ANYWHERE, LANES, Blocks, Call, call_of
from models.kernels.tiles import PageTiles

LOG2_E = math.log2(math.e)
NEGATIVE = -1e30  # the top of a slot without positions, as in models.attention
TABLE_BYTES = 512 << 10  # of page numbers in scalar memory, which has 1 MiB


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else one sentence that says why not."""
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
    priced_positions: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Σ 2^(score − top) v, top and Σ 2^(score − top) over the first `length` positions of a slot.

    Returns float32 [B, W, H, h] and twice [B, W, H, 1]; 0, −1e30 and 0 where the length is 0.
    `table_BN` names the pages of a slot in order; entries behind the live ones are not read.
    Products of float32 have the highest precision, those of bfloat16 are summed in float32.
    `priced_positions` is the length that the compiler is told to expect of a slot, by default N·T.
    Raises ValueError where `takes` says why. The lengths must not exceed N·T.
    Source: docs/architecture.md, "The round".
    """
    (B, W, H, h), (P, K, T, _), N = q_BWHh.shape, keys_PKTh.shape, table_BN.shape[1]
    assert H % K == 0 and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert q_BWHh.dtype == keys_PKTh.dtype == values_PKTh.dtype
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    if B * N * 4 > TABLE_BYTES and B > 1:
        halves = (slice(0, B // 2), slice(B // 2, B))
        more = dict(tiles=tiles, interpret=interpret, priced_positions=priced_positions)
        found = [
            attend_pages(q_BWHh[x], keys_PKTh, values_PKTh, table_BN[x], length_B[x], **more)
            for x in halves
        ]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
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
        priced_positions=priced_positions,
    )
    sums_BWHl = heads_of_rows(sums_BKXl[..., :2], W, H)
    return heads_of_rows(out_BKXh, W, H), sums_BWHl[..., :1], sums_BWHl[..., 1:]


def _kernel(
    call: Call,
    table_X: Any,
    length_B: Any,
    q_ref: Any,
    keys_PKTh: Any,
    values_PKTh: Any,
    out_ref: Any,
    sums_ref: Any,
    *scratch: Any,
) -> None:
    sources, (top_ref, total_ref) = (keys_PKTh, values_PKTh), scratch[2:4]
    attend_slot(call, table_X, length_B, q_ref, sources, out_ref.at[0], scratch)
    lane = jax.lax.broadcasted_iota(jnp.int32, top_ref.shape, 2)
    sums_ref[0] = jnp.where(lane == 0, top_ref[...], total_ref[...])


class Entry(Protocol):
    """An entry that becomes the last of its slot: written in a buffer, and from there to its page.

    `begin` is called once the last block is in a buffer, `end` when it has been attended to.
    """

    def begin(self, slot: jax.Array, buffer: jax.Array) -> None: ...

    def end(self, slot: jax.Array, buffer: jax.Array) -> None: ...


def attend_slot(
    call: Call,
    table_X: Any,
    length_B: Any,
    q_ref: Any,
    sources: tuple[Any, Any],
    out_ref: Any,
    scratch: Sequence[Any],
    entry: Entry | None = None,
) -> None:
    """Attend from the slot in turn: its blocks one after the other, into the running softmax.

    Leaves Σ 2^(score − top) v in `out_ref`, float32 [K, X, h], tops and totals in the scratch.
    """
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
    """Add a block of which the first `live` positions count to a head's running softmax."""
    q_Xh, h = q_ref[0, head], keys_Sh.shape[1]
    scores_XS = _product(q_Xh, keys_Sh, 1) * (h**-0.5 * LOG2_E)
    position_XS = jax.lax.broadcasted_iota(jnp.int32, scores_XS.shape, 1)
    scores_XS = jnp.where(position_XS < live, scores_XS, NEGATIVE)
    old_Xl = top_ref[head]
    top_Xl = jnp.maximum(old_Xl, jnp.round(jnp.max(scores_XS, axis=1, keepdims=True)))
    weights_XS = jnp.exp2(scores_XS - wide(top_Xl, scores_XS.shape[1]))
    kept_Xl = jnp.exp2(old_Xl - top_Xl)
    top_ref[head] = top_Xl
    total_ref[head] = total_ref[head] * kept_Xl + jnp.sum(weights_XS, axis=1, keepdims=True)
    new_Xh = _product(weights_XS.astype(values_Sh.dtype), values_Sh, 0)
    out_ref[head] = out_ref[head] * wide(kept_Xl, h) + new_Xh


def wide(x_Xl: jax.Array, width: int) -> jax.Array:
    """Return columns that are all the same, `width` of them."""
    return jnp.concatenate([x_Xl] * (width // LANES), axis=-1)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Multiply x's last axis with one of y's."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def rows_by_head(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, X, h]."""
    B, W, _, h = q_BWHh.shape
    q_BKWGh = q_BWHh.reshape(B, W, num_kv_heads, -1, h).transpose(0, 2, 1, 3, 4)
    return q_BKWGh.reshape(B, num_kv_heads, -1, h)


def heads_of_rows(x_BKXi: jax.Array, num_nodes: int, num_heads: int) -> jax.Array:
    """Return [B, W, H, i] of rows."""
    B, K, _, i = x_BKXi.shape
    G = num_heads // K
    x_BKWGi = x_BKXi[:, :, : num_nodes * G].reshape(B, K, num_nodes, G, i)
    return x_BKWGi.transpose(0, 2, 1, 3, 4).reshape(B, num_nodes, num_heads, i)
