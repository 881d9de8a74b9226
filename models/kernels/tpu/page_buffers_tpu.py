"""Buffers of the TPU kernels for attention to pages: the sizes of a call, and prefetch of pages.

The pages of a tile come from HBM several at a time, into one of several buffers: while one is
computed, the next pages are copied, also for the next tiles. Buffer sizes follow from public
figures and compiler schedules, not from measurements. Shapes: see `page_attention_tpu`.
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

from reprise.models.kernels.shared.page_reads import Reads
from reprise.models.kernels.tpu.softmax_tpu import KEYS, LANES

VMEM_BYTES = 16 << 20  # the default of a kernel
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Pages that are copied together, and the number of buffers for such pages."""

    pages: int
    num: int


@dataclasses.dataclass(frozen=True)
class BufferSizes:
    """Positions times key/value heads of a device per buffer, and the bytes of all buffers."""

    positions: int
    num_bytes: int


# By (generation, head size, bytes of a number).
# A buffer should take less time to compute than to copy. For two heads of 1024 positions and 64
# rows, the compiler schedule has 1,140 cycles on a v5p, and the copy takes 1,330 by bandwidth; on a
# v6e 1,150 and 1,120; on a v5e 740 and 960 for the half. Shorter buffers waste less on short slots.
# Copies in flight must cover the latency of HBM: 1.5 µs are 1.2 MB on a v5e, 2.5 MB on a v6e, and
# 2.1 MB for each of the two cores of a v5p.
BUFFER_SIZES: dict[tuple[str, int, int], BufferSizes] = {
    ("v5e", 128, 2): BufferSizes(1024, 3 << 20),
    ("v5p", 128, 2): BufferSizes(2048, 4 << 20),
    ("v6e", 128, 2): BufferSizes(2048, 6 << 20),
}


def device_generation() -> str:
    """Return the TPU generation of the mesh in use, or of the default device ("v5p"), or ""."""
    return str(pltpu.get_tpu_info().chip_version) if pltpu.is_tpu_device() else ""


