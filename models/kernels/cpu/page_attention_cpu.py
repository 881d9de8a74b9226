"""Attention of new tokens over the pages of a cache, on CPUs.

XLA on CPUs multiplies the small matrices of a batch in sequence on one core, and reads dead
positions. Here a part is some of the rows with one key/value head, and a row is read up to its
length, as float32 or bfloat16. Decoding, trees, chunks and training sum in one order, by position
(`cpu_sums`), in float32.

A run is up to `AT_ONCE` tokens of a row. Shape suffixes: X tokens, B rows, N pages of a row, P
pages, T positions of a page, H heads, K key/value heads, G = H/K, h head size, Y queries of one
key/value head, V positions that a query sees. In `_attend`, P are the tokens of a path.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from reprise.models.kernels.cpu import cpu_calls
from reprise.models.kernels.cpu.cpu_sums import (
    AT_ONCE,
    all_dots,
    dots,
    exponentials,
    fast,
    highest,
    mix,
    mix_all,
)
from reprise.models.kernels.cpu.cpu_tiles import LANES, LINE

NAME = "reprise_attend_pages"
PART_PRODUCTS = 2**19  # about, of a part; scheduling a smaller part costs more than computing it
_task = cpu_calls.task_of(NAME)


def takes(head_dim: int, page_tokens: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim % LANES:
        return f"expected a head size that {LANES} divides, got {head_dim}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {jnp.dtype(dtype).name}"
    return None


def attend(
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    keys_PKhT: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    row_X: jax.Array,
    length_X: jax.Array,
    parent_X: jax.Array,
) -> jax.Array:
    """Return softmax(q·k/√h)·v over cached positions, the ancestors of a token, and the token.

    Token x follows token `parent_X[x]`, or the first `length` positions of its row if that is −1.
    Tokens without a row get zeros. The result is [X, H, h] in the dtype of `v_XKh`.
    """
    assert keys_PKhT.dtype == values_PKTh.dtype, "one size of numbers"
    register()
    new = (x.astype(jnp.float32) for x in (q_XHh, k_XKh, v_XKh))
    call = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(q_XHh.shape, jnp.float32))
    return call(*new, keys_PKhT, values_PKTh, row_X, length_X, parent_X, table_BN).astype(
        v_XKh.dtype
    )


@fast
def _run_end(row_X, begin):  # type: ignore[no-untyped-def]
    end = begin + 1
    while end < len(row_X) and row_X[end] == row_X[begin] and end < begin + AT_ONCE:
        end += 1
    return end


@fast
def _positions(row_X, length_X, num_rows, begin, end, num_before):  # type: ignore[no-untyped-def]
    """Return how many positions a run reads after `num_before` tokens of its row; at least 1."""
    if row_X[begin] < 0 or row_X[begin] >= num_rows:
        return 1
    return (end - begin) * (max(length_X[begin], 0) + num_before + 1)


@fast
def _size(row_X, length_X, num_rows):  # type: ignore[no-untyped-def]
    """Return the number of positions that all runs read, and the number of runs."""
    total = 0
    num_runs = 0
    num_before = 0
    end = 0
    while end < len(row_X):
        begin = end
        end = _run_end(row_X, end)
        num_before = num_before if begin and row_X[begin - 1] == row_X[begin] else 0
        total += _positions(row_X, length_X, num_rows, begin, end, num_before)
        num_before += end - begin
        num_runs += 1
    return total, num_runs


@fast
def _num_groups(positions, num_runs, H, K, h):  # type: ignore[no-untyped-def]
    """Return the number of groups of runs, each computed with K heads; makes parts even in number.

    With few parts, some cores have no part, or one core has two.
    """
    products = positions * H * h
    groups = min(-(-products // (K * PART_PRODUCTS)), num_runs)
    return groups + 1 if K * groups % 2 and groups < num_runs else groups


@fast
def _path(parent_X, x, state_2, path_X):  # type: ignore[no-untyped-def]
    """Fill in x and its ancestors, root first; return how many entries were there already.

    `state_2` has the token at the tip of the previous path, and the length of that path.
    """
    before, num = state_2
    state_2[0] = x
    if num and parent_X[x] == before:
        path_X[num] = x
        state_2[1] = num + 1
        return num
    num = 1
    at = parent_X[x]
    while at >= 0:
        num = num + 1
        at = parent_X[at]
    at = x
    state_2[1] = num
    for p in range(num - 1, -1, -1):
        path_X[p] = at
        at = parent_X[at]
    return 0


@fast
def _scores(q_Yh, keys, table_BN, b, k, length, score_YV):  # type: ignore[no-untyped-def]
    """Fill in q · k of queries with the first `length` positions of row b."""
    T = keys.shape[3]
    for first in range(0, length, T):
        page_hT = keys[max(table_BN[b, first // T], 0), k]
        all_dots(q_Yh, page_hT, 0, min(T, length - first), score_YV, first)


@fast
def _mix(weight_YV, values, table_BN, b, k, length, num_queries, out_Yh):  # type: ignore[no-untyped-def]
    """Add the weighted values of the first `length` positions of row b."""
    weight = weight_YV.ctypes.data
    out = out_Yh.ctypes.data
    V = weight_YV.shape[1]
    h = values.shape[3]
    T = values.shape[2]
    for first in range(0, length, T):
        value = values[max(table_BN[b, first // T], 0), k].ctypes.data
        count = min(T, length - first)
        bytes_ = values.itemsize
        mix_all(weight + 4 * first, V, 1, value, h, out, num_queries, count, bytes_)


@fast
def _attend(q_XHh, k_XKh, v_XKh, keys, values, places, table_BN, part, out_XHh):  # type: ignore[no-untyped-def]
    """Attend with the query heads of one key/value head, for a group of runs."""
    X, H, h = q_XHh.shape
    _, K, T, _ = values.shape
    row_X, length_X, parent_X = places
    B = len(table_BN)
    S = T * table_BN.shape[1]
    G = H // K
    k = part % K
    group = part // K
    total, num_runs = _size(row_X, length_X, B)
    num_groups = _num_groups(total, num_runs, H, K, h)
    key_path_X = np.empty(X, np.int64)
    value_path_X = np.empty(X, np.int64)
    key_path_2 = np.zeros(2, np.int64)
    value_path_2 = np.zeros(2, np.int64)
    keyT_hX = np.empty((h, X), np.float32)
    value_Xh = np.empty((X, h), np.float32)
    q_Yh = np.empty((AT_ONCE * G, h), np.float32)
    num_seen = min(max(length_X.max(), 0), S) + X
    num_seen = (num_seen // LINE + 2) * LINE  # whole lines; a tile may write one more
    score_YV = np.empty((AT_ONCE * G, num_seen), np.float32)
    bits_V = np.empty(num_seen, np.int32)
    power_V = bits_V.view(np.float32)
    out_Yh = np.empty((AT_ONCE * G, h), np.float32)
    total_Y = np.empty(AT_ONCE * G, np.float32)
    scale = np.float32(1 / np.sqrt(h))
    before = 0
    num_before = 0
    end = 0
    while end < X:
        begin = end
        end = _run_end(row_X, end)
        b = row_X[begin]
        num_before = num_before if begin and row_X[begin - 1] == b else 0
        is_mine = before * num_groups // total == group
        before += _positions(row_X, length_X, B, begin, end, num_before)
        num_before += end - begin
        if not is_mine:
            continue
        if b < 0 or b >= B:
            out_XHh[begin:end, k * G : (k + 1) * G] = 0
            continue
        length = min(max(length_X[begin], 0), S)
        num_queries = (end - begin) * G
        for y in range(num_queries):
            q_Yh[y] = q_XHh[begin + y // G, k * G + y % G]
        _scores(q_Yh[:num_queries], keys, table_BN, b, k, length, score_YV)
        for x in range(begin, end):
            for p in range(_path(parent_X, x, key_path_2, key_path_X), key_path_2[1]):
                keyT_hX[:, p] = k_XKh[key_path_X[p], k]
            for g in range(G):
                y = (x - begin) * G + g
                P = key_path_2[1]
                dots(q_XHh[x, k * G + g], keyT_hX, 0, 0, P, score_YV[y, length:])
                score_V = score_YV[y, : length + P]
                for s in range(length + P):
                    score_V[s] *= scale
                total_Y[y] = exponentials(score_V, highest(score_V), bits_V, power_V)
                out_Yh[y] = 0
        _mix(score_YV, values, table_BN, b, k, length, num_queries, out_Yh)
        for x in range(begin, end):
            for p in range(_path(parent_X, x, value_path_2, value_path_X), value_path_2[1]):
                value_Xh[p] = v_XKh[value_path_X[p], k]
            for g in range(G):
                y = (x - begin) * G + g
                mix(score_YV[y, length:], value_Xh, 0, 0, value_path_2[1], out_Yh[y])
                for j in range(h):
                    out_XHh[x, k * G + g, j] = out_Yh[y, j] / total_Y[y]


@fast
def _run(call, part):  # type: ignore[no-untyped-def]
    X, H, h = cpu_calls.sizes(call, 0, 3)
    K = cpu_calls.sizes(call, 1, 3)[1]
    P, _, T, _ = cpu_calls.sizes(call, 4, 4)
    B, N = cpu_calls.sizes(call, 8, 2)
    q = cpu_calls.floats(call, 0, (X, H, h))
    out = cpu_calls.output(call, 0, (X, H, h))
    k = cpu_calls.floats(call, 1, (X, K, h))
    v = cpu_calls.floats(call, 2, (X, K, h))
    places = _places(call)
    table = cpu_calls.integers(call, 8, (B, N))
    key_shape = (P, K, h, T)
    value_shape = (P, K, T, h)
    if cpu_calls.number_bytes(call, 3) == 4:
        keys = cpu_calls.floats(call, 3, key_shape)
        values = cpu_calls.floats(call, 4, value_shape)
        _attend(q, k, v, keys, values, places, table, part, out)
    else:
        halves = cpu_calls.halves(call, 3, key_shape), cpu_calls.halves(call, 4, value_shape)
        _attend(q, k, v, halves[0], halves[1], places, table, part, out)


@fast
def _places(call):  # type: ignore[no-untyped-def]
    """Return the row, length and parent of each token."""
    X = cpu_calls.sizes(call, 0, 1)[0]
    row = cpu_calls.integers(call, 5, X)
    length = cpu_calls.integers(call, 6, X)
    return row, length, cpu_calls.integers(call, 7, X)


_serve = cpu_calls.serving(_run)


@fast
def _begin(call):  # type: ignore[no-untyped-def]
    _, H, h = cpu_calls.sizes(call, 0, 3)
    K = cpu_calls.sizes(call, 1, 3)[1]
    row_X, length_X, _ = _places(call)
    num_rows = cpu_calls.sizes(call, 8, 1)[0]
    total, num_runs = _size(row_X, length_X, num_rows)
    num_parts = K * _num_groups(total, num_runs, H, K, h)
    return cpu_calls.begin(call, num_parts, total * H * h, _task())


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
