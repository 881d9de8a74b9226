"""Products of few rows with a matrix of weights, on CPUs: y[x, o] = Σ_i x[x, i] · w[o, i].

XLA's CPU copies its right operand into panels, which costs as much as reading the weights: here
they are read once, as they are. A sum has eight parts (`LANES`), each in the order of i, which are
then added in pairs: it depends on nothing but its terms, so a row rounds alike in any batch.
The terms of a second product, the one of an adapter's ranks, are added to the same sums.
Float32 only.

Shape suffixes: X rows, I inputs, O outputs, R ranks.
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

from models.kernels import cpu_calls
from models.kernels.cpu_sums import fast
from models.kernels.cpu_tiles import LANES, LINE, ZERO, Code, tile

NAME = "reprise_few_rows"
ROWS, OUTPUTS = 4, 3  # of a tile: twelve sums, in sixteen registers with their terms
BLOCK = 48  # outputs of a part, whose weights stay in a cache of the core for all rows
_task = cpu_calls.task_of(NAME)


def takes(num_inputs: int, *dtypes: Any) -> bool:
    """Return whether the kernel takes these sizes."""
    return num_inputs % LINE == 0 and all(dtype == jnp.float32 for dtype in dtypes)


@jax.custom_vjp
def linear(x: jax.Array, weight_OI: jax.Array, *more: jax.Array) -> jax.Array:
    """Return x · wᵀ, [..., I] to float32 [..., O].

    With `more`, inner [..., R] and up_OR, it is x · wᵀ + inner · upᵀ.
    """
    register()
    shape = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), len(weight_OI)), jnp.float32)
    call = jax.ffi.ffi_call(NAME, shape, vmap_method="sequential")
    given = (a.reshape(-1, a.shape[-1]) for a in (x, weight_OI, *more))
    return call(*given).reshape(*x.shape[:-1], -1)


def _backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    product = partial(jnp.einsum, precision="highest")
    found = list[jax.Array]()
    for x, weight_OI in zip(kept[::2], kept[1::2], strict=True):
        found += product("...o,oi->...i", dy, weight_OI), product("...o,...i->oi", dy, x)
    return tuple(found)


linear.defvjp(lambda *inputs: (linear(*inputs), inputs), _backward)


def _tile(rows: int, outputs: int, num_fetched: int) -> Any:
    """Return a function for numba that computes a tile; it gets addresses, and sizes in numbers.

    Meanwhile it has rows of weights from an address on, of the next tile, brought from memory.
    """

    def write(code: Code, *words: Any) -> None:
        x, w, y, inputs, width, coming, inner, up, ranks = words

        def added(i: Any, totals: list, x: Any, w: Any, inputs: Any) -> list:
            for step in range(0, LINE, LANES):
                at = code.builder.add(i, code.number(step))
                w_O = [code.load(code.place(w, o, inputs, at)) for o in range(outputs)]
                for r in range(rows):
                    x_r = code.load(code.place(x, r, inputs, at))
                    for o in range(outputs):
                        n = r * outputs + o
                        totals[n] = code.multiplied(x_r, w_O[o], totals[n])
            return totals

        def add(i: Any, totals: list) -> list:
            totals = added(i, totals, x, w, inputs)
            for o in range(num_fetched):
                code.fetch(code.place(coming, o, inputs, i))
            return totals

        def add_ranks(i: Any, totals: list) -> list:
            for o in range(outputs):
                code.fetch(code.place(up, outputs + o, ranks, i))
            return added(i, totals, inner, up, ranks)

        totals = code.sums([ZERO] * (rows * outputs), inputs, LINE, add)
        totals = code.sums(totals, ranks, LINE, add_ranks)
        for n, total in enumerate(_totals(code, totals)):
            r, o = divmod(n, outputs)
            code.store(total, code.place(y, r, width, code.number(o)))

    return tile(write)


def _totals(code: Code, vectors: list[Any]) -> list[Any]:
    """Return the sum of each vector's lanes, added in pairs; vectors are taken in fours."""
    found = []
    for first in range(0, len(vectors), 4):
        some = vectors[first : first + 4]
        four = some + [some[-1]] * (4 - len(some))
        both = _pairs(code, _pairs(code, *four[:2]), _pairs(code, *four[2:]))
        low, high = (code.shuffled(both, both, range(n, n + 4)) for n in (0, 4))
        total = code.builder.fadd(low, high)
        index = [ir.Constant(ir.IntType(32), n) for n in range(len(some))]
        found += [code.builder.extract_element(total, n) for n in index]
    return found


