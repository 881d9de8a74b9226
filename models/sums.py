"""Sums in an order that the number of terms alone decides.

XLA's reductions have orders that depend on the number of rows and on the program.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

ADDED_AT_ONCE = 16  # parts of a sum


def sum_in_order(x_N: jax.Array) -> jax.Array:
    """Return Σ over the last axis of [..., N], N ≥ 1; [...].

    `ADDED_AT_ONCE` equal parts are added one after the other until one number is left.
    """
    while (length := x_N.shape[-1]) > 1:
        parts = min(ADDED_AT_ONCE, length)
        x_N = jnp.pad(x_N, [(0, 0)] * (x_N.ndim - 1) + [(0, -length % parts)])
        x_N = functools.reduce(jnp.add, jnp.split(x_N, parts, axis=-1))
    return x_N[..., 0]


def mean_square(x_D: jax.Array) -> jax.Array:
    """Return the mean of x² over the last axis, in float32; [..., 1].

    On a CPU that of bfloat16 is summed in order: a norm that differs in its last float32 bit now
    and then rounds to another bfloat16, which the whole residual stream then carries.
    """
    x = x_D.astype(jnp.float32)
    if x_D.dtype == jnp.float32:
        return jnp.mean(x * x, axis=-1, keepdims=True)
    total = jax.lax.platform_dependent(x * x, cpu=sum_in_order, default=_sum)
    return total[..., None] / x.shape[-1]


def _sum(x_D: jax.Array) -> jax.Array:
    return jnp.sum(x_D, axis=-1)
