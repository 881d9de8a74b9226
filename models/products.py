"""Products of activations with weights, and the order of operands that a CPU is fast with.

XLA's CPU product packs its right operand. With few rows that is to be the rows, not the weights:
the rows are turned to columns, the weights stay as they are. Other backends choose themselves.

Shape suffixes: I inputs, O outputs, R rows, D model width, F feature width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import precision_of
from models.layout import LONG_ROW_FEED_FORWARD_PARTS, LONG_ROW_TOKENS
from models.loops import scan_after

FEW_ROWS = 64  # of inputs; more go through the ordinary product


def linear(x: jax.Array, weight_OI: jax.Array, dtype: Any = None) -> jax.Array:
    """x · weightᵀ; [..., I] to [..., O] of `dtype`, by default x's."""
    dtype = dtype or x.dtype

    def turned(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
        return _as_rows(_weight_first(weight_OI, _as_columns(x), dtype), x.shape[:-1])

    return _by_rows(turned, partial(_input_first, dtype=dtype), x, weight_OI)


def feed_forward(
    x: jax.Array, gate_FD: jax.Array, up_FD: jax.Array, down_DF: jax.Array
) -> jax.Array:
    """Return down · (silu(gate · x) * (up · x)); [..., D].

    Few rows on a CPU stay columns from one product to the next: only the last is turned. Long rows
    [..., T, D] go by parts of the features, if these divide.
    """
    parts = LONG_ROW_FEED_FORWARD_PARTS
    if x.shape[-2] >= LONG_ROW_TOKENS and not len(gate_FD) % parts:
        return _feed_forward_in_parts(x, gate_FD, up_FD, down_DF, parts)
    return _by_rows(_turned_feed_forward, _feed_forward, x, gate_FD, up_FD, down_DF)


def _feed_forward(
    x: jax.Array, gate_FD: jax.Array, up_FD: jax.Array, down_DF: jax.Array
) -> jax.Array:
    x_F = jax.nn.silu(_input_first(x, gate_FD, x.dtype)) * _input_first(x, up_FD, x.dtype)
    return _input_first(x_F, down_DF, x.dtype)


def _turned_feed_forward(
    x: jax.Array, gate_FD: jax.Array, up_FD: jax.Array, down_DF: jax.Array
) -> jax.Array:
    x_DR = _as_columns(x)
    x_FR = jax.nn.silu(_weight_first(gate_FD, x_DR, x.dtype))
    x_FR *= _weight_first(up_FD, x_DR, x.dtype)
    return _as_rows(_weight_first(down_DF, x_FR, x.dtype), x.shape[:-1])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _feed_forward_in_parts(
    x: jax.Array, gate_FD: jax.Array, up_FD: jax.Array, down_DF: jax.Array, parts: int
) -> jax.Array:
    """Return `feed_forward`, a part of its features at a time, in the backward pass too.

    So no array has all F features of all rows: what a part has is computed again for its gradient.
    Sums over parts, of outputs and of x's gradient, are float32. `parts` divides F; the features
    of a part lie apart by that number, so that each shard of them has as many in every part.
    """

    def add(inputs: tuple, y: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        (x,) = inputs
        gate_GD, up_GD, down_GD = weights
        return y + linear(_inner(x, gate_GD, up_GD), down_GD.T, jnp.float32), None

    weights = _cut(gate_FD, parts), _cut(up_FD, parts), _cut(down_DF.T, parts)
    total = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return scan_after(add, total, weights, x)[0].astype(x.dtype)


def _parts_fwd(x: jax.Array, *rest: Any) -> tuple[jax.Array, tuple]:
    *weights, parts = rest
    return _feed_forward_in_parts(x, *weights, parts), (x, *weights)


def _parts_bwd(parts: int, kept: tuple, dy: jax.Array) -> tuple:
    x, gate_FD, up_FD, down_DF = kept

    def add(
        inputs: tuple, dx: jax.Array, weights: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple]:
        x, dy = inputs
        gate_GD, up_GD, down_GD = weights
        inner, of_inputs = jax.vjp(_inner, x, gate_GD, up_GD)
        _, of_product = jax.vjp(lambda inner, down_GD: linear(inner, down_GD.T), inner, down_GD)
        dinner, ddown_GD = of_product(dy)
        dx_part, *rest = of_inputs(dinner)
        return dx + dx_part.astype(jnp.float32), (*rest, ddown_GD)

    weights = _cut(gate_FD, parts), _cut(up_FD, parts), _cut(down_DF.T, parts)
    total = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    dx, gradients = scan_after(add, total, weights, x, dy)
    dgate_FD, dup_FD, ddown_FD = (g.swapaxes(0, 1).reshape(gate_FD.shape) for g in gradients)
    return dx.astype(x.dtype), dgate_FD, dup_FD, ddown_FD.T


_feed_forward_in_parts.defvjp(_parts_fwd, _parts_bwd)


def _inner(x: jax.Array, gate_GD: jax.Array, up_GD: jax.Array) -> jax.Array:
    return jax.nn.silu(linear(x, gate_GD)) * linear(x, up_GD)


def _cut(weight_FD: jax.Array, parts: int) -> jax.Array:
    """Return [parts, F / parts, D]."""
    return weight_FD.reshape(-1, parts, weight_FD.shape[1]).swapaxes(0, 1)


def _by_rows(few: Callable, many: Callable, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Compute `few` if x has few rows and a CPU computes, else `many`."""
    if math.prod(x.shape[:-1]) > FEW_ROWS:
        return many(x, *weights)
    return jax.lax.platform_dependent(x, *weights, cpu=few, default=many)


def _input_first(x: jax.Array, weight_OI: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(
        "...i,oi->...o", x, weight_OI, precision=precision_of(x), preferred_element_type=dtype
    )


def _weight_first(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any) -> jax.Array:
    """Return weight · x, [O, R]: XLA's CPU product packs its right operand, which is small here.

    The barrier keeps it from swapping the two.
    """
    precision = precision_of(x_IR)
    out_OR = jnp.matmul(weight_OI, x_IR, precision=precision, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(out_OR)


def _as_columns(x: jax.Array) -> jax.Array:
    """Turn [..., I] to [I, R].

    Nothing is padded: XLA's CPU product has kernels for several numbers of columns that sum in
    different orders, but so have the norms and softmaxes around it.
    """
    return x.reshape(-1, x.shape[-1]).T


def _as_rows(x_OR: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Turn columns back to [*shape, O]."""
    return x_OR.T.reshape(*shape, -1)
