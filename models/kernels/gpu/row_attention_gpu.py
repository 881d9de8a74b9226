"""Attention over packed rows on a Hopper GPU: a Pallas (Mosaic GPU) kernel, forward and backward.

A thread block is one warp group. Forward and for dq, it has a block of queries of one head, and
visits the blocks of keys that these queries see. For dk and dv, it has a block of keys, and visits
the blocks of queries that see them, of all heads of the key/value head. Blocks come by TMA into
several buffers: while one is computed, the next blocks are copied. For formulas, shapes and sources
see `row_attention_tpu`; X pairs of blocks of all rows, D buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from reprise.models.kernels.gpu.hopper import (
    PART_TOKENS,
    ROWS,
    Parts,
    WarpGroup,
    across,
    shared_tiles,
)
from reprise.models.kernels.shared import row_pairs
from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE

_BLOCK_TOKENS = ROWS  # of queries and of keys
_BUFFERS = 2  # two thread blocks fit the shared memory of a processor
_MAX_PAIRS = 2**24  # in all rows; a list of 64 MiB


def takes(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Return why the kernel does not take [B, T, H, h] and [B, T, K, h]; None if it does."""
    B, T, H, h = q_shape
    K = kv_shape[2]
    if jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):  # tensor cores multiply float32 as TF32
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if h not in (64, 128):
        return f"expected a head size of 64 or 128, got {h}"
    if H % K:
        return f"expected heads that {K} key/value heads divide, got {H}"
    n = -(-T // _BLOCK_TOKENS)
    if B * n * (n + 1) // 2 > _MAX_PAIRS:
        blocks = f"{_MAX_PAIRS} pairs of blocks of {_BLOCK_TOKENS}"
        return f"expected at most {blocks}, got {B} rows of {T}"
    return None


def forward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return attention as `decoder.row_attention`, [B, T, H, h], and log Σ e^score [B, H, T]."""
    sizes = _Sizes.of(q_BTHh, k_BTKh)
    q, k, v, *places = (sizes.filled(x) for x in (q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT))
    out, lse = _run(
        _forward_kernel,
        sizes,
        places,
        inputs=(q, k, v),
        outputs=(
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
        ),
        scratch=sizes.scratch(resident=1, moving=2),
        interpret=interpret,
    )
    return out[:, : sizes.num_tokens], lse[:, :, : sizes.num_tokens]


def backward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
    out_BTHh: jax.Array,
    lse_BHT: jax.Array,
    dout_BTHh: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values, from inputs and results of `forward`."""
    sizes = _Sizes.of(q_BTHh, k_BTKh)
    products_BTHh = dout_BTHh.astype(jnp.float32) * out_BTHh.astype(jnp.float32)
    delta_BHT = products_BTHh.sum(axis=-1).swapaxes(1, 2)
    q, k, v, dout, *places = (
        sizes.filled(x) for x in (q_BTHh, k_BTKh, v_BTKh, dout_BTHh, prompt_BT, branch_BT)
    )
    sums = [sizes.filled(x, axis=2) for x in (lse_BHT, delta_BHT)]
    run = partial(_run, places=places, inputs=(q, k, v, dout, *sums), interpret=interpret)
    (dq,) = run(
        _dq_kernel,
        sizes,
        outputs=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        scratch=sizes.scratch(resident=2, moving=2),
    )
    dk, dv = run(
        _dkv_kernel,
        dataclasses.replace(sizes, by_query=False),
        outputs=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
        scratch=sizes.scratch(resident=2, moving=2, moving_sums=2),
    )
    return tuple(x[:, : sizes.num_tokens] for x in (dq, dk, dv))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a call; with `by_query`, a thread block has a block of queries, else of keys."""

    num_rows: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    by_query: bool = True

    @staticmethod
    def of(q_BTHh: jax.Array, k_BTKh: jax.Array) -> _Sizes:
        B, T, H, h = q_BTHh.shape
        return _Sizes(B, T, H, k_BTKh.shape[2], h)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // _BLOCK_TOKENS)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def filled(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Return an array with the axis of positions padded to whole blocks."""
        over = -self.num_tokens % _BLOCK_TOKENS
        return jnp.pad(x, [(0, over if i == axis else 0) for i in range(x.ndim)]) if over else x

    def scratch(self, resident: int, moving: int, moving_sums: int = 0) -> tuple:
        """Return (shared memory, barrier) of arrays copied once, and of buffered arrays."""
        D = _BUFFERS
        C = _BLOCK_TOKENS
        h = self.head_dim
        sums = plgpu.SMEM((D, C), jnp.float32)
        buffers = *[shared_tiles(D, C, h)] * moving, *[sums] * moving_sums
        once = tuple((shared_tiles(C, h), plgpu.Barrier()) for _ in range(resident))
        return once, tuple((buffer, plgpu.Barrier(num_barriers=D)) for buffer in buffers)


def _run(
    kernel: Callable,
    sizes: _Sizes,
    places: Sequence[jax.Array],
    *,
    inputs: Sequence[jax.Array],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    scratch: tuple,
    interpret: Any,
) -> Any:
    """Run a kernel for each block of queries and head, or block of keys and key/value head."""
    prompt_BT, branch_BT = (x.astype(jnp.int32) for x in places)
    pair_X, _ = row_pairs.pair_list(prompt_BT, branch_BT, _BLOCK_TOKENS, sizes.by_query)
    num_heads = sizes.num_heads if sizes.by_query else sizes.num_kv_heads
    return plgpu.kernel(
        partial(kernel, sizes, WarpGroup(bool(interpret))),
        out_type=outputs,
        scratch_types=scratch,
        grid=(sizes.num_rows, num_heads, sizes.num_blocks),  # blocks of a head run concurrently
        grid_names=("row", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name=f"row_attention{kernel.__name__.removesuffix('_kernel')}",
    )(
        pair_X,
        row_pairs.block_bounds(prompt_BT, branch_BT, _BLOCK_TOKENS, sizes.by_query),
        prompt_BT,
        branch_BT,
        *inputs,
    )


@dataclasses.dataclass(frozen=True)
class _Block:
    """The block and head of a thread block, and the pairs that it visits."""

    sizes: _Sizes
    registers: WarpGroup
    pair_X: Any
    prompt_BT: Any
    branch_BT: Any
    row: jax.Array
    head: jax.Array
    block: jax.Array
    first: jax.Array  # first of its pairs in the list
    num_steps: jax.Array  # for a block of keys, a pair counts once per head of the group

    @staticmethod
    def of(sizes: _Sizes, registers: WarpGroup, lists: Sequence[Any]) -> _Block:
        pair_X, bound_X, prompt_BT, branch_BT = lists
        head, block, row = (jax.lax.axis_index(x) for x in ("head", "block", "row"))
        n = sizes.num_blocks
        if sizes.by_query:
            block = n - 1 - block  # blocks with the most pairs start first
        first = bound_X[row * (n + 1) + block]
        num_pairs = bound_X[row * (n + 1) + block + 1] - first
        num_steps = num_pairs if sizes.by_query else num_pairs * sizes.group
        return _Block(
            sizes, registers, pair_X, prompt_BT, branch_BT, row, head, block, first, num_steps
        )

    def at(self, x: Any, block: jax.Array | None = None, head: jax.Array | None = None) -> Any:
        """Return a block of [B, T, H, h], or of sums [B, H, T]; by default the current block."""
        head = self.head if head is None else head
        tokens = _tokens(self.block if block is None else block)
        return x.at[self.row, tokens, head] if len(x.shape) == 4 else x.at[self.row, head, tokens]

    def step(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the pair of a step, and the block and head of the moving arrays."""
        G = self.sizes.group
        if self.sizes.by_query:
            pair = self.pair_X[self.first + step]
            return pair, row_pairs.key_block(pair), jax.lax.div(self.head, G)
        pair = self.pair_X[self.first + jax.lax.div(step, G)]
        return pair, row_pairs.query_block(pair), self.head * G + jax.lax.rem(step, G)

    def fold(
        self, resident: Sequence[tuple], moving: Sequence[tuple], each: Callable, start: Any
    ) -> Any:
        """Fold `each(step, pair, ready, carry)` over the steps.

        `resident` and `moving` are (array, shared memory, barrier); `ready(i)` waits for the block
        of moving array i.
        """

        def fetch(step: jax.Array) -> None:
            @pl.when(step < self.num_steps)
            def _() -> None:
                _, block, head = self.step(step)
                buffer = jax.lax.rem(step, _BUFFERS)
                for x, to, barrier in moving:
                    x = self.at(x, block, head)
                    plgpu.copy_gmem_to_smem(x, to.at[buffer], barrier.at[buffer])

        def body(step: jax.Array, carry: Any) -> Any:
            buffer = jax.lax.rem(step, _BUFFERS)

            def ready(i: int) -> Any:
                _, to, barrier = moving[i]
                plgpu.barrier_wait(barrier.at[buffer])
                return to.at[buffer]

            carry = each(step, self.step(step)[0], ready, carry)
            fetch(step + _BUFFERS)
            return carry

        for x, to, barrier in resident:
            plgpu.copy_gmem_to_smem(self.at(x), to, barrier)
        for step in range(_BUFFERS):
            fetch(jnp.int32(step))
        for *_, barrier in resident:
            plgpu.barrier_wait(barrier)
        return jax.lax.fori_loop(0, self.num_steps, body, start)

    def write(self, results: Sequence[tuple]) -> None:
        """Write results: (array, shared memory that is free, result in registers)."""
        for x, tile, result in results:
            tile[...] = result.astype(x.dtype)
        plgpu.commit_smem()
        for x, tile, _ in results:
            plgpu.copy_smem_to_gmem(tile, self.at(x))
        plgpu.wait_smem_to_gmem(0)

    def scores(self, pair: jax.Array, rows: Any, columns: Any) -> jax.Array:
        """Return log2 of e^score of a pair, very negative for unseen keys; resident rows first."""
        scores = self.registers.scores(rows, columns, self.sizes.scale * LOG2_E)
        masked = partial(self._masked, pair)
        return jax.lax.cond(row_pairs.is_whole(pair), lambda scores: scores, masked, scores)

    def _masked(self, pair: jax.Array, scores: jax.Array) -> jax.Array:
        """Mask scores: a query sees earlier keys of its prompt, shared or of its response."""
        of_query, of_key = (0, 1) if self.sizes.by_query else (1, 0)
        query = row_pairs.query_block(pair)
        key = row_pairs.key_block(pair)

        def along(places_BT: Any, block: jax.Array, axis: int) -> jax.Array:
            places = self.registers.along(places_BT.at[self.row, _tokens(block)], axis)
            return jax.lax.broadcast_in_dim(places, scores.shape, [axis])

        position_of = partial(self.registers.positions, scores.shape)
        before = position_of(of_key) + (key - query) * _BLOCK_TOKENS <= position_of(of_query)
        same = along(self.prompt_BT, key, of_key) == along(self.prompt_BT, query, of_query)
        branch = along(self.branch_BT, key, of_key)
        own = (branch == 0) | (branch == along(self.branch_BT, query, of_query))
        return jnp.where(before & same & own, scores, NEGATIVE)


def _tokens(block: jax.Array) -> Any:
    """Return the positions of a block in its row."""
    return pl.ds(block * _BLOCK_TOKENS, _BLOCK_TOKENS)


def _with(arrays: Sequence[Any], scratch: Sequence[tuple]) -> list[tuple]:
    """Return arrays, each with its shared memory and its barriers."""
    return [(x, *memory) for x, memory in zip(arrays, scratch, strict=True)]


def _down(x: jax.Array) -> jax.Array:
    """Broadcast numbers by column to [C, C]."""
    return jax.lax.broadcast_in_dim(x, (len(x), len(x)), [1])


def _forward_kernel(sizes: _Sizes, registers: WarpGroup, *refs: Any) -> None:
    """Compute the softmax of each query, in the order of `hopper`.

    If segments start with blocks, the n-th block that a query sees has the positions from n · C.
    """
    *lists, q, k, v, out, lse, resident, moving = refs
    block = _Block.of(sizes, registers, lists)
    h = sizes.head_dim
    ((q_Ch, _),) = resident

    def each(step: jax.Array, pair: jax.Array, ready: Callable, parts: Parts) -> Parts:
        scores_CS = block.scores(pair, q_Ch, ready(0))
        begins = jax.lax.rem(step, PART_TOKENS // _BLOCK_TOKENS) == 0
        parts = parts.next_if(begins, registers)
        weights_CS, current = parts.current.weigh(scores_CS)
        return Parts(current.with_values(registers, weights_CS, ready(1)), parts.before)

    start = Parts.over_none(registers, h)
    softmax = block.fold(_with([q], resident), _with([k, v], moving), each, start).joined()
    block.write([(out, q_Ch, softmax.attention())])
    block.at(lse)[...] = softmax.top_R / LOG2_E + jnp.log(softmax.total_R)


def _dq_kernel(sizes: _Sizes, registers: WarpGroup, *refs: Any) -> None:
    """Compute the gradients of queries."""
    *lists, q, k, v, dout, lse, delta, dq, resident, moving = refs
    block = _Block.of(sizes, registers, lists)
    C = _BLOCK_TOKENS
    h = sizes.head_dim
    (q_Ch, _), (dout_Ch, _) = resident
    lse_C, delta_C = (registers.along(block.at(x), axis=0) for x in (lse, delta))
    lse_C = lse_C * LOG2_E

    def each(_: jax.Array, pair: jax.Array, ready: Callable, carry: tuple) -> tuple:
        k_Sh = ready(0)
        p_CS = jnp.exp2(block.scores(pair, q_Ch, k_Sh) - across(lse_C, C))
        dp_CS = registers.product(dout_Ch, ready(1), transposed=True)
        ds_CS = p_CS * (dp_CS - across(delta_C, C))
        return (registers.add_product(carry[0], ds_CS.astype(k.dtype), k_Sh),)

    start = (registers.full((C, h), 0.0),)
    (dq_Ch,) = block.fold(_with([q, dout], resident), _with([k, v], moving), each, start)
    block.write([(dq, q_Ch, dq_Ch * sizes.scale)])


def _dkv_kernel(sizes: _Sizes, registers: WarpGroup, *refs: Any) -> None:
    """Compute dk and dv; scores are keys first, so no operand from registers is transposed."""
    *lists, q, k, v, dout, lse, delta, dk, dv, resident, moving = refs
    block = _Block.of(sizes, registers, lists)
    S = _BLOCK_TOKENS
    h = sizes.head_dim
    (k_Sh, _), (v_Sh, _) = resident

    def each(_: jax.Array, pair: jax.Array, ready: Callable, carry: tuple) -> tuple:
        dk_Sh, dv_Sh = carry
        q_Ch, dout_Ch, *sums = (ready(i) for i in range(4))
        lse_C, delta_C = (registers.along(x, axis=1) for x in sums)
        plgpu.commit_smem()  # before copies write there again
        p_SC = jnp.exp2(block.scores(pair, k_Sh, q_Ch) - _down(lse_C * LOG2_E))
        dv_Sh = registers.add_product(dv_Sh, p_SC.astype(dout.dtype), dout_Ch)
        dp_SC = registers.product(v_Sh, dout_Ch, transposed=True)
        ds_SC = p_SC * (dp_SC - _down(delta_C))
        return registers.add_product(dk_Sh, ds_SC.astype(q.dtype), q_Ch), dv_Sh

    dk_Sh, dv_Sh = block.fold(
        _with([k, v], resident),
        _with([q, dout, lse, delta], moving),
        each,
        (registers.full((S, h), 0.0),) * 2,
    )
    block.write([(dk, k_Sh, dk_Sh * sizes.scale), (dv, v_Sh, dv_Sh)])
