"""Attention of tokens to blocks of keys in pages: the kernels for Hopper.

A thread block has up to 64 rows (tokens of a slot, with the query heads of a key/value head), and
one or more parts of the blocks that these rows read (`models.kernels.gpu.hopper`). Blocks come by
TMA into several buffers: while one is computed, the next blocks are copied. A second kernel joins
the parts.
Two thread blocks fit on a processor, so that one starts or ends a part while the other computes.

N tiles of R = 64 rows, Y rows in use, K key/value heads, h head size, P pages, T positions of a
page, D buffers, S side slices of 8 positions. Formulas: see `hopper`; blocks: see `page_blocks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from reprise.models.kernels.gpu.hopper import (
    H100_BUFFER_BYTES,
    ROWS,
    Parts,
    Softmax,
    WarpGroup,
    across,
    shared_rows,
    shared_sums,
    shared_tiles,
)
from reprise.models.kernels.gpu.page_blocks import SLICE, WHOLE, Blocks, blocks_of
from reprise.models.kernels.shared.page_reads import Reads, heads_of_rows, rows_by_head
from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE

ROWS_AT_ONCE = 8  # rows of sums per copy
# sums over the columns of a tile need no shared memory
_COMPILING = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
MAX_BUFFERS = 8
MANY_BLOCKS = 2048  # that start; more would be empty where slots are shorter than they may be


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim not in (64, 128):
        return f"expected a head size of 64 or 128, got {head_dim}; fix: use the portable attention"
    if page_tokens not in (64, 128):
        return (
            f"expected pages of 64 or 128 positions, got {page_tokens}; "
            "fix: use pages of 64 or 128 positions, or the portable attention"
        )
    if jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return (  # tensor cores multiply float32 as TF32
            f"expected bfloat16 keys and values, got {jnp.dtype(dtype).name}; "
            "fix: set Trainer.compute_dtype to bfloat16, or use the portable attention"
        )
    return None


def attend_tiles(
    q_NKYh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    position_NY: jax.Array,
    path_NY: jax.Array,
    reads: Reads,
    sides_SK8h: Sequence[jax.Array] = (),
    *,
    max_eights: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Return the attention of tiles of Y ≤ 64 rows, [N, K, Y, h] in the dtype of the queries.

    The rows with a position are the first of a tile, in eights at most `max_eights` of all tiles;
    results of others are arbitrary. Tiles that read nothing get 0. A row sees the whole blocks of
    its tile, and other blocks of its path up to its position.
    """
    Y = q_NKYh.shape[2]
    padding = (0, 0), (0, ROWS - Y)
    return _attend_blocks(
        q_NKYh,
        keys_PKTh,
        values_PKTh,
        jnp.pad(position_NY, padding, constant_values=-1),
        jnp.pad(path_NY, padding, constant_values=-1),
        blocks_of(table_BN, reads, keys_PKTh.shape[2]),
        sides_SK8h,
        path_slices=0 if reads.paths is None else reads.paths.blocks,
        max_eights=max_eights,
        interpret=interpret,
    )


