"""Attention of new tokens over rows of a cache, for CPUs: compiled by numba, called by XLA.

XLA's CPU multiplies small matrices of a batch one after another on one core, and reads dead
positions. Here each core takes some of the heads, and each row is read once, up to its length. A
token's sums run over positions in their order and depend on nothing else, so that decoding, trees
and chunks round alike. Float32 only.

Shape suffixes: X tokens, B rows, S positions, H heads, K key/value heads, G = H/K, h head size,
Y queries of one key/value head, V positions of a row and its tokens.
"""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

NAME, TASK = "reprise_attend_cached_rows", "reprise_attend_cached_rows_task"
BLOCK = 256  # positions whose keys or values stay in a cache of the core
AT_ONCE = 8  # tokens of a row
LANES = 16  # of a sum

_fast = numba.njit(
    fastmath={"contract", "nsz", "nnan"}, nogil=True, cache=True, error_model="numpy"
)


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
    call = jax.ffi.ffi_call(NAME, jax.ShapeDtypeStruct(q_XHh.shape, jnp.float32))
    return call(q_XHh, k_XKh, v_XKh, keys_BKhS, values_BKSh, row_X, length_X, parent_X)


@functools.cache
def _register() -> None:
    """Compile the kernel, or read it from numba's cache, and name it for XLA."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    task = numba.cfunc("void(int64)", nopython=True, cache=True)(_take_parts)
    llvmlite.binding.add_symbol(TASK, task.address)
    call = numba.cfunc("int64(voidptr)", nopython=True, cache=True)(_call)
    jax.ffi.register_ffi_target(NAME, capsule(call.address, None, None), platform="cpu")
    _register.keeps = task, call  # type: ignore[attr-defined]


@_fast
def _scores(q_XHh, keys_BKhS, b, k, first, num_queries, length, score_YV):  # type: ignore[no-untyped-def]
    """score[y, s] = Σ_j q[y, j] · key[j, s], j in order."""
    H, h = q_XHh.shape[1:]
    G = H // keys_BKhS.shape[1]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        for y in range(num_queries):
            q_h, score_V = q_XHh[first + y // G, k * G + y % G], score_YV[y, begin:end]
            for j in range(0, h, 4):
                q0, q1, q2, q3 = q_h[j], q_h[j + 1], q_h[j + 2], q_h[j + 3]
                k0, k1 = keys_BKhS[b, k, j, begin:end], keys_BKhS[b, k, j + 1, begin:end]
                k2, k3 = keys_BKhS[b, k, j + 2, begin:end], keys_BKhS[b, k, j + 3, begin:end]
                if j == 0:
                    score_V[:] = 0
                for s in range(end - begin):
                    total = q1 * k1[s] + (q0 * k0[s] + score_V[s])
                    score_V[s] = q3 * k3[s] + (q2 * k2[s] + total)


@_fast
def _exponentials(score_V, bits_V, power_V):  # type: ignore[no-untyped-def]
    """Replace scores by e^(score − top), within an ulp; return their sum, position by position.

    e^x = 2^n · e^r with n = round(x · log₂e): x · log₂e + 1.5 · 2²³ has n in its low bits.
    `power_V` are the same bytes as `bits_V`.
    """
    top = score_V[0]
    for s in range(len(score_V)):
        top = max(top, score_V[s])
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


@_fast
def _weighted(weight_YV, values_BKSh, b, k, num_queries, length, out_Yh):  # type: ignore[no-untyped-def]
    """out[y] += Σ_s weight[y, s] · value[s], s in order."""
    h = values_BKSh.shape[3]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        fours = end - (end - begin) % 4
        for y in range(num_queries):
            out_h, w_V = out_Yh[y], weight_YV[y]
            for s in range(begin, fours, 4):
                w0, w1, w2, w3 = w_V[s], w_V[s + 1], w_V[s + 2], w_V[s + 3]
                v0, v1 = values_BKSh[b, k, s], values_BKSh[b, k, s + 1]
                v2, v3 = values_BKSh[b, k, s + 2], values_BKSh[b, k, s + 3]
                for j in range(h):
                    out_h[j] = w3 * v3[j] + (w2 * v2[j] + (w1 * v1[j] + (w0 * v0[j] + out_h[j])))
            for s in range(fours, end):
                v0, w0 = values_BKSh[b, k, s], w_V[s]
                for j in range(h):
                    out_h[j] = w0 * v0[j] + out_h[j]


@_fast
def _path(parent_X, x, path_X):  # type: ignore[no-untyped-def]
    """Fill in x and its ancestors, the first one first; return how many there are."""
    depth, at = 0, parent_X[x]
    while at >= 0:
        depth, at = depth + 1, parent_X[at]
    at = x
    for d in range(depth, -1, -1):
        path_X[d], at = at, parent_X[at]
    return depth + 1


@_fast
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


@_fast
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
        _scores(q_XHh, keys_BKhS, b, k, begin, num_queries, length, score_YV)
        for y in range(num_queries):
            x = begin + y // G
            P = _path(parent_X, x, path_X)
            q_h, score_V = q_XHh[x, k * G + y % G], score_YV[y, : length + P]
            _path_scores(q_h, k_XKh, k, path_X[:P], score_V[length:])
            for s in range(length + P):
                score_V[s] *= scale
            total_Y[y] = _exponentials(score_V, bits_V, power_V)
            out_Yh[y] = 0
        _weighted(score_YV, values_BKSh, b, k, num_queries, length, out_Yh)
        for y in range(num_queries):
            x, out_h = begin + y // G, out_Yh[y]
            P = _path(parent_X, x, path_X)
            for p in range(P):
                v_h, weight = v_XKh[path_X[p], k], score_YV[y, length + p]
                for j in range(h):
                    out_h[j] = weight * v_h[j] + out_h[j]
            for j in range(h):
                out_XHh[x, k * G + y % G, j] = out_h[j] / total_Y[y]


# --- calls of XLA --------------------------------------------------------------------------
#
# Structures are words of 8 bytes (xla/ffi/api/c_api.h). Threads of XLA's pool take heads in turn,
# and the calling thread waits for heads that were taken alone: no free thread may be left.

EXTENSION, API, CONTEXT, INPUTS, RESULTS = 1, 2, 3, 9, 14  # of a call
METADATA, METADATA_VERSION = 3, 3  # of the extension by which XLA queries the version; of these
API_VERSION, SCHEDULE, NUM_THREADS = 4, 17, 18  # of the API
DATA, SIZES = 3, 5  # of a buffer
USERS, TAKEN, DONE, PARTS, CALL = range(5)  # of shared memory
MIN_PRODUCTS = 2**18  # for several threads


@intrinsic
def _pointer(_typing, address):  # type: ignore[no-untyped-def]
    def code(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


@intrinsic
def _add(_typing, address, value):  # type: ignore[no-untyped-def]
    """Add to a word atomically; return its value before."""

    def code(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def _invoke(_typing, function, argument):  # type: ignore[no-untyped-def]
    """Call a function of one pointer by its address."""

    def code(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        pointer = ir.FunctionType(word, [word]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], pointer), [arguments[1]])

    return types.int64(types.int64, types.int64), code


@intrinsic
def _task_address(_typing):  # type: ignore[no-untyped-def]
    def code(_context, builder, _signature, _arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word])
        task = cgutils.get_or_insert_function(builder.module, function, TASK)
        return builder.ptrtoint(task, word)

    return types.int64(), code


_malloc = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))


@_fast
def _words(address, count):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(address), count, np.int64)


@_fast
def _buffer(call, i):  # type: ignore[no-untyped-def]
    """The words of input i; the output comes after the inputs."""
    if i == 8:
        return _words(_words(call[RESULTS], 1)[0], 6)
    return _words(_words(call[INPUTS], 8)[i], 6)


@_fast
def _attend_part(call, k):  # type: ignore[no-untyped-def]
    X, H, h = _words(_buffer(call, 0)[SIZES], 3)
    B, K, _, S = _words(_buffer(call, 3)[SIZES], 4)
    _attend(
        numba.carray(_pointer(_buffer(call, 0)[DATA]), (X, H, h), np.float32),
        numba.carray(_pointer(_buffer(call, 1)[DATA]), (X, K, h), np.float32),
        numba.carray(_pointer(_buffer(call, 2)[DATA]), (X, K, h), np.float32),
        numba.carray(_pointer(_buffer(call, 3)[DATA]), (B, K, h, S), np.float32),
        numba.carray(_pointer(_buffer(call, 4)[DATA]), (B, K, S, h), np.float32),
        numba.carray(_pointer(_buffer(call, 5)[DATA]), X, np.int32),
        numba.carray(_pointer(_buffer(call, 6)[DATA]), X, np.int32),
        numba.carray(_pointer(_buffer(call, 7)[DATA]), X, np.int32),
        k,
        numba.carray(_pointer(_buffer(call, 8)[DATA]), (X, H, h), np.float32),
    )


@_fast
def _take_part(address):  # type: ignore[no-untyped-def]
    """Attend with the next head; return whether there was one."""
    shared = _words(address, 5)
    part = _add(address + 8 * TAKEN, 1)
    if part >= shared[PARTS]:
        return False
    _attend_part(_words(shared[CALL], 15), part)
    _add(address + 8 * DONE, 1)
    return True


@_fast
def _leave(address):  # type: ignore[no-untyped-def]
    if _add(address + 8 * USERS, -1) == 1:
        _free(address)


def _take_parts(address):  # type: ignore[no-untyped-def]
    """Serve a task of XLA's pool."""
    while _take_part(address):
        pass
    _leave(address)


