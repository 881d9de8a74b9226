"""Loops over blocks whose results and totals take memory only once their inputs are there.

A loop starts from zeros, that of a scan's stacked results too. Zeros depend on nothing, so XLA
makes one array of equal ones; on GPUs it also fuses the copies that loops need into one kernel at
the program's start: those of all layers, forward and backward, then live from there on. Here the
zero of each loop is tied to the loop's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def scan_after(body: Callable, totals: Any, xs: Any, *inputs: jax.Array) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of `body(inputs, totals, x) -> (totals, y)`: (totals, stacked y).

    `totals` are shapes (`jax.ShapeDtypeStruct`); they start as zeros. No zeros exist before all
    inputs, which the body is to take as they are given to it.
    """
    zero, inputs = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), inputs))

    def zeros(of: Any, *more: int) -> jax.Array:
        return jnp.broadcast_to(zero.astype(of.dtype), (*more, *of.shape))

    def one(carry: tuple, at: tuple) -> tuple[tuple, None]:
        totals, stacked = carry
        i, x = at
        totals, y = body(inputs, totals, x)
        write = jax.lax.dynamic_update_index_in_dim
        return (totals, jax.tree.map(lambda all_y, y: write(all_y, y, i, 0), stacked, y)), None

    length = len(jax.tree.leaves(xs)[0])
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    shapes = jax.eval_shape(body, inputs, totals, first)[1]
    start = jax.tree.map(zeros, totals), jax.tree.map(lambda y: zeros(y, length), shapes)
    return jax.lax.scan(one, start, (jnp.arange(length), xs))[0]
