"""Attention over packed rows and its gradients in float64, and arrays to try kernels of it with."""

import jax.numpy as jnp
import numpy as np

from reprise.models.attention.attention import may_see


def packed(T, seed=0):
    """Two rows: prompts with responses and padding behind them; one sequence."""
    rng = np.random.default_rng(seed)
    prompt, branch = np.zeros((2, 2, T), np.int32)
    at, number = 0, 0
    while at < 0.8 * T:
        number += 1
        for n, length in enumerate(rng.integers(1, max(2, T // 3), 4)):
            prompt[0, at : at + length], branch[0, at : at + length] = number, n
            at += length
    prompt[0, T - T // 8 :] = branch[0, T - T // 8 :] = 0
    prompt[1] = 1
    return prompt, branch


def inputs(T, H, K, h, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    qkv = [jnp.asarray(rng.normal(size=(2, T, n, h)), dtype) for n in (H, K, K)]
    dout = jnp.asarray(rng.normal(size=(2, T, H, h)), dtype)
    return qkv, [jnp.asarray(x) for x in packed(T, seed)], dout


def reference(qkv, places, dout):
    """Outputs, log-sum-exp and the three gradients, in float64 from the definition."""
    q, k, v, dout = (np.asarray(x.astype(jnp.float32), np.float64) for x in (*qkv, dout))
    (B, T, H, h), K = q.shape, k.shape[2]
    mask = np.tril(np.ones((T, T), bool)) & np.asarray(may_see(*places, *places))
    wide_k, wide_v = (np.repeat(x, H // K, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, wide_k) / np.sqrt(h)
    scores = np.where(mask[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    total = np.exp(scores - top).sum(axis=-1, keepdims=True)
    p = np.exp(scores - top) / total
    out = np.einsum("bhts,bshd->bthd", p, wide_v)
    dp = np.einsum("bthd,bshd->bhts", dout, wide_v)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / np.sqrt(h)

    def of_keys(x):
        return x.reshape(B, T, K, H // K, h).sum(axis=3)

    dq = np.einsum("bhts,bshd->bthd", ds, wide_k)
    dk = of_keys(np.einsum("bhts,bthd->bshd", ds, q))
    dv = of_keys(np.einsum("bhts,bthd->bshd", p, dout))
    return out, (top + np.log(total))[..., 0], dq, dk, dv


def largest_error(got, want):
    """Of each array, relative to its largest value, or to 1 where all are small."""

    def one(x, other):
        x = np.asarray(x.astype(jnp.float32), np.float64)
        assert np.isfinite(x).all()
        return np.abs(x - other).max() / max(1.0, np.abs(other).max())

    return [one(*pair) for pair in zip(got, want, strict=True)]
