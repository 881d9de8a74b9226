"""The last tokens of rows: from their tables on the host, moved on by a round on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def tails(
    tokens_AL: np.ndarray, total_tokens_A: np.ndarray, num_tokens: int, nothing: int
) -> np.ndarray:
    """The last `num_tokens` of each row's total, `nothing` before its first; int32 [A, K]."""
    at_AK = total_tokens_A[:, None] - num_tokens + np.arange(num_tokens)
    last_AK = np.take_along_axis(tokens_AL, np.maximum(at_AK, 0), axis=1)
    return np.where(at_AK >= 0, last_AK, nothing).astype(np.int32)


def moved_on(tail_BK: jax.Array, tokens_BN: jax.Array, count_B: jax.Array) -> jax.Array:
    """The tails after the first `count` of the new tokens."""
    both_BX = jnp.concatenate([tail_BK, tokens_BN], axis=1)
    at_BK = count_B[:, None] + jnp.arange(tail_BK.shape[1])
    return jnp.take_along_axis(both_BX, at_BK, axis=1)