@_fast
def _num_tasks(call, address):  # type: ignore[no-untyped-def]
    """Return how many threads of the pool may help."""
    X, H, h = _words(_buffer(call, 0)[SIZES], 3)
    K = _words(_buffer(call, 3)[SIZES], 4)[1]
    length_X = numba.carray(_pointer(_buffer(call, 6)[DATA]), X, np.int32)
    if np.sum(length_X) * H * h < MIN_PRODUCTS:
        return 0
    query = _words(address, 5)  # size, extension, context, where the result goes; the result
    query[0], query[1], query[2], query[3] = 32, 0, call[CONTEXT], address + 32
    _invoke(_words(call[API], 19)[NUM_THREADS], address)
    return min(query[4], K) - 1


def _call(frame):  # type: ignore[no-untyped-def]
    """Serve a call of XLA's FFI; returns no error."""
    call = numba.carray(frame, 15, np.int64)
    if call[EXTENSION] != 0:
        metadata = _words(_words(call[EXTENSION], 4)[METADATA], 4)
        metadata[METADATA_VERSION] = _words(call[API], 5)[API_VERSION]
        return 0
    K, address = _words(_buffer(call, 3)[SIZES], 4)[1], _malloc(80)
    shared, task = _words(address, 5), _words(address + 40, 5)
    tasks = _num_tasks(call, address + 40)
    shared[USERS], shared[TAKEN], shared[DONE], shared[PARTS] = 1 + tasks, 0, 0, K
    shared[CALL] = call.ctypes.data
    # size, extension, context, function, its argument
    task[0], task[1], task[2], task[3], task[4] = 40, 0, call[CONTEXT], _task_address(), address
    for _ in range(tasks):
        _invoke(_words(call[API], 18)[SCHEDULE], address + 40)
    while _take_part(address):
        pass
    while _add(address + 8 * DONE, 0) < K:
        pass
    _leave(address)
    return 0
