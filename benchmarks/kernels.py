"""Kernels for accelerators against float64, interpreted on a CPU: no device, no seconds.

    python -m benchmarks.kernels --json --output benchmarks/results/kernels.json

Odd shapes, lengths of nothing and of all, one page and thousands. Errors are the
largest of an array, relative to its largest value.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from models.attention import LOG2_E, may_see
from models.kernels import (
    page_append_tpu,
    page_attention_gpu,
    page_attention_tpu,
    row_attention_gpu,
    row_attention_tpu,
)

HEAD = 128
# nodes, query heads of a key/value head, key/value heads, positions of a page, pages of a slot
PAGES = ((1, 4, 2, 64, 3), (5, 1, 1, 128, 2), (16, 4, 1, 128, 5), (3, 2, 2, 128, 1))
LONG = (2, 4, 1, 128, 40)  # 5,120 positions
LONGEST = (1, 4, 1, 64, 2048)  # 131,072 positions: for interpreters of TPU kernels alone
# tokens of a row, query heads, key/value heads
ROWS = ((200, 4, 2), (384, 2, 1))
GOALS = {"float32": 1e-5, "bfloat16": 2e-2}


def page_errors(kernel: Any, dtype: Any, interpret: Any) -> float:
    """The largest error of attention to pages, over all shapes and lengths."""
    worst = 0.0
    longest = () if kernel is page_attention_gpu.attend_pages else (LONGEST,)
    for shape in (*PAGES, LONG, *longest):
        q, k, v, table_BN, lengths = _slots(*shape, dtype)
        found = kernel(q, k, v, table_BN, lengths, interpret=interpret)
        worst = max(worst, *map(_error, found, _pages(q, k, v, table_BN, lengths)))
    return worst


def _slots(W: int, G: int, K: int, T: int, N: int, dtype: Any) -> tuple:
    """Return queries, pages, a table of them in any order, and lengths from nothing to all."""
    rng = np.random.default_rng(0)
    lengths = np.array([0, N * T, max(1, N * T - T // 2 - 1), 1], np.int32)
    B, P = len(lengths), 4 * N + 2
    q, k, v = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in ((B, W, K * G, HEAD), (P, K, T, HEAD), (P, K, T, HEAD))
    )
    table_BN = rng.permutation(P)[: B * N].reshape(B, N).astype(np.int32)
    return q, k, v, table_BN, lengths


def _pages(q: Any, k: Any, v: Any, table_BN: np.ndarray, length_B: np.ndarray) -> tuple:
    """The sums, maxima and totals of the definition, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    G = q.shape[2] // k.shape[1]
    out, total = np.zeros(q.shape), np.zeros((*q.shape[:3], 1))
    top = np.full(total.shape, np.float32(page_attention_tpu.NEGATIVE), np.float64)
    for b, length in enumerate(length_B.tolist()):
        if not length:
            continue
        k_SHh, v_SHh = (
            np.repeat(x[table_BN[b]].transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2]), G, 1)
            for x in (k, v)
        )
        scores = np.einsum("whd,shd->whs", q[b], k_SHh[:length]) / np.sqrt(HEAD) * LOG2_E
        top[b] = np.round(scores.max(axis=-1, keepdims=True))
        weights = np.exp2(scores - top[b])
        total[b] = weights.sum(axis=-1, keepdims=True)
        out[b] = np.einsum("whs,shd->whd", weights, v_SHh[:length])
    return out, top, total


