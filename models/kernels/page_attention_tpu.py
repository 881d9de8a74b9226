"""Attention of a round's nodes to their slots' pages of keys and values: the kernel for TPUs.

Slots are taken in turn. A slot's pages come from HBM in blocks, each into one of several
buffers: while one block is computed, the next ones are on their way, those of the next slots too.
Only pages with live positions are read. All queries of a key/value head are rows of one product.

    score = q·k/√h,   top = max score,   total = Σ e^(score − top),   out = Σ e^(score − top) v

B slots, W nodes of a slot, H heads, K key/value heads, G = H/K, h head size, X = W·G rows of a
key/value head (rounded up to whole tiles), P pages, T positions of a page, N pages of a slot at
most, S positions of a block, D buffers.
Sources: arXiv 1805.02867 (running softmax), arXiv 2309.06180 (pages).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.tiles import PageTiles, device_generation, page_tiles

NEGATIVE = -1e30  # the top of a slot without positions, as in models.attention
LANES = 128
TABLE_BYTES = 512 << 10  # of page numbers in scalar memory, which has 1 MiB
VMEM_BYTES = 16 << 20  # what a kernel gets without asking


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
    """Σ e^(score − top) v, top and Σ e^(score − top) over the first `length` positions of a slot.

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
    q_BKXh = _rows_by_head(q_BWHh, K)
    X, itemsize = q_BKXh.shape[2], q_BWHh.dtype.itemsize
    if tiles is None:
        tiles = page_tiles(device_generation(), h, itemsize, T, K, X)
    assert tiles.block_pages * T % LANES == 0 and tiles.buffers >= 2
    call = _Call(B, K, X, h, T, N, tiles, q_BWHh.dtype)
    out_BKXh, sums_BKXl = _pallas_call(call, q_BKXh, interpret, priced_positions)(
        table_BN.reshape(-1).astype(jnp.int32),
        jnp.minimum(length_B, N * T).astype(jnp.int32),
        q_BKXh,
        keys_PKTh,
        values_PKTh,
    )
    sums_BWHl = _heads_of_rows(sums_BKXl[..., :2], W, H)
    return _heads_of_rows(out_BKXh, W, H), sums_BWHl[..., :1], sums_BWHl[..., 1:]


