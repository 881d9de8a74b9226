"""Attention of a round's nodes to their slots' pages of keys and values: the kernel for Hopper.

A thread block has one part of a slot's pages, one key/value head and up to 64 rows of its queries.
Pages come by TMA into several buffers: while one is computed, the next ones are copied. Parts of a
slot are joined by their maxima and sums. Formulas and shapes: see `page_attention_tpu`; n tiles of
R = 64 of a head's rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from models.kernels import LOG2_E, NEGATIVE
from models.kernels.hopper import ROWS, GpuPageTiles, WarpGroup, gpu_page_tiles, shared_tiles
from models.kernels.page_blocks import heads_of_rows, rows_by_head


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim not in (64, 128):
        return (
            f"expected a head size of 64 or 128, got {head_dim}; mend: use the portable attention"
        )
    if page_tokens not in (64, 128):
        return (
            f"expected pages of 64 or 128 positions, got {page_tokens}; "
            "mend: use pages of 64 or 128 positions, or the portable attention"
        )
    if jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return (  # tensor cores multiply float32 as TF32
            f"expected bfloat16 keys and values, got {jnp.dtype(dtype).name}; "
            "mend: set Trainer.compute_dtype to bfloat16, or use the portable attention"
        )
    return None


def attend_pages(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    tiles: GpuPageTiles | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `page_attention_tpu.attend_pages`."""
    (B, W, H, h), (P, K, T, _), N = q_BWHh.shape, keys_PKTh.shape, table_BN.shape[1]
    assert H % K == 0 and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert q_BWHh.dtype == keys_PKTh.dtype == values_PKTh.dtype
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    q_BKnRh = _row_tiles(q_BWHh, K)
    n = q_BKnRh.shape[2]
    tiles = tiles or gpu_page_tiles(B * K * n, N, T, h)
    call = _Call(B, K, h, T, N, tiles, WarpGroup(bool(interpret)))
    varying = jax.typeof(q_BWHh).manual_axis_type  # under shard_map results vary as queries do
    shape = tiles.parts, B, K, n, ROWS
    result = plgpu.kernel(
        partial(_kernel, call),
        out_type=[
            jax.ShapeDtypeStruct(x, jnp.float32, manual_axis_type=varying)
            for x in ((*shape, h), shape, shape)
        ],
        scratch_types=call.scratch(),
        grid=(n, K, tiles.parts, B),
        grid_names=("tile", "head", "part", "slot"),
        interpret=interpret,
        kernel_name="page_attention",
    )(
        table_BN.reshape(-1).astype(jnp.int32),
        jnp.minimum(length_B, N * T).astype(jnp.int32),
        q_BKnRh,
        keys_PKTh,
        values_PKTh,
    )
    out, top, total = _joined(*result)
    results = out, top[..., None], total[..., None]
    return tuple(heads_of_rows(x.reshape(B, K, n * ROWS, -1), W, H) for x in results)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The sizes of a call."""

    num_slots: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    max_pages: int
    tiles: GpuPageTiles
    registers: WarpGroup

    def clear(self, values_Th: Any, live: jax.Array) -> None:
        """Set values after the live ones to 0: a weight of 0 times NaN would be NaN."""

        @pl.when(live < self.page_tokens)
        def _() -> None:
            for i, j in itertools.product(*(range(0, n, ROWS) for n in values_Th.shape)):
                some_RR = values_Th.at[i : i + ROWS, j : j + ROWS]
                is_live_RR = i + self.registers.positions(some_RR.shape, axis=0) < live
                some_RR[...] = jnp.where(is_live_RR, self.registers.laid_out(some_RR[...]), 0)
            plgpu.commit_smem()

    def scratch(self) -> list[Any]:
        """Return queries, keys and values in shared memory, and barriers of copies."""
        D, T, h = self.tiles.buffers, self.page_tokens, self.head_dim
        barriers = [plgpu.Barrier(num_barriers=many) for many in (1, D, D)]
        return [shared_tiles(ROWS, h), *[shared_tiles(D, T, h)] * 2, *barriers]


def _kernel(call: _Call, *refs: Any) -> None:
    """One part of a slot: its pages in turn, each into the running softmax."""
    table_X, length_B, q_BKnRh, keys_PKTh, values_PKTh, *results = refs[:-6]
    q_Rh, keys_DTh, values_DTh, of_queries, of_keys, of_values = refs[-6:]
    tile, head, part, slot = (jax.lax.axis_index(x) for x in ("tile", "head", "part", "slot"))
    T, h, D = call.page_tokens, call.head_dim, call.tiles.buffers
    length = length_B[slot]
    num_pages = pl.cdiv(length, T)
    each = pl.cdiv(num_pages, call.tiles.parts)
    first = part * each
    steps = jnp.maximum(jnp.minimum(num_pages - first, each), 0)

    def fetch(step: jax.Array) -> None:
        @pl.when(step < steps)
        def _() -> None:
            page, buffer = table_X[slot * call.max_pages + first + step], jax.lax.rem(step, D)
            for pages, to, barrier in (
                (keys_PKTh, keys_DTh, of_keys),
                (values_PKTh, values_DTh, of_values),
            ):
                plgpu.copy_gmem_to_smem(pages.at[page, head], to.at[buffer], barrier.at[buffer])

    plgpu.copy_gmem_to_smem(q_BKnRh.at[slot, head, tile], q_Rh, of_queries)
    for step in range(D):
        fetch(jnp.int32(step))
    plgpu.barrier_wait(of_queries)

    def of_page(step: jax.Array, carry: tuple) -> tuple:
        buffer = jax.lax.rem(step, D)
        live = length - (first + step) * T
        plgpu.barrier_wait(of_keys.at[buffer])
        products_RT = call.registers.product(q_Rh, keys_DTh.at[buffer], transposed=True)
        scores_RT = products_RT * (h**-0.5 * LOG2_E)
        weights_RT, (out_Rh, top_R, total_R) = _softmax(call, scores_RT, live, carry)
        plgpu.barrier_wait(of_values.at[buffer])
        call.clear(values_DTh.at[buffer], live)
        new_Rh = call.registers.product(weights_RT.astype(jnp.bfloat16), values_DTh.at[buffer])
        fetch(step + D)
        return out_Rh + new_Rh, top_R, total_R

    numbers = ((ROWS, h), 0.0), ((ROWS,), NEGATIVE), ((ROWS,), 0.0)
    start = tuple(call.registers.full(*x) for x in numbers)
    result = jax.lax.fori_loop(0, steps, of_page, start)
    for to, x in zip(results, result, strict=True):
        to[part, slot, head, tile] = x


def _softmax(
    call: _Call, scores_RT: jax.Array, live: jax.Array, carry: tuple
) -> tuple[jax.Array, tuple]:
    """Return the weights of a page's first `live` positions, and the updated running softmax."""
    out_Rh, old_R, total_R = carry
    position_RT = call.registers.positions(scores_RT.shape, axis=1)
    scores_RT = jnp.where(position_RT < live, scores_RT, NEGATIVE)
    top_R = jnp.maximum(old_R, jnp.round(scores_RT.max(axis=1)))
    weights_RT = jnp.exp2(scores_RT - jax.lax.broadcast_in_dim(top_R, scores_RT.shape, [0]))
    kept_R = jnp.exp2(old_R - top_R)
    out_Rh = out_Rh * jax.lax.broadcast_in_dim(kept_R, out_Rh.shape, [0])
    return weights_RT, (out_Rh, top_R, total_R * kept_R + weights_RT.sum(axis=1))


def _joined(out: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, ...]:
    """Join the softmaxes of all parts, the first axis."""
    highest = top.max(axis=0)
    scale = jnp.exp2(top - highest)
    return (out * scale[..., None]).sum(axis=0), highest, (total * scale).sum(axis=0)


def _row_tiles(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, n, R, h], filled up with rows of zeros."""
    q_BKXh = rows_by_head(q_BWHh, num_kv_heads)
    q_BKXh = jnp.pad(q_BKXh, ((0, 0), (0, 0), (0, -q_BKXh.shape[2] % ROWS), (0, 0)))
    return q_BKXh.reshape(*q_BKXh.shape[:2], -1, ROWS, q_BKXh.shape[3])
