"""Attention of new tokens over rows of a cache, on CPUs.

XLA's CPU multiplies small matrices of a batch one after another on one core, and reads dead
positions. Here each core takes some of the heads, and each row is read once, up to its length.
Decoding, trees and chunks round alike (`cpu_sums`). Float32 only.

Shape suffixes: X tokens, B rows, S positions, H heads, K key/value heads, G = H/K, h head size,
Y queries of one key/value head, V positions that a query sees, P tokens of a path.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numba
import numpy as np

from models.kernels import cpu_calls
from models.kernels.cpu_sums import AT_ONCE, BLOCK, dots, exponentials, fast, highest, mix

NAME = "reprise_attend_cached_rows"
_task = cpu_calls.task_of(NAME)


def takes(head_dim: int, *dtypes: jnp.dtype) -> bool:
    """Return whether the kernel takes these sizes."""
    return head_dim % 4 == 0 and all(dtype == jnp.float32 for dtype in dtypes)


def attend(
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    keys_BKhS: jax.Array,
    values_BKSh: jax.Array,
    row_X: jax.Array,
    length_X: jax.Array,
    parent_X: jax.Array,
) -> jax.Array:
    """Return softmax(q·k/√h)·v over a row's first positions, a token's ancestors and itself.

    Token x follows token `parent_X[x]`, or the row's first `length` positions if that is −1.
    Tokens of no row get zeros. Float32 [X, H, h].
    """
    _register()
    inputs = q_XHh, k_XKh, v_XKh, keys_BKhS, values_BKSh, row_X, length_X, parent_X
    return jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(q_XHh.shape, jnp.float32))(*inputs)


@fast
def _path(parent_X, x, path_X):  # type: ignore[no-untyped-def]
    """Fill in x and its ancestors, the first one first; return how many there are."""
    depth, at = 0, parent_X[x]
    while at >= 0:
        depth, at = depth + 1, parent_X[at]
    at = x
    for d in range(depth, -1, -1):
        path_X[d], at = at, parent_X[at]
    return depth + 1


@fast
def _path_scores(q_h, k_XKh, k, path_P, score_P):  # type: ignore[no-untyped-def]
    """score[p] = Σ_j q[j] · key[path[p], j], j in order, four at a time."""
    fours = len(path_P) - len(path_P) % 4
    for p in range(0, fours, 4):
        k0, k1 = k_XKh[path_P[p], k], k_XKh[path_P[p + 1], k]
        k2, k3 = k_XKh[path_P[p + 2], k], k_XKh[path_P[p + 3], k]
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(len(q_h)):
            s0, s1 = q_h[j] * k0[j] + s0, q_h[j] * k1[j] + s1
            s2, s3 = q_h[j] * k2[j] + s2, q_h[j] * k3[j] + s3
        score_P[p], score_P[p + 1], score_P[p + 2], score_P[p + 3] = s0, s1, s2, s3
    for p in range(fours, len(path_P)):
        k0, s0 = k_XKh[path_P[p], k], np.float32(0)
        for j in range(len(q_h)):
            s0 = q_h[j] * k0[j] + s0
        score_P[p] = s0


@fast
def _attend(q_XHh, k_XKh, v_XKh, keys_BKhS, values_BKSh, row_X, length_X, parent_X, k, out_XHh):  # type: ignore[no-untyped-def]
    """Attend with the query heads of key/value head k."""
    (X, H, h), (B, K, _, S) = q_XHh.shape, keys_BKhS.shape
    G = H // K
    path_X = np.empty(X, np.int64)
    score_YV = np.empty((AT_ONCE * G, S + X), np.float32)
    bits_V = np.empty(S + X, np.int32)
    power_V = bits_V.view(np.float32)
    out_Yh, total_Y = np.empty((AT_ONCE * G, h), np.float32), np.empty(AT_ONCE * G, np.float32)
    scale = np.float32(1 / np.sqrt(h))
    end = 0
    while end < X:
        begin, b = end, row_X[end]
        while end < X and row_X[end] == b and end < begin + AT_ONCE:
            end += 1
        if b < 0 or b >= B:
            out_XHh[begin:end, k * G : (k + 1) * G] = 0
            continue
        length, num_queries = min(max(length_X[begin], 0), S), (end - begin) * G
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            for y in range(num_queries):
                q_h = q_XHh[begin + y // G, k * G + y % G]
                dots(q_h, keys_BKhS[b, k], 0, first, last, score_YV[y])
        for y in range(num_queries):
            x = begin + y // G
            P = _path(parent_X, x, path_X)
            q_h, score_V = q_XHh[x, k * G + y % G], score_YV[y, : length + P]
            _path_scores(q_h, k_XKh, k, path_X[:P], score_V[length:])
            for s in range(length + P):
                score_V[s] *= scale
            total_Y[y] = exponentials(score_V, highest(score_V), bits_V, power_V)
            out_Yh[y] = 0
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            for y in range(num_queries):
                mix(score_YV[y], values_BKSh[b, k], 0, first, last, out_Yh[y])
        for y in range(num_queries):
            x, out_h = begin + y // G, out_Yh[y]
            P = _path(parent_X, x, path_X)
            for p in range(P):
                v_h, weight = v_XKh[path_X[p], k], score_YV[y, length + p]
                for j in range(h):
                    out_h[j] = weight * v_h[j] + out_h[j]
            for j in range(h):
                out_XHh[x, k * G + y % G, j] = out_h[j] / total_Y[y]


@fast
def _run(call, k):  # type: ignore[no-untyped-def]
    X, H, h = cpu_calls.sizes(call, 0, 3)
    B, K, _, S = cpu_calls.sizes(call, 3, 4)
    _attend(
        *(
            cpu_calls.floats(call, 0, (X, H, h)),
            cpu_calls.floats(call, 1, (X, K, h)),
            cpu_calls.floats(call, 2, (X, K, h)),
        ),
        *(cpu_calls.floats(call, 3, (B, K, h, S)), cpu_calls.floats(call, 4, (B, K, S, h))),
        *(
            cpu_calls.integers(call, 5, X),
            cpu_calls.integers(call, 6, X),
            cpu_calls.integers(call, 7, X),
        ),
        *(k, cpu_calls.output(call, 0, (X, H, h))),
    )


@fast
def _begin(call):  # type: ignore[no-untyped-def]
    X, H, h = cpu_calls.sizes(call, 0, 3)
    num_products = np.sum(cpu_calls.integers(call, 6, X)) * H * h
    num_heads = cpu_calls.sizes(call, 3, 4)[1]
    return cpu_calls.begin(call, num_heads, num_products, _task())


def _functions(stamp):  # type: ignore[no-untyped-def]
    """Return the task and the call; the stamp is for numba's cache."""

    def task(address):  # type: ignore[no-untyped-def]
        part = cpu_calls.take(address) if stamp >= 0 else -1
        while part >= 0:
            _run(cpu_calls.call_of(address), part)
            cpu_calls.done(address)
            part = cpu_calls.take(address)
        cpu_calls.leave(address)

    def call(frame):  # type: ignore[no-untyped-def]
        call = numba.carray(frame, 15, np.int64)
        if cpu_calls.is_query(call):
            return 0
        address = _begin(call) if stamp >= 0 else 0
        part = cpu_calls.take(address)
        while part >= 0:
            _run(call, part)
            cpu_calls.done(address)
            part = cpu_calls.take(address)
        cpu_calls.end(address)
        return 0

    return task, call


@functools.cache
def _register() -> None:
    cpu_calls.register(NAME, *_functions(cpu_calls.stamp(__file__)))