@dataclasses.dataclass(frozen=True)
class _Call:
    """The sizes of a call."""

    num_slots: int
    num_kv_heads: int
    num_rows: int
    head_dim: int
    page_tokens: int
    max_pages: int
    tiles: PageTiles
    dtype: jnp.dtype

    @property
    def num_cores(self) -> int:
        """Return how many cores share the slots; a device of a v4 or v5p has two."""
        cores = (pltpu.get_tpu_info().num_cores or 1) if pltpu.is_tpu_device() else 1
        return cores if self.num_slots % cores == 0 else 1

    @property
    def block_tokens(self) -> int:
        return self.tiles.block_pages * self.page_tokens

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        pages = self.tiles.buffers, self.tiles.block_pages
        return (*pages, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def vmem_bytes(self) -> int:
        """Return what the kernel may need: buffers, queries, results and scores.

        The pipeline has queries and results twice.
        """
        K, X, h, itemsize = self.num_kv_heads, self.num_rows, self.head_dim, self.dtype.itemsize
        buffers = 2 * math.prod(self.buffer_shape) * itemsize
        slot = K * X * (2 * h * itemsize + 2 * h * 4 + 4 * LANES * 4)
        scores = 3 * min(K, 4) * X * self.block_tokens * 4
        return buffers + slot + scores

    def cost(self, priced_positions: int | None) -> pl.CostEstimate:
        """Price a call for the compiler: an upper bound, of full tables, unless told otherwise."""
        S = self.max_pages * self.page_tokens if priced_positions is None else priced_positions
        h, itemsize = self.head_dim, self.dtype.itemsize
        heads = self.num_slots * self.num_kv_heads
        rows_bytes = self.num_rows * (h * itemsize + h * 4 + LANES * 4)
        return pl.CostEstimate(
            flops=4 * heads * self.num_rows * S * h,
            transcendentals=heads * self.num_rows * S,
            bytes_accessed=heads * (2 * S * h * itemsize + rows_bytes),
        )


def _pallas_call(
    call: _Call, q_BKXh: jax.Array, interpret: Any, priced_positions: int | None
) -> Any:
    K, X, h, cores = call.num_kv_heads, call.num_rows, call.head_dim, call.num_cores
    B, D = call.num_slots, call.tiles.buffers
    each = B // cores

    def of_slot(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, K, X, width), lambda core, i, *_: (core * each + i, 0, 0, 0))

    pages = pl.BlockSpec(memory_space=pl.ANY)
    varying = jax.typeof(q_BKXh).manual_axis_type  # under shard_map results vary as queries do
    return pl.pallas_call(
        partial(_kernel, call, each),
        out_shape=tuple(
            jax.ShapeDtypeStruct((B, K, X, width), jnp.float32, manual_axis_type=varying)
            for width in (h, LANES)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, each),
            in_specs=[of_slot(h), pages, pages],
            out_specs=(of_slot(h), of_slot(LANES)),
            scratch_shapes=[
                pltpu.VMEM(call.buffer_shape, call.dtype),
                pltpu.VMEM(call.buffer_shape, call.dtype),
                pltpu.VMEM((K, X, LANES), jnp.float32),
                pltpu.VMEM((K, X, LANES), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),  # of _Pages
                pltpu.SemaphoreType.DMA((D,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            # Slots of one core follow one another: what the next one needs is on its way.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(VMEM_BYTES, call.vmem_bytes),
            # The pages that a table names exist: checks would double the work of starting a copy.
            disable_bounds_checks=True,
        ),
        cost_estimate=call.cost(priced_positions),
        interpret=interpret,
        name="page_attention",
    )


def _kernel(
    call: _Call,
    each: int,
    table_X: Any,
    length_B: Any,
    q_ref: Any,
    keys_PKTh: Any,
    values_PKTh: Any,
    out_ref: Any,
    sums_ref: Any,
    key_buffers: Any,
    value_buffers: Any,
    top_ref: Any,
    total_ref: Any,
    state: Any,
    semaphores: Any,
) -> None:
    """One slot: its blocks in turn, each into the running softmax."""
    core, i = pl.program_id(0), pl.program_id(1)
    slot, end = core * each + i, (core + 1) * each
    sources, buffers = (keys_PKTh, values_PKTh), (key_buffers, value_buffers)
    pages = _Pages(call, end, table_X, length_B, sources, buffers, semaphores, state)

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
        for head in range(call.num_kv_heads):
            keys_Sh, values_Sh = (
                x[buffer, :, head].reshape(call.block_tokens, call.head_dim) for x in buffers
            )
            _attend_block(head, live, q_ref, keys_Sh, values_Sh, out_ref, top_ref, total_ref)

    jax.lax.fori_loop(0, pages.num_blocks(slot), of_block, None)
    lane = jax.lax.broadcasted_iota(jnp.int32, top_ref.shape, 2)
    sums_ref[0] = jnp.where(lane == 0, top_ref[...], total_ref[...])


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
    scores_XS = _product(q_Xh, keys_Sh, 1) * (h**-0.5)
    position_XS = jax.lax.broadcasted_iota(jnp.int32, scores_XS.shape, 1)
    scores_XS = jnp.where(position_XS < live, scores_XS, NEGATIVE)
    old_Xl = top_ref[head]
    top_Xl = jnp.maximum(old_Xl, jnp.max(scores_XS, axis=1, keepdims=True))
    weights_XS = jnp.exp(scores_XS - _wide(top_Xl, scores_XS.shape[1]))
    kept_Xl = jnp.exp(old_Xl - top_Xl)
    top_ref[head] = top_Xl
    total_ref[head] = total_ref[head] * kept_Xl + jnp.sum(weights_XS, axis=1, keepdims=True)
    new_Xh = _product(weights_XS.astype(values_Sh.dtype), values_Sh, 0)
    out_ref[0, head] = out_ref[0, head] * _wide(kept_Xl, h) + new_Xh


def _wide(x_Xl: jax.Array, width: int) -> jax.Array:
    """Return columns that are all the same, `width` of them."""
    return jnp.concatenate([x_Xl] * (width // LANES), axis=1)


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


@dataclasses.dataclass(frozen=True)
class _Pages:
    """The blocks of a core's slots, as they go through the buffers.

    Scalars in `state`: the slot and block to fetch next, how many blocks were fetched, and taken.
    """

    call: _Call
    end: jax.Array
    table_X: Any
    length_B: Any
    sources: tuple[Any, Any]
    buffers: tuple[Any, Any]
    semaphores: Any
    state: Any

    def begin(self, first_slot: jax.Array) -> None:
        """Fetch as many blocks as may be on their way while one is computed."""
        self.state[0] = self._live_slot(first_slot)
        for place in (1, 2, 3):
            self.state[place] = 0
        ahead = self.call.tiles.buffers - 1
        jax.lax.fori_loop(0, ahead, lambda i, _: self.fetch(), None)

    def num_pages(self, slot: jax.Array) -> jax.Array:
        return pl.cdiv(self.length_B[slot], self.call.page_tokens)

    def num_blocks(self, slot: jax.Array) -> jax.Array:
        return pl.cdiv(self.length_B[slot], self.call.block_tokens)

    def fetch(self) -> None:
        """Start to copy the next block of this core, if there is one, into the next buffer."""
        slot, block, fetched = self.state[0], self.state[1], self.state[2]

        @pl.when(slot < self.end)
        def _() -> None:
            first = block * self.call.tiles.block_pages
            buffer = jax.lax.rem(fetched, self.call.tiles.buffers)

            def start(i: jax.Array, _: None) -> None:
                page = self.table_X[slot * self.call.max_pages + first + i]
                for copy in self._copies(page, buffer, i):
                    copy.start()

            self._each_page(self.num_pages(slot) - first, start)
            is_last = block + 1 == self.num_blocks(slot)
            self.state[0] = jax.lax.select(is_last, self._live_slot(slot + 1), slot)
            self.state[1] = jax.lax.select(is_last, 0, block + 1)
            self.state[2] = fetched + 1

    def take(self, live: jax.Array) -> jax.Array:
        """Wait for the next block, of `live` positions; return its buffer.

        Values behind the live ones become 0: a weight of 0 times what is no number is none.
        """
        taken = self.state[3]
        self.state[3] = taken + 1
        buffer = jax.lax.rem(taken, self.call.tiles.buffers)

        def wait(i: jax.Array, _: None) -> None:
            for copy in self._copies(0, buffer, i):
                copy.wait()

        self._each_page(pl.cdiv(live, self.call.page_tokens), wait)

        @pl.when(live < self.call.block_tokens)
        def _() -> None:
            self._clear(buffer, live)

        return buffer

    def _live_slot(self, slot: jax.Array) -> jax.Array:
        """Return the first slot from here on that has positions, or the end."""

        def is_empty(slot: jax.Array) -> jax.Array:
            length = self.length_B[jnp.minimum(slot, self.call.num_slots - 1)]
            return (slot < self.end) & (length == 0)

        return jax.lax.while_loop(is_empty, lambda slot: slot + 1, slot)

    def _each_page(self, left: jax.Array, do: Callable[..., None]) -> None:
        """Do it for the pages of a block, of which `left` are left."""
        jax.lax.fori_loop(0, jnp.minimum(left, self.call.tiles.block_pages), do, None)

    def _copies(self, page: Any, buffer: jax.Array, i: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(source.at[page], to.at[buffer, i], self.semaphores.at[buffer])
            for source, to in zip(self.sources, self.buffers, strict=True)
        ]

    def _clear(self, buffer: jax.Array, live: jax.Array) -> None:
        T, values = self.call.page_tokens, self.buffers[1]

        def page(i: jax.Array, _: None) -> None:
            old_KTh = values[buffer, i]
            position_KTh = i * T + jax.lax.broadcasted_iota(jnp.int32, old_KTh.shape, 1)
            values[buffer, i] = jnp.where(position_KTh < live, old_KTh, 0).astype(old_KTh.dtype)

        jax.lax.fori_loop(jax.lax.div(live, T), self.call.tiles.block_pages, page, None)


def _rows_by_head(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [B, K, X, h], filled up with rows of zeros to whole tiles of 32 bytes a column."""
    B, W, _, h = q_BWHh.shape
    q_BKWGh = q_BWHh.reshape(B, W, num_kv_heads, -1, h).transpose(0, 2, 1, 3, 4)
    q_BKXh = q_BKWGh.reshape(B, num_kv_heads, -1, h)
    more = -q_BKXh.shape[2] % (32 // q_BWHh.dtype.itemsize)
    return jnp.pad(q_BKXh, ((0, 0), (0, 0), (0, more), (0, 0)))


def _heads_of_rows(x_BKXi: jax.Array, num_nodes: int, num_heads: int) -> jax.Array:
    """Return [B, W, H, i] of rows."""
    B, K, _, i = x_BKXi.shape
    G = num_heads // K
    x_BKWGi = x_BKXi[:, :, : num_nodes * G].reshape(B, K, num_nodes, G, i)
    return x_BKWGi.transpose(0, 2, 1, 3, 4).reshape(B, num_nodes, num_heads, i)