def buffers_of(generation: str, head_dim: int, itemsize: int, num_kv_heads: int) -> Buffers:
    """Return the buffers of pages, 2 to 8.

    By default one buffer has the bytes of 2048 head-positions of 128 bfloat16 numbers, and all
    buffers together have 4 MiB.
    """
    default = BufferSizes(2048 * 128 * 2 // (head_dim * itemsize), 4 << 20)
    sizes = BUFFER_SIZES.get((generation, head_dim, itemsize), default)
    pages = max(1, sizes.positions // num_kv_heads // KEYS)
    num_bytes = 2 * pages * KEYS * num_kv_heads * head_dim * itemsize
    return Buffers(pages, min(8, max(2, sizes.num_bytes // num_bytes)))


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes of a call."""

    num_slots: int
    num_tiles: int
    num_kv_heads: int
    num_rows: int
    head_dim: int
    max_pages: int
    path_pages: int
    buffers: Buffers
    dtype: jnp.dtype

    @staticmethod
    def of(
        q_NKXh: jax.Array,
        table_BN: jax.Array,
        reads: Reads,
        buffers: Buffers | None,
    ) -> Call:
        N, K, X, h = q_NKXh.shape
        if buffers is None:
            buffers = buffers_of(device_generation(), h, q_NKXh.dtype.itemsize, K)
        assert buffers.num >= 2
        path_pages = 0 if reads.paths is None else reads.paths.blocks
        B, max_pages = table_BN.shape
        return Call(B, N, K, X, h, max_pages, path_pages, buffers, q_NKXh.dtype)

    @property
    def num_cores(self) -> int:
        """The number of cores that share the tiles; a device of a v4 or v5p has two."""
        cores = (pltpu.get_tpu_info().num_cores or 1) if pltpu.is_tpu_device() else 1
        return cores if self.num_tiles % cores == 0 else 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.num_cores, self.num_tiles // self.num_cores

    def of_tile(self, *shape: int) -> pl.BlockSpec:
        """Return the part of an array for the current tile; the first axis is the tile."""
        each = self.grid[1]
        rest = (0,) * len(shape)
        return pl.BlockSpec((1, *shape), lambda core, i, *_: (core * each + i, *rest))

    def run(
        self,
        kernel: Callable[..., None],
        table_BN: jax.Array,
        reads: Reads,
        inputs: Sequence[tuple[pl.BlockSpec, jax.Array]],
        results: Sequence[tuple[pl.BlockSpec, Sequence[int], Any]],
        *,
        in_place: Mapping[int, int] | None = None,
        resident: Sequence[tuple[pl.BlockSpec, jax.Array]] = (),
        scratch: Sequence[Any] = (),
        name: str,
        interpret: Any,
    ) -> Any:
        """Run a kernel for each tile; the first of the `inputs` is the queries.

        The kernel gets the table, the scalars of tiles, inputs, results (specification, shape,
        dtype), then buffers of keys and of values, sums, tops and totals, the state of `Pages`,
        semaphores, and `scratch`. `resident` are further inputs after `inputs`, whole in VMEM;
        `in_place` maps inputs to the results that they become.
        """
        inputs = [*inputs, *resident]
        resident_bytes = sum(x.nbytes for _, x in resident)
        varying = jax.typeof(inputs[0][1]).manual_axis_type  # under shard_map, as queries do
        softmax = [
            pltpu.VMEM((self.num_kv_heads, self.num_rows, width), jnp.float32)
            for width in (self.head_dim, LANES, LANES)
        ]
        buffers = pltpu.VMEM(self.buffer_shape, self.dtype)
        state = pltpu.SMEM((4,), jnp.int32)
        copied = pltpu.SemaphoreType.DMA((self.buffers.num,))
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
                scratch_shapes=[buffers, buffers, *softmax, state, copied, *scratch],
            ),
            input_output_aliases={2 + i: to for i, to in (in_place or {}).items()},
            compiler_params=pltpu.CompilerParams(
                # Tiles of a core run in order, because the pages of the next tile are prefetched.
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=max(VMEM_BYTES, self.vmem_bytes + resident_bytes),
                # Pages in a table exist; checks would double the work of starting a copy.
                disable_bounds_checks=True,
            ),
            cost_estimate=self.cost,
            interpret=interpret,
            name=name,
        )
        scalars_X = Pages.scalars(reads, self.max_pages * KEYS)
        return call(table_BN.reshape(-1).astype(jnp.int32), scalars_X, *(x for _, x in inputs))

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        pages = self.buffers.num, self.buffers.pages
        return (*pages, self.num_kv_heads, KEYS, self.head_dim)

    @property
    def vmem_bytes(self) -> int:
        """The bytes of buffers, queries and results (twice, for the pipeline), and scores."""
        K = self.num_kv_heads
        X = self.num_rows
        h = self.head_dim
        itemsize = self.dtype.itemsize
        buffers = 2 * math.prod(self.buffer_shape) * itemsize
        tile = K * X * (2 * h * itemsize + 3 * h * 4 + 4 * LANES * 4) + 2 * X * LANES * 4
        scores = 3 * min(K, 4) * X * self.buffers.pages * KEYS * 4
        return buffers + tile + scores

    @property
    def cost(self) -> pl.CostEstimate:
        """The cost estimate for the compiler, an upper bound for full tables that are read once."""
        S = self.max_pages * KEYS
        h = self.head_dim
        itemsize = self.dtype.itemsize
        K = self.num_kv_heads
        rows = self.num_kv_heads * self.num_rows
        return pl.CostEstimate(
            flops=4 * self.num_slots * rows * S * h,
            transcendentals=self.num_slots * rows * S,
            bytes_accessed=self.num_slots * K * 2 * S * h * itemsize
            + self.num_tiles * rows * (h * itemsize + h * 4 + LANES * 4),
        )


@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages of the tiles of a core, as they move through the buffers; inside a kernel.

    `state` has the tile and page to fetch next, and the numbers of buffers filled and taken.
    """

    call: Call
    table_X: Any
    scalars_X: Any
    sources: Sequence[Any]  # pages of keys and of values
    buffers: tuple[Any, Any]
    semaphores: Any
    state: Any
    tile: jax.Array
    end: jax.Array  # the first tile of the next core

    SCALARS = 7  # of a tile

    @staticmethod
    def scalars(reads: Reads, max_positions: int) -> jax.Array:
        """Return the scalars of all tiles, [N · 7]."""
        paths = reads.paths
        last_N = jnp.minimum(reads.last_N, max_positions)
        whole_N = jnp.where(last_N > 0, jnp.minimum(reads.length_N, last_N) // KEYS, 0)
        num_N, first_N, held_N = jnp.ones_like(last_N), *[jnp.zeros_like(last_N)] * 2
        if paths is not None:
            num_N = jnp.maximum(paths.num_N, 1)
            first_N = paths.first_N
            held_N = reads.length_N % KEYS
            last_N = reads.last_N  # paths may exceed the pages
        pages_N = whole_N + jnp.maximum(pl.cdiv(last_N, KEYS) - whole_N, 0) * num_N
        # in the order of the methods
        numbers = reads.row_N, whole_N, last_N, pages_N, num_N, first_N, held_N
        return jnp.stack([x.astype(jnp.int32) for x in numbers], axis=1).reshape(-1)

    def _of(self, tile: Any, scalar: int) -> jax.Array:
        return self.scalars_X[tile * self.SCALARS + scalar]

    def row(self, tile: Any) -> jax.Array:
        """Return the table row of a tile."""
        return self._of(tile, 0)

    def whole(self, tile: Any) -> jax.Array:
        """Return the number of pages that every row of a tile sees in full."""
        return self._of(tile, 1)

    def last(self, tile: Any) -> jax.Array:
        """Return the maximum number of positions that a row of a tile sees."""
        return self._of(tile, 2)

    def num(self, tile: Any) -> jax.Array:
        """Return the number of pages that a tile reads."""
        return self._of(tile, 3)

    def first_path(self, tile: Any) -> jax.Array:
        """Return the first path of the slot of a tile."""
        return self._of(tile, 5)

    def held(self, tile: Any) -> jax.Array:
        """Return how many positions of the first page of a path the last slot page holds."""
        return self._of(tile, 6)

    def place(self, tile: Any, page: Any) -> tuple[jax.Array, jax.Array]:
        """Return (page within its path, path) of a page that not every row sees in full."""
        behind = page - self.whole(tile)
        paths = self._of(tile, 4)
        return jax.lax.div(behind, paths), jax.lax.rem(behind, paths)

    @staticmethod
    def of_core(
        call: Call,
        table_X: Any,
        scalars_X: Any,
        sources: Sequence[Any],
        buffers: tuple[Any, Any],
        semaphores: Any,
        state: Any,
    ) -> Pages:
        """Return the pages of the running core, at its current tile."""
        first = pl.program_id(0) * call.grid[1]
        return Pages(
            call,
            table_X,
            scalars_X,
            sources,
            buffers,
            semaphores,
            state,
            first + pl.program_id(1),
            first + call.grid[1],
        )

    def begin(self) -> None:
        """Fetch all buffers that may be in flight while the first buffer is computed."""
        self.state[0] = self._live_tile(self.tile)
        for place in (1, 2, 3):
            self.state[place] = 0
        ahead = self.call.buffers.num - 1
        jax.lax.fori_loop(0, ahead, lambda i, _: self.fetch(), None)

    def fetch(self) -> None:
        """Start to copy the next pages of this core, if any remain, into the next buffer."""
        tile = self.state[0]
        first = self.state[1]
        filled = self.state[2]

        @pl.when(tile < self.end)
        def _() -> None:
            buffer = jax.lax.rem(filled, self.call.buffers.num)

            def start(i: jax.Array, _: None) -> None:
                self._start(tile, first + i, buffer, i)

            self._each_page(self.num(tile) - first, start)
            then = first + self.call.buffers.pages
            is_last = then >= self.num(tile)
            self.state[0] = jax.lax.select(is_last, self._live_tile(tile + 1), tile)
            self.state[1] = jax.lax.select(is_last, 0, then)
            self.state[2] = filled + 1

    def take(self, first: jax.Array) -> jax.Array:
        """Wait for pages of the tile from `first` on; return their buffer, dead values set to 0."""
        tile = self.tile
        taken = self.state[3]
        self.state[3] = taken + 1
        buffer = jax.lax.rem(taken, self.call.buffers.num)

        def wait(i: jax.Array, _: None) -> None:
            self._wait(tile, first + i, buffer, i)

        self._each_page(self.num(tile) - first, wait)
        if not self.call.path_pages:
            page = jax.lax.div(self.last(tile), KEYS)
            last = jnp.minimum(self.num(tile), first + self.call.buffers.pages)

            @pl.when((page >= first) & (page < last))
            def _() -> None:
                self._clear(buffer, page - first, jax.lax.rem(self.last(tile), KEYS))

        return buffer

    def _live_tile(self, tile: jax.Array) -> jax.Array:
        """Return the first tile from `tile` on that has pages, or the end."""

        def is_empty(tile: jax.Array) -> jax.Array:
            return (tile < self.end) & (self.num(jnp.minimum(tile, self.call.num_tiles - 1)) == 0)

        return jax.lax.while_loop(is_empty, lambda tile: tile + 1, tile)

    def _each_page(self, left: jax.Array, do: Callable[..., None]) -> None:
        """Call `do` for each page of a buffer, or for the last `left` pages."""
        jax.lax.fori_loop(0, jnp.minimum(left, self.call.buffers.pages), do, None)

    def _start(self, tile: jax.Array, page: jax.Array, buffer: jax.Array, i: jax.Array) -> None:
        """Start to copy a page of a tile to place i of a buffer."""
        at, is_held = self._source(tile, page)

        @pl.when(is_held)
        def _() -> None:
            number = self.table_X[self.row(tile) * self.call.max_pages + at]
            for copy in self._copies(number, buffer, i):
                copy.start()

    def _wait(self, tile: jax.Array, page: jax.Array, buffer: jax.Array, i: jax.Array) -> None:
        @pl.when(self._source(tile, page)[1])
        def _() -> None:
            for copy in self._copies(0, buffer, i):
                copy.wait()

    def _source(self, tile: jax.Array, page: jax.Array) -> tuple[jax.Array, Any]:
        """Return which page of its slot to copy for a page of a tile, and whether to copy any.

        A path starts with the positions that the last page of the slot holds.
        """
        if not self.call.path_pages:
            return page, page >= 0
        is_whole = page < self.whole(tile)
        nth, _ = self.place(tile, page)
        at = jax.lax.select(is_whole, page, self.whole(tile))
        return at, is_whole | ((nth == 0) & (self.held(tile) > 0))

    def _copies(self, number: Any, buffer: jax.Array, i: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(source.at[number], to.at[buffer, i], self.semaphores.at[buffer])
            for source, to in zip(self.sources, self.buffers, strict=True)
        ]

    def _clear(self, buffer: jax.Array, i: jax.Array, live: jax.Array) -> None:
        """Set the values of a page after the live positions to 0, because 0 times NaN is NaN."""
        values = self.buffers[1]
        old_KSh = values[buffer, i]
        position_KSh = jax.lax.broadcasted_iota(jnp.int32, old_KSh.shape, 1)
        values[buffer, i] = jnp.where(position_KSh < live, old_KSh, 0).astype(old_KSh.dtype)