def _pairs(code: Code, a: Any, b: Any) -> Any:
    """Add neighbours: sums of a and of b take turns by halves of the vectors (`vhaddps`)."""
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    return code.builder.fadd(code.shuffled(a, b, even), code.shuffled(a, b, [n + 1 for n in even]))


_all_4, _all_3, _all_2, _all_1 = (_tile(rows, OUTPUTS, OUTPUTS) for rows in (4, 3, 2, 1))
_one_4, _one_3, _one_2, _one_1 = (_tile(rows, OUTPUTS, 1) for rows in (4, 3, 2, 1))
_last_4, _last_3, _last_2, _last_1 = (_tile(rows, 1, 0) for rows in (4, 3, 2, 1))


@fast
def _block(x, w, y, num_rows, inputs, width, first, end, low):  # type: ignore[no-untyped-def]
    """Compute outputs first … end − 1 of all rows, from addresses; `low` are inner, up and ranks.

    The next tile's weights are fetched by the first tile of rows, or if there are many, a row by
    each, so that they come while others are computed.
    """
    (inner, up, ranks), o = low, first
    while o < end:
        outputs = OUTPUTS if o + OUTPUTS <= end else 1
        w_o = w + 4 * o * inputs
        for r in range(0, num_rows, ROWS):
            x_r, y_r = x + 4 * r * inputs, y + 4 * (r * width + o)
            is_all = num_rows <= 2 * ROWS and r == 0
            coming = w_o + 4 * OUTPUTS * inputs
            if not is_all:
                coming += 4 * min(r // ROWS, OUTPUTS - 1) * inputs
            more = inner + 4 * r * ranks, up + 4 * o * ranks, ranks
            words = (x_r, w_o, y_r, inputs, width, coming, *more)
            _any(outputs, min(num_rows - r, ROWS), is_all, words)
        o += outputs


@fast
def _any(outputs, rows, is_all, words):  # type: ignore[no-untyped-def]
    """Compute a tile of this size."""
    if outputs == 1:
        if rows == 4:
            _last_4(*words)
        elif rows == 3:
            _last_3(*words)
        elif rows == 2:
            _last_2(*words)
        else:
            _last_1(*words)
    elif is_all:
        if rows == 4:
            _all_4(*words)
        elif rows == 3:
            _all_3(*words)
        elif rows == 2:
            _all_2(*words)
        else:
            _all_1(*words)
    elif rows == 4:
        _one_4(*words)
    elif rows == 3:
        _one_3(*words)
    elif rows == 2:
        _one_2(*words)
    else:
        _one_1(*words)


@fast
def _block_size(num_outputs):  # type: ignore[no-untyped-def]
    """Return the outputs of a part: fewer than BLOCK if two cores would not have one each."""
    return BLOCK if num_outputs > BLOCK else (num_outputs + 1) // 2


@fast
def _run(call, part):  # type: ignore[no-untyped-def]
    num_rows, num_inputs = cpu_calls.sizes(call, 0, 2)
    num_outputs = cpu_calls.sizes(call, 1, 2)[0]
    x, w = cpu_calls.input_address(call, 0), cpu_calls.input_address(call, 1)
    low = 0, 0, 0
    if call[cpu_calls.NUM_INPUTS] > 2:
        inner, up = cpu_calls.input_address(call, 2), cpu_calls.input_address(call, 3)
        low = inner, up, cpu_calls.sizes(call, 2, 2)[1]
    size, y = _block_size(num_outputs), cpu_calls.output_address(call, 0)
    first = part * size
    end = min(first + size, num_outputs)
    _block(x, w, y, num_rows, num_inputs, num_outputs, first, end, low)


_serve = cpu_calls.serving(_run)


@fast
def _begin(call):  # type: ignore[no-untyped-def]
    num_rows, num_inputs = cpu_calls.sizes(call, 0, 2)
    num_outputs = cpu_calls.sizes(call, 1, 2)[0]
    size = _block_size(num_outputs)
    num_parts = (num_outputs + size - 1) // size
    return cpu_calls.begin(call, num_parts, num_rows * num_inputs * num_outputs, _task())


def _functions(stamp):  # type: ignore[no-untyped-def]
    """Return the task and the call; the stamp is for numba's cache."""

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
    """Compile the kernel, or read it from numba's cache, and name it for XLA."""
    cpu_calls.register(NAME, __file__, _functions)
