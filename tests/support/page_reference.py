"""Attention to pages in float64, and arrays to try kernels of it with."""

import jax.numpy as jnp
import numpy as np

from reprise.models.kernels.shared.powers import LOG2_E, NEGATIVE

B, h = 3, 128


def arrays(W, G, K, T, N, dtype, seed=0, num_slots=B, h=h):
    """Return queries, keys, values and a table that takes the pages in any order."""
    rng = np.random.default_rng(seed)
    P = num_slots * N + 2
    shapes = (num_slots, W, K * G, h), (P, K, T, h), (P, K, T, h)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, rng.permutation(P)[: num_slots * N].reshape(num_slots, N).astype(np.int32)


def only_live(table, lengths, T, behind=-1):
    """Return the table with another number behind the live pages."""
    live = np.arange(table.shape[1]) < -(-np.asarray(lengths)[:, None] // T)
    return np.where(live, table, behind).astype(np.int32)


def reference(q, k, v, table, lengths):
    """The partial softmax over the first positions of each slot, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    G, T = q.shape[2] // k.shape[1], k.shape[2]
    out, top, total = np.zeros(q.shape), *np.zeros((2, *q.shape[:3], 1))
    for b, length in enumerate(lengths):
        top[b] = np.float32(NEGATIVE)
        if not length:
            continue
        pages = table[b, : -(-length // T)]
        k_SHh, v_SHh = (
            np.repeat(x[pages].transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2])[:length], G, 1)
            for x in (k, v)
        )
        scores = np.einsum("whd,shd->whs", q[b], k_SHh) / np.sqrt(q.shape[-1]) * LOG2_E
        top[b] = np.round(scores.max(axis=-1, keepdims=True))
        weights = np.exp2(scores - top[b])
        total[b] = weights.sum(axis=-1, keepdims=True)
        out[b] = np.einsum("whs,shd->whd", weights, v_SHh)
    return out, top, total


def assert_close(found, wanted, tolerance):
    """Each slot within the tolerance of its largest number."""
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == jnp.float32 and x.shape == y.shape
        for b in range(len(y)):
            np.testing.assert_allclose(x[b], y[b], rtol=0, atol=tolerance * np.abs(y[b]).max())