def _attend_blocks(
    q_NKYh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    position_NR: jax.Array,
    path_NR: jax.Array,
    blocks: Blocks,
    sides_SK8h: Sequence[jax.Array] = (),
    *,
    path_slices: int = 0,
    max_eights: int | None = None,
    is_partial: bool = False,
    interpret: Any = None,
) -> Any:
    """Return the attention of tiles, [N, K, Y, h] in the dtype of the queries.

    With `is_partial`, return the softmax instead, float32 [N, K, R, h] and twice [N, K, R]; only
    the first Y rows count.
    """
    N, K, Y, h = q_NKYh.shape
    P, _, T, _ = keys_PKTh.shape
    assert Y <= ROWS and values_PKTh.shape == keys_PKTh.shape == (P, K, T, h)
    assert q_NKYh.dtype == keys_PKTh.dtype == values_PKTh.dtype
    if why := takes(h, T, keys_PKTh.dtype):
        raise ValueError(why)
    L = blocks.number_NL.shape[1]
    num_parts = blocks.bound_NX.shape[1] - 1
    registers = WarpGroup(bool(interpret))
    if Y > ROWS_AT_ONCE:
        q_NKYh = jnp.pad(q_NKYh, ((0, 0), (0, 0), (0, -Y % ROWS_AT_ONCE), (0, 0)))
    is_softmax = is_partial or num_parts > 1
    eights = -(-Y // ROWS_AT_ONCE)
    num_eights = N * eights
    if max_eights is not None:
        num_eights = min(num_eights, max_eights)
    at_once = num_parts
    if not path_slices:  # with side slices, a loop over parts needs more registers than there are
        at_once = min(num_parts, -(-MANY_BLOCKS // (K * N)))
    num_results = 3 if is_softmax else 1
    call = _Call(T, h, L, num_parts, at_once, Y, num_results, path_slices, registers)
    varying = jax.typeof(q_NKYh).manual_axis_type  # under shard_map, results vary as queries do

    def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)

    result = [shaped(N, K, Y, h, dtype=q_NKYh.dtype)]
    if is_partial:
        result = [shaped(N, K, ROWS, h), *[shaped(N, K, ROWS)] * 2]
    of_parts = [shaped(num_parts, num_eights, K, ROWS_AT_ONCE, h)]
    of_parts += [shaped(num_parts, N, K, ROWS)] * 2
    eights_N = -(-jnp.sum(position_NR[:, :Y] >= 0, axis=1, dtype=jnp.int32) // ROWS_AT_ONCE)
    at_N = (jnp.cumsum(eights_N) - eights_N).astype(jnp.int32)
    num_N = jnp.sum(blocks.bound_NX[:, 1:] > blocks.bound_NX[:, :-1], axis=1, dtype=jnp.int32)
    parts = plgpu.kernel(
        partial(_part_kernel, call),
        out_type=result if num_parts == 1 else of_parts,
        scratch_types=call.scratch(),
        grid=(K, call.parts_at_once, N),
        grid_names=("head", "part", "tile"),
        compiler_params=_COMPILING,
        interpret=interpret,
        kernel_name="page_attention",
    )(
        position_NR,
        path_NR,
        *(x.reshape(-1) for x in blocks),
        at_N,
        eights_N,
        jnp.maximum(num_N, 1),
        q_NKYh,
        keys_PKTh,
        values_PKTh,
        *sides_SK8h,
    )
    if num_parts > 1:
        copied = plgpu.Barrier(num_arrivals=eights)
        parts = plgpu.kernel(
            partial(_join_kernel, call),
            out_type=result,
            scratch_types=[shared_rows(ROWS, h), shared_sums(ROWS, h), copied],
            grid=(K, N),
            grid_names=("head", "tile"),
            compiler_params=_COMPILING,
            interpret=interpret,
            kernel_name="page_attention_parts",
        )(num_N, at_N, *parts)
    return tuple(parts) if is_partial else parts[0]


@dataclasses.dataclass(frozen=True)
class _Call:
    """The sizes of a call."""

    page_tokens: int
    head_dim: int
    max_blocks: int
    num_parts: int
    parts_at_once: int  # thread block i computes parts i, i + this number, …
    num_rows: int
    num_results: int  # of the kernel of parts
    path_slices: int  # side slices of a path
    registers: WarpGroup

    @property
    def buffers(self) -> int:
        return min(MAX_BUFFERS, H100_BUFFER_BYTES // (2 * ROWS * self.head_dim * 2))

    @property
    def part_rows(self) -> int:
        """The rows of sums that parts write."""
        return -(-self.num_rows // ROWS_AT_ONCE) * ROWS_AT_ONCE

    def scratch(self) -> list[Any]:
        """Return queries, keys, values and results in shared memory, and barriers of copies.

        The results, which are written last, share the memory of the keys and values.
        """
        D = self.buffers
        h = self.head_dim
        barriers = [plgpu.Barrier(num_barriers=many) for many in (1, D, D)]
        if self.path_slices:
            barriers += [plgpu.Barrier(num_arrivals=ROWS // SLICE, num_barriers=D)] * 2
        buffers = [shared_tiles(D, ROWS, h)] * 2
        result = shared_rows(ROWS, h) if self.num_parts == 1 else shared_sums(ROWS, h)
        is_interpreted = self.registers.interpreted  # without unions
        memory = [*buffers, result] if is_interpreted else [plgpu.RefUnion(buffers, result)]
        return [*barriers, shared_tiles(ROWS, h), *memory]

    def copy(self, number: jax.Array, head: jax.Array, pages: Any, to: Any, barrier: Any) -> None:
        """Copy a block of keys or values of a head from its page."""
        each = self.page_tokens // ROWS
        block = pages.at[jax.lax.div(number, each), head]
        if each > 1:
            block = block.at[pl.ds(jax.lax.rem(number, each) * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(block, to, barrier)

    def copy_slices(
        self,
        number: jax.Array,
        side: jax.Array,
        held: jax.Array,
        head: jax.Array,
        sources: Any,
        to: Any,
        barrier: Any,
    ) -> None:
        """Copy `held` slices of a block from its page, and the slices from `side` on, in turn."""
        pages, sides = sources
        each = self.page_tokens // ROWS
        page = pages.at[jax.lax.div(number, each), head]
        for i in range(ROWS // SLICE):
            to_8h = to.at[i * SLICE : (i + 1) * SLICE]

            @pl.when(i < held)
            def _(i: int = i, to_8h: Any = to_8h) -> None:
                first = jax.lax.rem(number, each) * ROWS + i * SLICE
                plgpu.copy_gmem_to_smem(page.at[pl.ds(first, SLICE)], to_8h, barrier)

            @pl.when(i >= held)
            def _(i: int = i, to_8h: Any = to_8h) -> None:
                # slices after the end of the path belong to other paths, and are not seen
                one = jnp.minimum(side + i, len(sides) - 1)
                plgpu.copy_gmem_to_smem(sides.at[one, head], to_8h, barrier)

    def clear(self, values_Sh: Any, live: jax.Array) -> None:
        """Set values after the live positions to 0, because 0 times NaN would be NaN."""

        @pl.when(live < ROWS)
        def _() -> None:
            for j in range(0, self.head_dim, ROWS):
                some_SR = values_Sh.at[:, j : j + ROWS]
                is_live_SR = self.registers.positions(some_SR.shape, axis=0) < live
                some_SR[...] = jnp.where(is_live_SR, self.registers.laid_out(some_SR[...]), 0)
            plgpu.commit_smem()

    def load_queries(self, q_Yh: Any, q_Rh: Any, barrier: Any) -> None:
        """Load the rows in use; others are arbitrary, and never written."""
        if self.num_rows > ROWS_AT_ONCE:
            plgpu.copy_gmem_to_smem(q_Yh, q_Rh.at[: self.part_rows], barrier)
            plgpu.barrier_wait(barrier)
            return
        # rows of a layout are copied in eights only
        row_Rh = self.registers.positions(q_Rh.shape, axis=0)
        rows_Rh = self.registers.laid_out(jnp.zeros(q_Rh.shape, q_Rh.dtype))
        for row in range(self.num_rows):
            of_row_h = self.registers.along(q_Yh.at[row], axis=1)
            of_row_Rh = jax.lax.broadcast_in_dim(of_row_h, q_Rh.shape, [1])
            rows_Rh = jnp.where(row_Rh == row, of_row_Rh, rows_Rh)
        q_Rh[...] = rows_Rh
        plgpu.commit_smem()

    def write(self, place: tuple, softmax: Softmax, results: Any, tile_Rh: Any) -> None:
        """Write the softmax of a tile, or its attention through shared memory."""
        if len(results) > 1:
            for to, x in zip(results, softmax, strict=True):
                to[place] = x
            return
        tile_Rh[...] = softmax.attention().astype(tile_Rh.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_Rh.at[: self.num_rows], results[0].at[place])
        plgpu.wait_smem_to_gmem(0)

    def eights(self, sum_Rh: Any) -> list[Any]:
        """Return the rows of sums in use, eight at a time."""
        firsts = range(0, self.part_rows, ROWS_AT_ONCE)
        return [sum_Rh.at[first : first + ROWS_AT_ONCE] for first in firsts]

    def write_part(
        self,
        place: tuple,
        first: jax.Array,
        eights: jax.Array,
        softmax: Softmax,
        results: Any,
        sum_Rh: Any,
    ) -> None:
        """Write the softmax of a part, with only the rows of sums that have a position."""
        part, _, head = place
        sums, tops, totals = results
        sum_Rh[...] = softmax.sum_Rh
        plgpu.commit_smem()
        for i, some_8h in enumerate(self.eights(sum_Rh)):

            @pl.when(i < eights)
            def _(i: int = i, some_8h: Any = some_8h) -> None:
                plgpu.copy_smem_to_gmem(some_8h, sums.at[part, first + i, head])

        tops[place] = softmax.top_R
        totals[place] = softmax.total_R
        plgpu.wait_smem_to_gmem(0)


def _part_kernel(call: _Call, *refs: Any) -> None:
    """Compute some parts of a tile: add the blocks of each, in order, to a running softmax."""
    position_NR, path_NR, number_X, first_X, path_X, begins_X, bound_X, end_N = refs[:8]
    held_N, side_N, at_N, eights_N, num_N, q = refs[8:14]
    has_sides = bool(call.path_slices)
    first_result = 18 if has_sides else 16
    sources = refs[14:first_result]
    first_scratch = first_result + call.num_results
    results = refs[first_result:first_scratch]
    num_barriers = 5 if has_sides else 3
    of_queries, *arrived = refs[first_scratch : first_scratch + num_barriers]
    q_Rh, *memory = refs[first_scratch + num_barriers :]
    if call.registers.interpreted:
        keys_DSh, values_DSh, result_Rh = memory
    else:
        (keys_DSh, values_DSh), result_Rh = memory[0]
    of_head, part, tile = (jax.lax.axis_index(x) for x in ("head", "part", "tile"))
    registers = call.registers
    D = call.buffers

    def fetch(first: jax.Array, steps: jax.Array, step: jax.Array) -> None:
        @pl.when(step < steps)
        def _() -> None:
            buffer = jax.lax.rem(step, D)
            number = number_X[first + step]
            path = path_X[first + step]
            buffers = keys_DSh.at[buffer], values_DSh.at[buffer]

            def whole() -> None:
                for i, to in enumerate(buffers):
                    call.copy(number, of_head, sources[i], to, arrived[i].at[buffer])

            def slices() -> None:
                held = held_N[tile] - jax.lax.div(first_X[first + step], SLICE)
                side = side_N[tile] + path * call.path_slices - held
                for i, to in enumerate(buffers):
                    call.copy_slices(
                        number, side, held, of_head, sources[i::2], to, arrived[2 + i].at[buffer]
                    )

            if has_sides:
                pl.when(path == WHOLE)(whole)
                pl.when(path != WHOLE)(slices)
            else:
                whole()

    def wait(path: jax.Array, buffer: jax.Array, which: int) -> None:
        if has_sides:
            pl.when(path == WHOLE)(lambda: plgpu.barrier_wait(arrived[which].at[buffer]))
            pl.when(path != WHOLE)(lambda: plgpu.barrier_wait(arrived[2 + which].at[buffer]))
        else:
            plgpu.barrier_wait(arrived[which].at[buffer])

    def masked(at: jax.Array, scores_RS: jax.Array) -> jax.Array:
        path_R = registers.along(path_NR.at[tile], axis=0)
        position_R = registers.along(position_NR.at[tile], axis=0)
        last_R = jnp.where(path_R == path_X[at], position_R, -1)
        seen_RS = registers.positions(scores_RS.shape, axis=1) + first_X[at]
        return jnp.where(seen_RS <= across(last_R, ROWS), scores_RS, NEGATIVE)

    def of_block(first: jax.Array, steps: jax.Array, step: jax.Array, parts: Parts) -> Parts:
        buffer = jax.lax.rem(step, D)
        path = path_X[first + step]
        wait(path, buffer, 0)
        scale = call.head_dim**-0.5 * LOG2_E
        scores_RS = registers.scores(q_Rh, keys_DSh.at[buffer], scale)
        mask = partial(masked, first + step)
        scores_RS = jax.lax.cond(path == WHOLE, lambda x: x, mask, scores_RS)
        parts = parts.next_if(begins_X[first + step] == 1, registers)
        weights_RS, current = parts.current.weigh(scores_RS)
        wait(path, buffer, 1)
        live = jnp.where(path == WHOLE, ROWS, end_N[tile] - first_X[first + step])
        call.clear(values_DSh.at[buffer], live)
        current = current.with_values(registers, weights_RS, values_DSh.at[buffer])
        fetch(first, steps, step + D)
        return Parts(current, parts.before)

    def compute(part: jax.Array, is_first: Any) -> None:
        bound = tile * (call.num_parts + 1) + part
        first = tile * call.max_blocks + bound_X[bound]
        steps = tile * call.max_blocks + bound_X[bound + 1] - first
        for step in range(D):
            fetch(first, steps, jnp.int32(step))
        pl.when(is_first)(lambda: call.load_queries(q.at[tile, of_head], q_Rh, of_queries))
        add = partial(of_block, first, steps)
        parts = jax.lax.fori_loop(0, steps, add, Parts.over_none(registers, call.head_dim))
        if call.num_parts == 1:
            call.write((tile, of_head), parts.joined(), results, result_Rh)
        else:
            place = part, tile, of_head
            softmax = parts.joined()
            call.write_part(place, at_N[tile], eights_N[tile], softmax, results, result_Rh)

    num = num_N[tile]
    each = call.parts_at_once
    if each == call.num_parts:
        pl.when(part < num)(lambda: compute(part, True))
        return

    def one(i: jax.Array, _: None) -> None:
        compute(part + i * each, i == 0)

    jax.lax.fori_loop(0, jax.lax.div(jnp.maximum(num - part, 0) + each - 1, each), one, None)


def _join_kernel(call: _Call, num_N: Any, at_N: Any, *refs: Any) -> None:
    """Join the parts of a tile, in order."""
    sums, tops, totals, *results, tile_Rh, part_Rh, copied = refs
    registers = call.registers
    place = tile, head = tuple(jax.lax.axis_index(x) for x in ("tile", "head"))

    def with_part(part: jax.Array, before: Softmax) -> Softmax:
        for i, some_8h in enumerate(call.eights(part_Rh)):
            # rows after the end of the tile belong to other tiles
            eight = jnp.minimum(at_N[tile] + i, sums.shape[1] - 1)
            plgpu.copy_gmem_to_smem(sums.at[part, eight, head], some_8h, copied)
        rows = [registers.along(x.at[part, tile, head], axis=0) for x in (tops, totals)]
        plgpu.barrier_wait(copied)
        softmax = before.joined(Softmax(registers.tile(part_Rh), *rows))
        plgpu.commit_smem()  # before the next part is copied there
        return softmax

    none = Softmax.over_none(registers, call.head_dim)
    call.write(place, jax.lax.fori_loop(0, num_N[tile], with_part, none), results, tile_Rh)


def attend_pages(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the same as `page_attention_tpu.attend_pages`."""
    B, W, H, _ = q_BWHh.shape
    _, K, T, h = keys_PKTh.shape
    assert H % K == 0
    q_BKnRh = _row_tiles(q_BWHh, K)
    n = q_BKnRh.shape[2]
    q_NKRh = q_BKnRh.swapaxes(1, 2).reshape(B * n, K, ROWS, h)
    row_N, length_N = (jnp.repeat(x, n) for x in (jnp.arange(B), length_B))
    blocks = blocks_of(table_BN, Reads(row_N, length_N, length_N), T)
    last_NR = jnp.broadcast_to(length_N[:, None] - 1, (B * n, ROWS)).astype(jnp.int32)
    results = _attend_blocks(
        q_NKRh[:, :, : W * H // K],
        keys_PKTh,
        values_PKTh,
        last_NR,
        jnp.zeros_like(last_NR),
        blocks,
        is_partial=True,
        interpret=interpret,
    )

    def by_slot(x_NKRi: jax.Array) -> jax.Array:
        x_BKnRi = x_NKRi.reshape(B, n, K, ROWS, -1).swapaxes(1, 2)
        return heads_of_rows(x_BKnRi.reshape(B, K, n * ROWS, -1), W, H)

    out, top, total = map(by_slot, results)
    return out, top, total


def _row_tiles(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, n, R, h], padded with rows of zeros."""
    q_BKXh = rows_by_head(q_BWHh, num_kv_heads)
    q_BKXh = jnp.pad(q_BKXh, ((0, 0), (0, 0), (0, -q_BKXh.shape[2] % ROWS), (0, 0)))
    return q_BKXh.reshape(*q_BKXh.shape[:2], -1, ROWS, q_BKXh.shape[3])
