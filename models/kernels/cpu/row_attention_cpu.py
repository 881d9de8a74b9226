"""Attention over packed rows on CPUs, forward and backward (`models.decoder.row_attention`).

A token sees the shared tokens of its prompt, and its response up to itself: two ranges. So the
tokens of a prompt must be adjacent in a row, and so must the tokens of a response, as
`rl.records.packing` lays them out. Padding sees itself. A part is a segment with one key/value
head; a segment is a prompt of a row with its responses, which no other token sees. Sums are
float32.

Shape suffixes: B rows, T tokens of a row, or of a segment, H heads, K key/value heads, G = H/K, h
head size, Y queries of one key/value head, V positions that a query sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from reprise.models.kernels.cpu import cpu_calls
from reprise.models.kernels.cpu.cpu_sums import (
    AT_ONCE,
    BLOCK,
    all_dots,
    exponentials,
    fast,
    highest,
    mix_all,
)
from reprise.models.kernels.cpu.cpu_tiles import LANES, LINE

NAME = "reprise_attend_packed_rows"
_task = cpu_calls.task_of(NAME)


def takes(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Return why the kernel does not take [B, T, H, h] and [B, T, K, h]; None if it does."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"expected float32 or bfloat16, got {jnp.dtype(dtype).name}"
    if q_shape[3] % LANES:
        return f"expected a head size that {LANES} divides, got {q_shape[3]}"
    return None


def forward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return attention as `decoder.row_attention`, [B, T, H, h], and log Σ e^score [B, H, T]."""
    B, T, H, _ = q_BTHh.shape
    inputs = q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT
    out_BTHh, lse_BHT = _call(inputs, _like((q_BTHh.shape, (B, H, T))))
    return out_BTHh.astype(v_BTKh.dtype), lse_BHT