def append_errors(dtype: Any) -> float:
    """The largest error of attention that writes each slot's entry first, and of the pages."""
    worst = 0.0
    for _, *sizes in (*PAGES, LONG, LONGEST):
        q, k, v, table_BN, lengths = _slots(1, *sizes, dtype)
        rng, (_, K, T, _) = np.random.default_rng(1), k.shape
        new_k, new_v = (jnp.asarray(rng.normal(size=(len(q), K, HEAD)), dtype) for _ in range(2))
        given = q, new_k, new_v, k, v, table_BN, lengths
        out, keys, values = page_append_tpu.append_and_attend(*given, interpret=True)
        slots = np.flatnonzero(lengths)
        last = lengths[slots] - 1
        place = table_BN[slots, last // T], slice(None), last % T
        k, v = k.at[place].set(new_k[slots]), v.at[place].set(new_v[slots])
        sums, _, total = _pages(q, k, v, table_BN, lengths)
        worst = max(worst, _error(out, sums / np.where(total > 0, total, 1)))
        assert (keys[place] == k[place]).all() and (values[place] == v[place]).all()
    return worst


def row_errors(kernel: Any, dtype: Any, interpret: Any) -> float:
    """The largest error of attention over packed rows and of its three gradients."""
    worst = 0.0
    for T, H, K in ROWS:
        rng = np.random.default_rng(0)
        q, k, v, dout = (
            jnp.asarray(rng.normal(size=(2, T, heads, HEAD)), dtype) for heads in (H, K, K, H)
        )
        prompt = np.repeat([[1], [2]], T, axis=0).reshape(2, T).astype(np.int32)
        prompt[0, T // 2 :], branch = 3, np.zeros((2, T), np.int32)
        branch[0, T // 5 : T // 3], branch[0, T // 3 : T // 2] = 1, 2
        branch[1, T // 4 :] = 1 + np.arange(T - T // 4) // 37
        prompt[1, T - 9 :], branch[1, T - 9 :] = 0, 0  # padding
        places = jnp.asarray(prompt), jnp.asarray(branch)
        out, lse = kernel.forward(q, k, v, *places, interpret=interpret)
        rest = (q, k, v, *places, out, lse, dout)
        found = out, *kernel.backward(*rest, interpret=interpret)
        worst = max(worst, *map(_error, found, _rows(q, k, v, dout, *places)))
    return worst


def _rows(q: Any, k: Any, v: Any, dout: Any, prompt_BT: Any, branch_BT: Any) -> tuple:
    """The outputs and gradients of the definition, in float64."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    (B, T, H, h), K = q.shape, k.shape[2]
    places = prompt_BT, branch_BT
    mask_BTT = np.tril(np.ones((T, T), bool)) & np.asarray(may_see(*places, *places))
    wide_k, wide_v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, wide_k) / np.sqrt(h)
    scores = np.where(mask_BTT[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = np.einsum("bthd,bshd->bhts", dout, wide_v)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / np.sqrt(h)

    def of_keys(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, T, K, H // K, h).sum(axis=3)

    dk = of_keys(np.einsum("bhts,bthd->bshd", ds, q))
    dv = of_keys(np.einsum("bhts,bthd->bshd", p, dout))
    out = np.einsum("bhts,bshd->bthd", p, wide_v)
    return out, np.einsum("bhts,bshd->bthd", ds, wide_k), dk, dv


def _error(found: Any, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    found = np.asarray(jnp.asarray(found, jnp.float32), np.float64)
    assert found.shape == wanted.shape and np.isfinite(found).all()
    finite = np.abs(wanted) < 1e29  # the top of an empty slot stands for itself
    assert (found[~finite] == wanted[~finite]).all()
    scale = np.abs(wanted[finite]).max(initial=0.0) or 1.0
    return float(np.abs(found - wanted)[finite].max(initial=0.0) / scale)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # has no public name

    gpu = InterpretGPUParams()
    figures = {
        "pages_tpu_float32": page_errors(page_attention_tpu.attend_pages, jnp.float32, True),
        "pages_tpu_bfloat16": page_errors(page_attention_tpu.attend_pages, jnp.bfloat16, True),
        "append_tpu_float32": append_errors(jnp.float32),
        "append_tpu_bfloat16": append_errors(jnp.bfloat16),
        "pages_gpu_bfloat16": page_errors(page_attention_gpu.attend_pages, jnp.bfloat16, gpu),
        "rows_tpu_float32": row_errors(row_attention_tpu, jnp.float32, True),
        "rows_tpu_bfloat16": row_errors(row_attention_tpu, jnp.bfloat16, True),
        "rows_gpu_bfloat16": row_errors(row_attention_gpu, jnp.bfloat16, gpu),
    }
    result = {
        **environment.record("benchmarks.kernels", ("jax", "jaxlib")),
        "kind": "interpreted",
        "goals": GOALS,
        "errors": figures,
        "float32": max(x for name, x in figures.items() if "float32" in name),
        "bfloat16": max(x for name, x in figures.items() if "bfloat16" in name),
    }
    environment.show(result, arguments, figures)


if __name__ == "__main__":
    main()
