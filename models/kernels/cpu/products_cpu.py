"""Products with a weight matrix on CPUs: y[x, o] = Σ_i x[x, i] · w[o, i].

A sum has sixteen parts (`LINE`), each in the order of i, which are then added in pairs. The sum
depends only on its terms, so a row has the same bits in any batch, in decoding and in training.
XLA on CPUs has an order for each shape, and copies the right operand into panels, which for few
rows costs as much as reading the weights; this kernel reads weights in place. The terms of a second
product, with the ranks of an adapter, are added to the same sums.

Weights are float32 or bfloat16, sums float32. Shape suffixes: X rows, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np
from llvmlite import ir

from reprise.models.kernels.cpu import cpu_calls
from reprise.models.kernels.cpu.cpu_sums import fast
from reprise.models.kernels.cpu.cpu_tiles import HAS_WIDE_REGISTERS, INDEX, LINE, Code, tile

NAME = "reprise_products"
OUTPUTS = 3  # outputs of a tile
# Rows of a tile; the choice changes no sum.
ROWS = (8, 4, 2, 1) if HAS_WIDE_REGISTERS else (4, 2, 1)
# Registers hold 24 sums of sixteen numbers, or 6. Larger tiles compute eight numbers at a time.
SUMS_AT_ONCE = 24 if HAS_WIDE_REGISTERS else 6
MAX_INPUTS = 640  # of a block: the rows of a tile stay in the nearest core cache for all weights
BLOCK_OUTPUTS = 48  # of a part at most; its weights stay in a core cache for all rows
BLOCK_ROWS = 256
_task = cpu_calls.task_of(NAME)


def takes(num_inputs: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if num_inputs % LINE:
        return f"expected a number of inputs that {LINE} divides, got {num_inputs}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {jnp.dtype(dtype).name}"
    return None


def product(x: jax.Array, weight_OI: jax.Array, *more: jax.Array) -> jax.Array:
    """Return x · wᵀ, [..., I] to float32 [..., O].

    With `more`, inner [..., R] and up_OR in the dtype of w, return x · wᵀ + inner · upᵀ.
    """
    register()
    shape = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), len(weight_OI)), jnp.float32)
    call = jax.ffi.ffi_call(NAME, shape, vmap_method="sequential")
    rows = (x, *more[:1])
    flat = (a.reshape(-1, a.shape[-1]).astype(jnp.float32) for a in rows)
    weights = (weight_OI, *more[1:])
    given = [a for pair in zip(flat, weights, strict=True) for a in pair]
    return call(*given).reshape(*x.shape[:-1], -1)


def _write_tiles(code: Code, *words: Any) -> None:
    """Write the tiles of all sizes; the first word selects a size (`_size`).

    The other words are addresses, sizes in numbers, and 0 or 1. Sums start from the numbers at
    `sums` if inputs came before, and are stored there if more inputs follow. A tile prefetches the
    weights of the next tile.
    """
    size, x, w, y, inputs, count, width, sums, is_later, is_last, inner, up, ranks = words
    terms = x, w, inputs, count
    low_terms = inner, up, ranks, code.builder.mul(ranks, is_last)

    def one(rows: int, outputs: int, size_bytes: int) -> None:
        num = rows * outputs
        part = code if num <= SUMS_AT_ONCE else Code(code.builder, LINE // 2)
        load = part.load if size_bytes == 4 else part.load_halves

        def place_sum(n: int, first: int) -> Any:
            return code.place(sums, n, code.number(LINE), code.number(first))

        def taken_up(first: int, _i: Any, _totals: list) -> list:
            return [part.load(place_sum(n, first)) for n in range(num)]

        def added(first: int, x: Any, w: Any, inputs: Any, i: Any, totals: list) -> list:
            at = code.builder.add(i, code.number(first))
            w_O = [load(code.place(w, o, inputs, at, size_bytes)) for o in range(outputs)]
            for r in range(rows):
                x_r = part.load(code.place(x, r, inputs, at))
                for o in range(outputs):
                    n = r * outputs + o
                    totals[n] = part.multiplied(x_r, w_O[o], totals[n])
            for o in range(outputs if first == 0 else 0):
                code.fetch(code.place(w, outputs + o, inputs, i, size_bytes))
            return totals

        parts = []
        for first in range(0, LINE, part.lanes):
            totals = part.sums([part.zero] * num, is_later, 1, partial(taken_up, first))
            for *of, end in (terms, low_terms):
                totals = part.sums(totals, end, LINE, partial(added, first, *of))
            parts.append(totals)
        whole = parts[0]
        if len(parts) > 1:
            whole = [code.shuffled(a, b, range(LINE)) for a, b in zip(*parts, strict=True)]

        def keep() -> None:
            for n, total in enumerate(whole):
                code.store(total, place_sum(n, 0))

        def finish() -> None:
            for n, total in enumerate(_totals(code, whole)):
                r, o = divmod(n, outputs)
                code.store(total, code.place(y, r, width, code.number(o)))

        code.cases(is_last, {0: keep, 1: finish})

    sizes = [(r, o, b) for r in ROWS for o in (OUTPUTS, 1) for b in (4, 2)]
    code.cases(size, {_size.py_func(*of): partial(one, *of) for of in sizes})


@fast
def _size(rows, outputs, size_bytes):  # type: ignore[no-untyped-def]
    """Return the number of a tile size."""
    return (rows * 8 + outputs) * 8 + size_bytes


def _totals(code: Code, vectors: list[Any]) -> list[Any]:
    """Return the sum of the lanes of each vector, adding halves of two vectors at a time."""
    num = len(vectors)
    lanes = LINE
    size = LINE
    while size > 1:
        half = size // 2
        starts = range(0, 2 * lanes, size)
        low, high = ([s + first + i for s in starts for i in range(half)] for first in (0, half))
        pairs = [
            (vectors[n], vectors[min(n + 1, len(vectors) - 1)]) for n in range(0, len(vectors), 2)
        ]
        vectors = [
            code.builder.fadd(code.shuffled(a, b, low), code.shuffled(a, b, high)) for a, b in pairs
        ]
        size = half
    places = [(vectors[n // lanes], ir.Constant(INDEX, n % lanes)) for n in range(num)]
    return [code.builder.extract_element(*place) for place in places]


_tile = tile(_write_tiles, LINE)
_MOST_ROWS = ROWS[0]


@fast
def _block(x, w, y, num_rows, inputs, width, num_outputs, size_bytes, low):  # type: ignore[no-untyped-def]
    """Compute some outputs of some rows, from addresses; `low` is inner, up and ranks."""
    inner, up, ranks = low
    r = 0
    num_blocks = (inputs + MAX_INPUTS - 1) // MAX_INPUTS
    block_inputs = ((inputs + num_blocks - 1) // num_blocks + LINE - 1) // LINE * LINE
    sums_N = np.empty(_MOST_ROWS * num_outputs * LINE if num_blocks > 1 else 0, np.float32)
    sums = sums_N.ctypes.data
    while r < num_rows:
        rows = _MOST_ROWS
        i = 0
        while rows > num_rows - r:
            rows //= 2
        inner_r = inner + 4 * r * ranks
        while i < inputs:
            count = min(block_inputs, inputs - i)
            o = 0
            x_r = x + 4 * (r * inputs + i)
            is_later = int(i > 0)
            is_last = int(i + count == inputs)
            while o < num_outputs:
                outputs = OUTPUTS if o + OUTPUTS <= num_outputs else 1
                w_o = w + size_bytes * (o * inputs + i)
                y_o = y + 4 * (r * width + o)
                sums_o = sums + 4 * LINE * rows * o
                up_o = up + size_bytes * o * ranks
                size = _size(rows, outputs, size_bytes)
                _tile(
                    size,
                    x_r,
                    w_o,
                    y_o,
                    inputs,
                    count,
                    width,
                    sums_o,
                    is_later,
                    is_last,
                    inner_r,
                    up_o,
                    ranks,
                )
                o += outputs
            i += count
        r += rows
    return sums_N.size  # numba would free sums_N after its last use, before the loop


@fast
def _block_outputs(num_outputs):  # type: ignore[no-untyped-def]
    """Return the outputs of a part, in whole lines of memory; all parts have one size."""
    max_outputs = BLOCK_OUTPUTS if num_outputs % (2 * BLOCK_OUTPUTS) == 0 else 2 * LINE
    parts = 2 * ((num_outputs + 2 * max_outputs - 1) // (2 * max_outputs))
    return ((num_outputs + parts - 1) // parts + LINE - 1) // LINE * LINE


@fast
def _parts(num_rows, num_outputs):  # type: ignore[no-untyped-def]
    """Return the number of parts of the outputs, and of the rows."""
    size = _block_outputs(num_outputs)
    return (num_outputs + size - 1) // size, (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS


@fast
def _run(call, part):  # type: ignore[no-untyped-def]
    num_rows, inputs = cpu_calls.sizes(call, 0, 2)
    num_outputs = cpu_calls.sizes(call, 1, 2)[0]
    size_bytes = cpu_calls.number_bytes(call, 1)
    of_outputs, _ = _parts(num_rows, num_outputs)
    first = part // of_outputs * BLOCK_ROWS
    o = part % of_outputs * _block_outputs(num_outputs)
    low = 0, 0, 0
    if call[cpu_calls.NUM_INPUTS] > 2:
        inner = cpu_calls.input_address(call, 2)
        up = cpu_calls.input_address(call, 3)
        ranks = cpu_calls.sizes(call, 2, 2)[1]
        low = inner + 4 * first * ranks, up + size_bytes * o * ranks, ranks
    x = cpu_calls.input_address(call, 0) + 4 * first * inputs
    w = cpu_calls.input_address(call, 1) + size_bytes * o * inputs
    y = cpu_calls.output_address(call, 0) + 4 * (first * num_outputs + o)
    rows = min(BLOCK_ROWS, num_rows - first)
    outputs = min(_block_outputs(num_outputs), num_outputs - o)
    _block(x, w, y, rows, inputs, num_outputs, outputs, size_bytes, low)


_serve = cpu_calls.serving(_run)


@fast
def _begin(call):  # type: ignore[no-untyped-def]
    num_rows, inputs = cpu_calls.sizes(call, 0, 2)
    num_outputs = cpu_calls.sizes(call, 1, 2)[0]
    of_outputs, of_rows = _parts(num_rows, num_outputs)
    return cpu_calls.begin(call, of_outputs * of_rows, num_rows * inputs * num_outputs, _task())


def _functions(stamp):  # type: ignore[no-untyped-def]
    """Return the task and the call; the stamp is for the numba cache."""

    def task(address):  # type: ignore[no-untyped-def]
        if stamp >= 0:
            _serve(address)
        return 0

    def call(frame):  # type: ignore[no-untyped-def]
        call = numba.carray(frame, 15, np.int64)
        if not cpu_calls.is_query(call) and stamp >= 0:
            cpu_calls.end(_begin(call), _task())
        return 0

    return task, call


def register() -> None:
    """Compile the kernel, or load it from the numba cache, and register it with XLA."""
    cpu_calls.register(NAME, __file__, _functions)