def backward(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    prompt_BT: jax.Array,
    branch_BT: jax.Array,
    out_BTHh: jax.Array,
    lse_BHT: jax.Array,
    dout_BTHh: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values, from inputs and results of `forward`."""
    inputs = q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT, out_BTHh, lse_BHT, dout_BTHh
    gradients = _call(inputs, _like(x.shape for x in inputs[:3]))
    return tuple(x.astype(like.dtype) for x, like in zip(gradients, inputs, strict=False))


def _like(shapes: Iterable[tuple[int, ...]]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _call(inputs: tuple[jax.Array, ...], outputs: Any) -> Any:
    register()
    wide = (x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in inputs)
    return jax.ffi.ffi_call(NAME, outputs)(*wide)


@fast
def _num_segments(prompt_BT):  # type: ignore[no-untyped-def]
    num = len(prompt_BT)
    for prompt_T in prompt_BT:
        for t in range(1, len(prompt_T)):
            num += prompt_T[t] != prompt_T[t - 1]
    return num


@fast
def _segment(prompt_BT, number):  # type: ignore[no-untyped-def]
    """Return the row of a segment, its first token and its end."""
    b = 0
    first = 0
    for _ in range(number + 1):
        if first == prompt_BT.shape[1]:
            b = b + 1
            first = 0
        begin = first
        first = first + 1
        while first < prompt_BT.shape[1] and prompt_BT[b, first] == prompt_BT[b, begin]:
            first += 1
    return b, begin, first


@fast
def _ranges(prompt_T, branch_T, ranges_T3):  # type: ignore[no-untyped-def]
    """Fill in the shared range (first, end) of each token, and the first token of its response."""
    own = 0
    shared = 0
    shared_end = 0
    for t in range(len(prompt_T)):
        is_new = t == 0 or prompt_T[t] != prompt_T[t - 1] or branch_T[t] != branch_T[t - 1]
        if is_new and (t == 0 or prompt_T[t] != prompt_T[t - 1]):
            shared = t
            shared_end = t
        if is_new or prompt_T[t] <= 0:
            own = t
        if branch_T[t] == 0:
            shared_end = t + 1
        is_apart = branch_T[t] == 0 or prompt_T[t] <= 0  # sees no other range
        ranges_T3[t, 0], ranges_T3[t, 1] = (own, own) if is_apart else (shared, shared_end)
        ranges_T3[t, 2] = own


@fast
def _block_end(ranges_T3, begin):  # type: ignore[no-untyped-def]
    """Return the end of a block of tokens with equal ranges."""
    end = begin + 1
    while (
        end < len(ranges_T3) and end < begin + AT_ONCE and ranges_T3[end, 2] == ranges_T3[begin, 2]
    ):
        end += 1
    return end


@fast
def _dots_of_block(a_TGh, bT_hT, ranges_T3, begin, end, out_YV):  # type: ignore[no-untyped-def]
    """Fill in the products of the rows of a block with the tokens that its last token sees."""
    shared, shared_end, own = ranges_T3[begin]
    a_Yh = a_TGh[begin:end].reshape(-1, a_TGh.shape[2])
    all_dots(a_Yh, bT_hT, shared, shared_end, out_YV, 0)
    all_dots(a_Yh, bT_hT, own, end, out_YV, shared_end - shared)


@fast
def _mix_of_block(weight_YV, b_Th, ranges_T3, begin, end, out_TGh):  # type: ignore[no-untyped-def]
    """Add the weighted tokens that the last token of a block sees to the rows of the block."""
    shared, shared_end, own = ranges_T3[begin]
    _, G, h = out_TGh.shape
    V = weight_YV.shape[1]
    weight = weight_YV.ctypes.data
    out = out_TGh[begin].ctypes.data
    num_rows = (end - begin) * G
    for first in range(shared, shared_end, BLOCK):
        b = b_Th[first].ctypes.data
        count = min(BLOCK, shared_end - first)
        mix_all(weight + 4 * (first - shared), V, 1, b, h, out, num_rows, count, 4)
    weight += 4 * (shared_end - shared)
    for first in range(own, end, BLOCK):
        b = b_Th[first].ctypes.data
        count = min(BLOCK, end - first)
        mix_all(weight + 4 * (first - own), V, 1, b, h, out, num_rows, count, 4)


@fast
def _spread(weight_YV, a_TGh, ranges_T3, begin, end, out_Th):  # type: ignore[no-untyped-def]
    """Add the weighted rows of a block to the tokens that its last token sees."""
    shared, shared_end, own = ranges_T3[begin]
    _, G, h = a_TGh.shape
    V = weight_YV.shape[1]
    weight = weight_YV.ctypes.data
    a = a_TGh[begin].ctypes.data
    num_rows = (end - begin) * G
    out = out_Th.ctypes.data
    mix_all(weight, 1, V, a, h, out + 4 * shared * h, shared_end - shared, num_rows, 4)
    weight += 4 * (shared_end - shared)
    mix_all(weight, 1, V, a, h, out + 4 * own * h, end - own, num_rows, 4)


@fast
def _head(x_TKh, k, out_Th):  # type: ignore[no-untyped-def]
    for t in range(len(out_Th)):
        for j in range(out_Th.shape[1]):
            out_Th[t, j] = x_TKh[t, k, j]
    return out_Th


@fast
def _heads(x_THh, k, out_TGh):  # type: ignore[no-untyped-def]
    G = out_TGh.shape[1]
    for t in range(len(out_TGh)):
        for g in range(G):
            for j in range(out_TGh.shape[2]):
                out_TGh[t, g, j] = x_THh[t, k * G + g, j]
    return out_TGh


@fast
def _forward(q_THh, k_TKh, v_TKh, prompt_T, branch_T, k, out_THh, lse_HT):  # type: ignore[no-untyped-def]
    """Attend with the query heads of key/value head k in a segment."""
    T, H, h = q_THh.shape
    K = k_TKh.shape[1]
    G = H // K
    ranges_T3 = np.empty((T, 3), np.int64)
    _ranges(prompt_T, branch_T, ranges_T3)
    q_TGh = _heads(q_THh, k, np.empty((T, G, h), np.float32))
    keyT_hT = np.ascontiguousarray(_head(k_TKh, k, np.empty((T, h), np.float32)).T)
    v_Th = _head(v_TKh, k, np.empty((T, h), np.float32))
    out_TGh = np.zeros((T, G, h), np.float32)
    score_YV = np.empty((AT_ONCE * G, T + LINE), np.float32)
    bits_V = np.empty(T, np.int32)
    power_V = bits_V.view(np.float32)
    total_Y = np.empty(AT_ONCE * G, np.float32)
    scale = np.float32(1 / np.sqrt(h))
    end = 0
    while end < T:
        begin = end
        end = _block_end(ranges_T3, end)
        shared, shared_end, own = ranges_T3[begin]
        _dots_of_block(q_TGh, keyT_hT, ranges_T3, begin, end, score_YV)
        for y in range((end - begin) * G):
            t = begin + y // G
            score_V = score_YV[y, : shared_end - shared + t + 1 - own]
            for s in range(len(score_V)):
                score_V[s] *= scale
            top = highest(score_V)
            total_Y[y] = exponentials(score_V, top, bits_V, power_V)
            lse_HT[k * G + y % G, t] = top + np.log(total_Y[y])
            score_YV[y, len(score_V) : shared_end - shared + end - own] = 0
        _mix_of_block(score_YV, v_Th, ranges_T3, begin, end, out_TGh)
        for y in range((end - begin) * G):
            t = begin + y // G
            out_h = out_TGh[begin + y // G, y % G]
            for j in range(h):
                out_THh[t, k * G + y % G, j] = out_h[j] / total_Y[y]


@fast
def _backward(
    q_THh, k_TKh, v_TKh, prompt_T, branch_T, out_THh, lse_HT, dout_THh, k, dq_THh, dk_TKh, dv_TKh,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Fill in the gradients of key/value head k and of its query heads in a segment."""
    T, H, h = q_THh.shape
    K = k_TKh.shape[1]
    G = H // K
    ranges_T3 = np.empty((T, 3), np.int64)
    _ranges(prompt_T, branch_T, ranges_T3)
    q_TGh = _heads(q_THh, k, np.empty((T, G, h), np.float32))
    dout_TGh = _heads(dout_THh, k, np.empty((T, G, h), np.float32))
    k_Th = _head(k_TKh, k, np.empty((T, h), np.float32))
    keyT_hT = np.ascontiguousarray(k_Th.T)
    valueT_hT = np.ascontiguousarray(_head(v_TKh, k, np.empty((T, h), np.float32)).T)
    dq_TGh = np.zeros((T, G, h), np.float32)
    dk_Th = np.zeros((T, h), np.float32)
    dv_Th = np.zeros((T, h), np.float32)
    p_YV = np.empty((AT_ONCE * G, T + LINE), np.float32)
    ds_YV = np.empty_like(p_YV)
    bits_V = np.empty(T, np.int32)
    power_V = bits_V.view(np.float32)
    scale = np.float32(1 / np.sqrt(h))
    end = 0
    while end < T:
        begin = end
        end = _block_end(ranges_T3, end)
        shared, shared_end, own = ranges_T3[begin]
        num_queries = (end - begin) * G
        num_shared = shared_end - shared
        _dots_of_block(q_TGh, keyT_hT, ranges_T3, begin, end, p_YV)
        _dots_of_block(dout_TGh, valueT_hT, ranges_T3, begin, end, ds_YV)
        for y in range(num_queries):
            t = begin + y // G
            head = k * G + y % G
            seen = num_shared + begin + y // G + 1 - own
            p_V = p_YV[y, :seen]
            ds_V = ds_YV[y, :seen]
            delta = np.float32(0)
            for j in range(h):
                delta += out_THh[t, head, j] * dout_TGh[t, y % G, j]
            for s in range(seen):
                p_V[s] *= scale
            exponentials(p_V, lse_HT[head, t], bits_V, power_V)
            for s in range(seen):
                ds_V[s] = p_V[s] * (ds_V[s] - delta) * scale
            p_YV[y, seen : num_shared + end - own] = 0
            ds_YV[y, seen : num_shared + end - own] = 0
        _mix_of_block(ds_YV, k_Th, ranges_T3, begin, end, dq_TGh)
        _spread(ds_YV, q_TGh, ranges_T3, begin, end, dk_Th)
        _spread(p_YV, dout_TGh, ranges_T3, begin, end, dv_Th)
    dk_TKh[:, k] = dk_Th
    dv_TKh[:, k] = dv_Th
    dq_THh[:, k * G : (k + 1) * G] = dq_TGh


@fast
def _run(call, part):  # type: ignore[no-untyped-def]
    """Compute a part of `forward`, which has two outputs, or of `backward`."""
    B, T, H, h = cpu_calls.sizes(call, 0, 4)
    K = cpu_calls.sizes(call, 1, 4)[2]
    queries = (B, T, H, h)
    keys = (B, T, K, h)
    sums = (B, H, T)
    prompt = cpu_calls.integers(call, 3, (B, T))
    head = part % K
    b, begin, end = _segment(prompt, part // K)
    q_THh = cpu_calls.floats(call, 0, queries)[b, begin:end]
    k_TKh = cpu_calls.floats(call, 1, keys)[b, begin:end]
    v_TKh = cpu_calls.floats(call, 2, keys)[b, begin:end]
    prompt_T = prompt[b, begin:end]
    branch_T = cpu_calls.integers(call, 4, (B, T))[b, begin:end]
    first = cpu_calls.output(call, 0, queries)[b, begin:end]
    if call[cpu_calls.NUM_OUTPUTS] == 2:
        lse_HT = cpu_calls.output(call, 1, sums)[b, :, begin:end]
        _forward(q_THh, k_TKh, v_TKh, prompt_T, branch_T, head, first, lse_HT)
        return
    dk_TKh = cpu_calls.output(call, 1, keys)[b, begin:end]
    dv_TKh = cpu_calls.output(call, 2, keys)[b, begin:end]
    out_THh = cpu_calls.floats(call, 5, queries)[b, begin:end]
    lse_HT = cpu_calls.floats(call, 6, sums)[b, :, begin:end]
    dout_THh = cpu_calls.floats(call, 7, queries)[b, begin:end]
    _backward(
        q_THh,
        k_TKh,
        v_TKh,
        prompt_T,
        branch_T,
        out_THh,
        lse_HT,
        dout_THh,
        head,
        first,
        dk_TKh,
        dv_TKh,
    )


_serve = cpu_calls.serving(_run)


@fast
def _begin(call):  # type: ignore[no-untyped-def]
    B, T, H, h = cpu_calls.sizes(call, 0, 4)
    parts = cpu_calls.sizes(call, 1, 4)[2] * _num_segments(cpu_calls.integers(call, 3, (B, T)))
    return cpu_calls.begin(call, parts, B * T * H * h * 16, _task())


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
