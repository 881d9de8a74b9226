"""Sums of attention on CPUs, compiled by numba into the kernels that use them.

Each sum runs over positions in their order, and depends on nothing but its terms: a token rounds
alike in any batch. Shape suffixes: S positions, h head size, V positions that a query sees.
"""

from __future__ import annotations

import numba
import numpy as np

BLOCK = 256  # positions whose keys or values stay in a cache of the core
AT_ONCE = 8  # tokens of a row
LANES = 16  # of a sum

# Not cached: numba would not notice a change in another file. What XLA calls is (`cpu_calls`).
fast = numba.njit(fastmath={"contract", "nsz", "nnan"}, nogil=True, error_model="numpy")


@fast
def dots(a_h, bT_hS, first, begin, end, out_V):  # type: ignore[no-untyped-def]
    """out[s − first] = Σ_j a[j] · b[s, j] for s = begin … end − 1, j in order."""
    out_V = out_V[begin - first : end - first]
    for j in range(0, len(a_h), 4):
        a0, a1, a2, a3 = a_h[j], a_h[j + 1], a_h[j + 2], a_h[j + 3]
        b0, b1 = bT_hS[j, begin:end], bT_hS[j + 1, begin:end]
        b2, b3 = bT_hS[j + 2, begin:end], bT_hS[j + 3, begin:end]
        if j == 0:
            out_V[:] = 0
        for s in range(end - begin):
            total = a1 * b1[s] + (a0 * b0[s] + out_V[s])
            out_V[s] = a3 * b3[s] + (a2 * b2[s] + total)


@fast
def mix(weight_V, b_Sh, first, begin, end, out_h):  # type: ignore[no-untyped-def]
    """out += Σ_s weight[s − first] · b[s] for s = begin … end − 1, in order."""
    fours = end - (end - begin) % 4
    for s in range(begin, fours, 4):
        w0, w1 = weight_V[s - first], weight_V[s - first + 1]
        w2, w3 = weight_V[s - first + 2], weight_V[s - first + 3]
        b0, b1, b2, b3 = b_Sh[s], b_Sh[s + 1], b_Sh[s + 2], b_Sh[s + 3]
        for j in range(len(out_h)):
            out_h[j] = w3 * b3[j] + (w2 * b2[j] + (w1 * b1[j] + (w0 * b0[j] + out_h[j])))
    for s in range(fours, end):
        b0, w0 = b_Sh[s], weight_V[s - first]
        for j in range(len(out_h)):
            out_h[j] = w0 * b0[j] + out_h[j]


@fast
def highest(score_V):  # type: ignore[no-untyped-def]
    top = score_V[0]
    for s in range(len(score_V)):
        top = max(top, score_V[s])
    return top


@fast
def exponentials(score_V, top, bits_V, power_V):  # type: ignore[no-untyped-def]
    """Replace scores by e^(score − top), within an ulp; return their sum, position by position.

    e^x = 2^n · e^r with n = round(x · log₂e): x · log₂e + 1.5 · 2²³ has n in its low bits.
    `power_V` are the same bytes as `bits_V`.
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
    for begin in range(0, whole, LANES):
        lanes = score_V[begin : begin + LANES]
        for i in range(LANES):
            total[i] += lanes[i]
    for s in range(whole, len(score_V)):
        total[s - whole] += score_V[s]
    for i in range(1, LANES):
        total[0] += total[i]
    return total[0]
