"""Shared by TPU kernels of attention to pages: the sizes of a call, and prefetch of pages.

A slot's pages come from HBM in blocks, each into one of several buffers: while one is computed, the
next ones are copied, of the next slots too. Sizes of blocks follow from public figures and
compilers' schedules; none was measured. Shapes: see `page_attention_tpu`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
VMEM_BYTES = 16 << 20  # a kernel's default
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class PageTiles:
    """Pages of one matrix product, and such blocks in VMEM: one is computed, the others copied."""

    block_pages: int
    buffers: int


@dataclasses.dataclass(frozen=True)
class PageSizes:
    """Positions times key/value heads of a device, in a block; bytes of all buffers."""

    block_positions: int
    buffer_bytes: int


# By (generation, kernel, head size, bytes of a number).
# A block should take less long to compute than to copy. Of two heads of 1024 positions and 64 rows
# the compiler's schedule has 1,000 cycles on a v5p (650 of two heads of 512), and the copy takes
# 1,330 (665) by bandwidth; on a v6e 950 (570) of 1,120 (560); on a v5e 700 of 960 for the half.
# Shorter blocks waste less on short slots.
# Copies in flight have to cover the latency of HBM: 1.5 µs are 1.2 MB on a v5e, 2.5 MB on a v6e,
# and 2.1 MB for each of the two cores of a v5p.
PAGE_SIZES: dict[tuple[str, str, int, int], PageSizes] = {
    ("v5e", "page_attention", 128, 2): PageSizes(1024, 3 << 20),
    ("v5p", "page_attention", 128, 2): PageSizes(2048, 4 << 20),
    ("v6e", "page_attention", 128, 2): PageSizes(2048, 6 << 20),
}
MAX_SCORES = 1 << 17  # of a head and block: a product has to fit next to the buffers


def device_generation() -> str:
    """Return the TPU generation of the mesh in use, or of the default device ("v5p"), or ""."""
    return str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else ""


def page_tiles(
    generation: str,
    head_dim: int,
    itemsize: int,
    page_tokens: int,
    num_kv_heads: int,
    num_rows: int,
) -> PageTiles:
    """Return the tiles of attention over pages of `page_tokens` positions, of so many queries.

    By default a block has the bytes of 2048 head-positions of 128 numbers in bfloat16, and the
    buffers have 4 MiB. A block is a multiple of 128 positions and at most `MAX_SCORES` scores a
    head, and there are 2 to 8 buffers.
    """
    default = PageSizes(2048 * 128 * 2 // (head_dim * itemsize), 4 << 20)
    sizes = PAGE_SIZES.get((generation, "page_attention", head_dim, itemsize), default)
    positions = min(sizes.block_positions // num_kv_heads, MAX_SCORES // num_rows)
    unit = 128 // math.gcd(128, page_tokens)  # pages
    block_pages = max(1, positions // (page_tokens * unit)) * unit
    block_bytes = 2 * block_pages * page_tokens * num_kv_heads * head_dim * itemsize
    return PageTiles(block_pages, min(8, max(2, sizes.buffer_bytes // block_bytes)))


@dataclasses.dataclass(frozen=True)
class Call:
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
    def grid(self) -> tuple[int, int]:
        return self.num_cores, self.num_slots // self.num_cores

    def of_slot(self, *shape: int) -> pl.BlockSpec:
        """The current slot's part of an array; the first axis is the slot."""
        each, rest = self.grid[1], (0,) * len(shape)
        return pl.BlockSpec((1, *shape), lambda core, i, *_: (core * each + i, *rest))

    def run(
        self,
        kernel: Callable[..., None],
        table_and_length: tuple[jax.Array, jax.Array],
        inputs: Sequence[tuple[pl.BlockSpec, jax.Array]],
        results: Sequence[tuple[pl.BlockSpec, Sequence[int], Any]],
        *,
        in_place: Mapping[int, int] | None = None,
        scratch: Sequence[Any] = (),
        name: str,
        interpret: Any,
    ) -> Any:
        """Run a kernel for each slot, the first of its `inputs` being queries.

        Its arguments are the table, the lengths, inputs, results (specification, shape, dtype),
        then buffers of keys and of values, tops and totals, the state of `Blocks`, semaphores, and
        `scratch`. `in_place` are inputs that become results.
        """
        table_BN, length_B = table_and_length
        max_positions = self.max_pages * self.page_tokens
        varying = jax.typeof(inputs[0][1]).manual_axis_type  # under shard_map, as queries do
        sums = pltpu.VMEM((self.num_kv_heads, self.num_rows, LANES), jnp.float32)
        buffers = pltpu.VMEM(self.buffer_shape, self.dtype)
        state, copied = pltpu.SMEM((4,), jnp.int32), pltpu.SemaphoreType.DMA((self.tiles.buffers,))
        call = pl.pallas_call(
            kernel,
            out_shape=tuple(
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
                for _, shape, dtype in results
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=self.grid,
                in_specs=[spec for spec, _ in inputs],
                out_specs=tuple(spec for spec, *_ in results),
                scratch_shapes=[buffers, buffers, sums, sums, state, copied, *scratch],
            ),
            input_output_aliases={2 + i: to for i, to in (in_place or {}).items()},
            compiler_params=pltpu.CompilerParams(
                # Slots of one core are in order: the next one's pages are prefetched.
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=max(VMEM_BYTES, self.vmem_bytes),
                # Pages that a table names exist: checks would double the work of starting a copy.
                disable_bounds_checks=True,
            ),
            cost_estimate=self.cost,
            interpret=interpret,
            name=name,
        )
        tables = table_BN.reshape(-1), jnp.minimum(length_B, max_positions)
        return call(*(x.astype(jnp.int32) for x in tables), *(x for _, x in inputs))

    @property
    def block_tokens(self) -> int:
        return self.tiles.block_pages * self.page_tokens

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        pages = self.tiles.buffers, self.tiles.block_pages
        return (*pages, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def vmem_bytes(self) -> int:
        """Return the bytes of buffers, queries and results (twice: the pipeline), scores."""
        K, X, h, itemsize = self.num_kv_heads, self.num_rows, self.head_dim, self.dtype.itemsize
        buffers = 2 * math.prod(self.buffer_shape) * itemsize
        slot = K * X * (2 * h * itemsize + 2 * h * 4 + 4 * LANES * 4)
        scores = 3 * min(K, 4) * X * self.block_tokens * 4
        return buffers + slot + scores

    @property
    def cost(self) -> pl.CostEstimate:
        """A call's cost for the compiler: an upper bound, for full tables."""
        S, h, itemsize = self.max_pages * self.page_tokens, self.head_dim, self.dtype.itemsize
        heads = self.num_slots * self.num_kv_heads
        rows_bytes = self.num_rows * (h * itemsize + h * 4 + LANES * 4)
        return pl.CostEstimate(
            flops=4 * heads * self.num_rows * S * h,
            transcendentals=heads * self.num_rows * S,
            bytes_accessed=heads * (2 * S * h * itemsize + rows_bytes),
        )


def call_of(
    q_BKXh: jax.Array, keys_PKTh: jax.Array, max_pages: int, tiles: PageTiles | None
) -> Call:
    """Return the sizes of a call with these queries; tiles are the table's by default."""
    (B, K, X, h), T = q_BKXh.shape, keys_PKTh.shape[2]
    if tiles is None:
        tiles = page_tiles(device_generation(), h, q_BKXh.dtype.itemsize, T, K, X)
    assert tiles.block_pages * T % LANES == 0 and tiles.buffers >= 2
    return Call(B, K, X, h, T, max_pages, tiles, q_BKXh.dtype)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a core's slots, as they go through the buffers.

    Scalars in `state`: the slot and block to fetch next, how many blocks were fetched, and taken.
    """

    call: Call
    end: jax.Array
    table_X: Any
    length_B: Any
    sources: tuple[Any, Any]
    buffers: tuple[Any, Any]
    semaphores: Any
    state: Any

    def begin(self, first_slot: jax.Array) -> None:
        """Fetch as many blocks as may be in flight while one is computed."""
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
        """Wait for the next block, of `live` positions; return its buffer, the rest set to 0."""
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
        """Return the first slot from `slot` on that has positions, or the end."""

        def is_empty(slot: jax.Array) -> jax.Array:
            length = self.length_B[jnp.minimum(slot, self.call.num_slots - 1)]
            return (slot < self.end) & (length == 0)

        return jax.lax.while_loop(is_empty, lambda slot: slot + 1, slot)

    def _each_page(self, left: jax.Array, do: Callable[..., None]) -> None:
        """Call `do` for each page of a block, if only `left` remain."""
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
