"""Sums of attention on CPUs, compiled by numba into the kernels that use them.

Each sum runs over positions in order and depends only on its terms, so a token rounds the same way
in any batch. Terms from a cache are float32, or bfloat16 as words (uint16), which are widened
exactly, in registers. Shape suffixes: S positions, h head size, V positions that a query sees.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from reprise.models.kernels.cpu.cpu_tiles import FLOAT, INDEX, LINE, Code, tile
from reprise.models.kernels.cpu.cpu_tiles import LANES as VECTOR_LANES

BLOCK = 256  # positions with keys or values that stay in a cache of the core
AT_ONCE = 8  # tokens of a row in a run
LANES = 16  # of a sum
FETCHED = 4 * 16  # prefetch distance in positions

# Not cached: numba does not notice changes in other files. Functions that XLA calls are cached.
fast = numba.njit(fastmath={"contract", "nsz", "nnan"}, nogil=True, error_model="numpy")


@fast
def dots(a_h, bT_hS, first, start, end, out_V):  # type: ignore[no-untyped-def]
    """Compute out[s − first] = Σ_j a[j] · b[s, j] for s = start … end − 1, j in order."""
    out_V = out_V[start - first : end - first]
    for j in range(0, len(a_h), 4):
        a0 = a_h[j]
        a1 = a_h[j + 1]
        a2 = a_h[j + 2]
        a3 = a_h[j + 3]
        b0 = bT_hS[j, start:end]
        b1 = bT_hS[j + 1, start:end]
        b2 = bT_hS[j + 2, start:end]
        b3 = bT_hS[j + 3, start:end]
        if j == 0:
            out_V[:] = 0
        for s in range(end - start):
            total = a1 * b1[s] + (a0 * b0[s] + out_V[s])
            out_V[s] = a3 * b3[s] + (a2 * b2[s] + total)


@fast
def mix(weight_V, b_Sh, first, start, end, out_h):  # type: ignore[no-untyped-def]
    """Add Σ_s weight[s − first] · b[s] to out, for s = start … end − 1, in order."""
    fours = end - (end - start) % 4
    for s in range(start, fours, 4):
        w0 = weight_V[s - first]
        w1 = weight_V[s - first + 1]
        w2 = weight_V[s - first + 2]
        w3 = weight_V[s - first + 3]
        b0 = b_Sh[s]
        b1 = b_Sh[s + 1]
        b2 = b_Sh[s + 2]
        b3 = b_Sh[s + 3]
        for j in range(len(out_h)):
            out_h[j] = w3 * b3[j] + (w2 * b2[j] + (w1 * b1[j] + (w0 * b0[j] + out_h[j])))
    for s in range(fours, end):
        b0 = b_Sh[s]
        w0 = weight_V[s - first]
        for j in range(len(out_h)):
            out_h[j] = w0 * b0[j] + out_h[j]


@intrinsic
def as_float(_typing, number):  # type: ignore[no-untyped-def]
    """Return a float32 unchanged, or a bfloat16 widened."""

    def code(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        if number == types.float32:
            return arguments[0]
        bits = builder.shl(builder.zext(arguments[0], INDEX), ir.Constant(INDEX, 16))
        return builder.bitcast(bits, FLOAT)

    return types.float32(number), code


def _dots_tile(queries: int, lines: int, size_bytes: int) -> Any:
    """Return a numba function: `dots` of some queries with some lines of positions.

    It takes the addresses of the queries, of the first line in row 0 of b, and of the results, each
    with a row length. Lines that are `fetched` positions ahead are prefetched.
    """

    def write(
        code: Code, a: Any, h: Any, b: Any, width: Any, out: Any, out_width: Any, fetched: Any
    ) -> None:
        starts = range(0, lines * LINE, VECTOR_LANES)
        load = code.load if size_bytes == 4 else code.load_halves

        def add(j: Any, totals: list) -> list:
            row = code.builder.mul(j, width)
            at_N = [code.builder.add(row, code.number(n)) for n in starts]
            b_N = [load(code.place(b, 0, width, at, size_bytes)) for at in at_N]
            for y in range(queries):
                a_j = code.everywhere(code.load(code.place(a, y, h, j), FLOAT))
                for n in range(len(b_N)):
                    i = y * len(b_N) + n
                    totals[i] = code.multiplied(a_j, b_N[n], totals[i])
            for line in range(lines):
                ahead = code.builder.add(fetched, code.number(line * LINE))
                code.fetch(code.place(b, 0, width, code.builder.add(row, ahead), size_bytes))
            return totals

        totals = code.sums([code.zero] * (queries * len(starts)), h, 1, add)
        for i, total in enumerate(totals):
            y, n = divmod(i, len(starts))
            code.store(total, code.place(out, y, out_width, code.number(starts[n])))

    return tile(write)


def _mix_tile(rows: int, vectors: int, size_bytes: int) -> Any:
    """Return a numba function: out[y] += Σ_s weight[y, s] · b[s] for vectors of some rows.

    It takes the addresses of the weights, of b and of out, the strides of weights by y and by s,
    the row length of b and out, and the number of terms.
    """

    def write(
        code: Code, weight: Any, by_y: Any, by_s: Any, b: Any, h: Any, out: Any, count: Any
    ) -> None:
        starts = [code.number(VECTOR_LANES * n) for n in range(vectors)]
        places = [code.place(out, y, h, n) for y in range(rows) for n in starts]
        load = code.load if size_bytes == 4 else code.load_halves

        def add(s: Any, totals: list) -> list:
            row = code.builder.mul(s, h)
            at = code.builder.mul(s, by_s)
            at_N = [code.builder.add(row, n) for n in starts]
            b_N = [load(code.place(b, 0, h, n, size_bytes)) for n in at_N]
            for y in range(rows):
                w_s = code.everywhere(code.load(code.place(weight, y, by_y, at), FLOAT))
                for n in range(vectors):
                    i = y * vectors + n
                    totals[i] = code.multiplied(w_s, b_N[n], totals[i])
            return totals

        totals = code.sums([code.load(place) for place in places], count, 1, add)
        for total, place in zip(totals, places, strict=True):
            code.store(total, place)

    return tile(write)


def _line_dots(size_bytes: int) -> Any:
    """Return a numba function: `dots` of several queries, line by line of positions.

    It takes addresses, and returns the first position without a result. A product waits for the
    previous product in its sum, so a tile of few queries has two lines, for eight concurrent sums.
    """
    dots_4, dots_2, dots_1 = (_dots_tile(queries, 1, size_bytes) for queries in (4, 2, 1))
    long_dots_2, long_dots_1 = (_dots_tile(queries, 2, size_bytes) for queries in (2, 1))

    @fast
    def lines(a, h, num_queries, b, S, first, end, out, V):  # type: ignore[no-untyped-def]
        s = first
        while s < end and s + LINE <= S:
            y = 0
            b_s = b + size_bytes * s
            is_long = num_queries < 4 and s + LINE < end and s + 2 * LINE <= S
            while y < num_queries:
                a_y = a + 4 * y * h
                out_y = out + 4 * (y * V + s)
                if y + 4 <= num_queries:
                    dots_4(a_y, h, b_s, S, out_y, V, FETCHED)
                    y += 4
                elif y + 2 <= num_queries:
                    if is_long:
                        long_dots_2(a_y, h, b_s, S, out_y, V, FETCHED)
                    else:
                        dots_2(a_y, h, b_s, S, out_y, V, FETCHED)
                    y += 2
                else:
                    if is_long:
                        long_dots_1(a_y, h, b_s, S, out_y, V, FETCHED)
                    else:
                        dots_1(a_y, h, b_s, S, out_y, V, FETCHED)
                    y += 1
            s += 2 * LINE if is_long else LINE
        return s

    return lines


_float_dots = _line_dots(4)
_half_dots = _line_dots(2)


@fast
def all_dots(a_Yh, bT_hS, first, end, out_YV, at):  # type: ignore[no-untyped-def]
    """Compute `dots` of several queries for s = first … end − 1, bit for bit, into V = at and on.

    Up to one more line is overwritten.
    """
    Y, h = a_Yh.shape
    S = bT_hS.shape[1]
    V = out_YV.shape[1]
    a = a_Yh.ctypes.data
    b = bT_hS.ctypes.data
    out = out_YV.ctypes.data + 4 * (at - first)
    if bT_hS.itemsize == 4:
        s = _float_dots(a, h, Y, b, S, first, end, out, V)
    else:
        s = _half_dots(a, h, Y, b, S, first, end, out, V)
    if s < end:  # the last positions do not fill a line
        tail_hS = np.empty((h, end - s), np.float32)
        for j in range(h):
            for i in range(end - s):
                tail_hS[j, i] = as_float(bT_hS[j, s + i])
        for y in range(Y):
            dots(a_Yh[y], tail_hS, 0, 0, end - s, out_YV[y, at + s - first :])


def _vector_mix(size_bytes: int) -> Any:
    """Return a numba function: `_mix_tile` for all vectors of rows."""
    mix_2_4, mix_1_4, mix_2_1, mix_1_1 = (
        _mix_tile(rows, vectors, size_bytes) for vectors in (4, 1) for rows in (2, 1)
    )

    @fast
    def mixed(weight, by_y, by_s, b, h, out, num_rows, count):  # type: ignore[no-untyped-def]
        y = 0
        while y < num_rows:
            w = weight + 4 * y * by_y
            is_pair = y + 2 <= num_rows
            j = 0
            while j < h:
                b_j = b + size_bytes * j
                out_j = out + 4 * (y * h + j)
                if j + 4 * VECTOR_LANES <= h:
                    if is_pair:
                        mix_2_4(w, by_y, by_s, b_j, h, out_j, count)
                    else:
                        mix_1_4(w, by_y, by_s, b_j, h, out_j, count)
                    j += 4 * VECTOR_LANES
                else:
                    if is_pair:
                        mix_2_1(w, by_y, by_s, b_j, h, out_j, count)
                    else:
                        mix_1_1(w, by_y, by_s, b_j, h, out_j, count)
                    j += VECTOR_LANES
            y += 2 if is_pair else 1

    return mixed


_mix_floats = _vector_mix(4)
_mix_halves = _vector_mix(2)


@fast
def mix_all(weight, by_y, by_s, b, h, out, num_rows, count, size_bytes):  # type: ignore[no-untyped-def]
    """Add Σ_s weight[y, s] · b[s] to out[y], s in order, like `_mix_tile` for all vectors of rows.

    `weight`, `b` and `out` are addresses; numbers of b have `size_bytes` bytes.
    """
    if size_bytes == 4:
        _mix_floats(weight, by_y, by_s, b, h, out, num_rows, count)
    else:
        _mix_halves(weight, by_y, by_s, b, h, out, num_rows, count)


@fast
def highest(score_V):  # type: ignore[no-untyped-def]
    # four chains, because each maximum waits for the previous maximum
    quarter = len(score_V) // 4
    top_0 = top_1 = top_2 = top_3 = score_V[0]
    for s in range(quarter):
        top_0 = max(top_0, score_V[s])
        top_1 = max(top_1, score_V[quarter + s])
        top_2 = max(top_2, score_V[2 * quarter + s])
        top_3 = max(top_3, score_V[3 * quarter + s])
    for s in range(4 * quarter, len(score_V)):
        top_0 = max(top_0, score_V[s])
    return max(max(top_0, top_1), max(top_2, top_3))


@fast
def exponentials(score_V, top, bits_V, power_V):  # type: ignore[no-untyped-def]
    """Replace scores by e^(score − top), within an ulp; return their sum, in order of position.

    e^x = 2^n · e^r with n = round(x · log₂e): x · log₂e + 1.5 · 2²³ has n in its low bits.
    `power_V` has the same bytes as `bits_V`.
    """
    magic = np.float32(12582912)
    for s in range(len(score_V)):
        x = max(score_V[s] - top, np.float32(-87))
        shifted = x * np.float32(1.44269504) + magic
        power_V[s] = shifted
        n = shifted - magic
        r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)  # ln 2 in two parts
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        score_V[s] = p * (r * r) + r + np.float32(1)
    for s in range(len(score_V)):
        bits_V[s] = (bits_V[s] + np.int32(127)) << np.int32(23)
    total = np.zeros(LANES, np.float32)
    for s in range(len(score_V)):
        score_V[s] = score_V[s] * power_V[s]
    whole = len(score_V) - len(score_V) % LANES
    for start in range(0, whole, LANES):
        lanes = score_V[start : start + LANES]
        for i in range(LANES):
            total[i] += lanes[i]
    for s in range(whole, len(score_V)):
        total[s - whole] += score_V[s]
    for i in range(1, LANES):
        total[0] += total[i]
    return total[0]
