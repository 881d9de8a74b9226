"""The arithmetic of a decoder layer: products with weights, sums, rotary positions, loops.

Products and reductions of XLA sum in orders that depend on the number of rows and on the program.
`sum_in_order` and the product kernels (`models.kernels.cpu.products_cpu`, `products_tpu`) do not.
If the CPU kernel does not take the sizes, few rows are turned into columns, because XLA on CPUs
packs the right operand.

Shape suffixes: B rows, T tokens, H heads, h head size, I inputs, O outputs, R rows, D model width,
F feature width, N terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from reprise.models import sums_in_order_on_accelerators
from reprise.models.attention.attention import precision_of
from reprise.models.config import Adapted, ModelConfig
from reprise.models.kernels.find import takes
from reprise.models.layout import (
    LONG_ROW_FEED_FORWARD_PARTS,
    LONG_ROW_TOKENS,
    WHOLE_FEED_FORWARD_BYTES,
)
from reprise.models.sharding import Axes, by_device, platform_in_use, ways_in_use

FEW_ROWS = 64  # of inputs
PRODUCT = "product"  # name of the result of a product in order, for `models.decoder.training`
ADDED_AT_ONCE = 16  # parts of a sum per step


PRODUCT_AXES = "batch", "vocab"  # logical axes of the rows and the outputs of a product


class Way(NamedTuple):
    """The dtype of a product, logical axes of its first row axis and its outputs, and platform."""

    dtype: Any
    axes: tuple[str, str] = PRODUCT_AXES
    platform: str = "cpu"


def linear(
    x: jax.Array,
    weight_OI: jax.Array | Adapted,
    dtype: Any = None,
    axes: tuple[str, str] = PRODUCT_AXES,
) -> jax.Array:
    """Return x · weightᵀ; [..., I] to [..., O] of `dtype`, by default the dtype of x.

    An adapted weight adds scale · x · Aᵀ · Bᵀ, with the adapter of each row of x if it has several.
    Kernels are split over a mesh by the logical `axes` of the first axis of x and of the outputs.
    """
    way = Way(dtype or x.dtype, axes)
    if not isinstance(weight_OI, Adapted):
        return _product(way, x, weight_OI)
    low = weight_OI.low
    inner = weight_OI.scale * linear(x, low.down_RI)
    if weight_OI.keeps_XR is not None:
        keeps = weight_OI.keeps_XR.reshape(len(x), *[1] * (x.ndim - 2), -1)
        inner = jnp.where(keeps, inner, 0)  # NaN times 0 would be NaN
    return _product(way, x, weight_OI.weight_OI, inner, low.up_OR)


def _product(way: Way, x: jax.Array, weight_OI: jax.Array, *more: jax.Array) -> jax.Array:
    """Return x · wᵀ, plus inner · upᵀ if `more` has inner and up_OR."""
    many = partial(_input_first, way.dtype)
    is_one_call = not more or platform_in_use() == "cpu"
    if is_one_call and is_in_order(x, weight_OI, *more):
        platform = platform_in_use()
        in_order = {platform: partial(_in_order, way._replace(platform=platform))}
        return jax.lax.platform_dependent(x, weight_OI, *more, **in_order, default=many)
    if more:
        return _product(way, x, weight_OI) + _product(way, *more)

    def turned(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
        return _as_rows(_weight_first(weight_OI, _as_columns(x), way.dtype), x.shape[:-1])

    return _by_rows(turned, many, x, weight_OI)


def is_in_order(x: jax.Array, *more: jax.Array) -> bool:
    """Return whether the platform in use sums this product in one order for any number of rows."""
    platform = platform_in_use()
    if platform != "cpu" and not sums_in_order_on_accelerators():
        return False
    if platform == "cuda":
        return True  # by the single XLA tile
    return all(takes("products", platform, y.shape[-1], y.dtype) for y in (x, *more))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_order(way: Way, *given: jax.Array) -> jax.Array:
    x, weight_OI, *_ = given
    rows = (way.axes[0], *[None] * x.ndim)[: x.ndim - 1]
    outputs = way.axes[1]
    axes: tuple[Axes, ...] = ((*rows, None), (outputs, None))
    result = (*x.shape[:-1], len(weight_OI)), (*rows, outputs)
    return by_device(partial(_by_kernel, way), given, axes * (len(given) // 2), [result])[0]


def _by_kernel(way: Way, *given: jax.Array) -> tuple[jax.Array]:
    if way.platform == "cpu":
        from reprise.models.kernels.cpu import products_cpu

        return (products_cpu.product(*given).astype(way.dtype),)
    if way.platform == "cuda":  # with the single XLA tile
        return (_input_first(way.dtype, *given),)
    from reprise.models.kernels.tpu import products_tpu

    x, weight_OI = given
    y_RO = products_tpu.product(x.reshape(-1, x.shape[-1]), weight_OI, way.dtype)
    return (y_RO.reshape(*x.shape[:-1], -1),)


def _in_order_fwd(way: Way, *given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return checkpoint_name(_in_order(way, *given), PRODUCT), given


def _in_order_bwd(way: Way, given: tuple[jax.Array, ...], dy: jax.Array) -> tuple:
    if way.platform != "cpu":
        return jax.vjp(partial(_input_first, way.dtype), *given)[1](dy)
    gradients = list[jax.Array]()
    for x, weight_OI in zip(given[::2], given[1::2], strict=True):
        gradients += _gradients_of_matrices(x, weight_OI, dy)
    return tuple(gradients)


def _gradients_of_matrices(
    x: jax.Array, weight_OI: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return dx = dy · w and dw = dyᵀ · x of y = x · wᵀ.

    The barrier makes XLA compute the matrices first. On CPUs, XLA would otherwise compute
    element-wise inputs again while it transposes them, on one core.
    """
    matrices = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    dy_RO, x_RI = jax.lax.optimization_barrier(matrices)
    product = partial(jnp.matmul, precision=precision_of(x))
    dx_RI = product(dy_RO, weight_OI, preferred_element_type=x.dtype)
    dweight_OI = product(dy_RO.T, x_RI, preferred_element_type=weight_OI.dtype)
    return dx_RI.reshape(x.shape), dweight_OI


_in_order.defvjp(_in_order_fwd, _in_order_bwd)


def dense(x: Adapted) -> jax.Array:
    """Return W + scale · B · A, added in float32 and rounded once to the dtype of W."""
    up_OR, down_RI = (part.astype(jnp.float32) for part in (x.low.up_OR, x.low.down_RI))
    change_OI = x.scale * jnp.matmul(up_OR, down_RI, precision="highest")
    return (x.weight_OI.astype(jnp.float32) + change_OI).astype(x.weight_OI.dtype)


def feed_forward(x: jax.Array, gate_FD: Any, up_FD: Any, down_DF: Any) -> jax.Array:
    """Return down · (silu(gate · x) * (up · x)); [..., D]; long rows by parts of the features.

    Parts need less memory, but move twice the bytes: few features are not cut. Adapted weights are
    not cut into parts, because frozen weights have no gradients that parts would save. Products in
    order are not cut either, because decoding has no parts.
    """
    is_whole = any(isinstance(weight, Adapted) for weight in (gate_FD, up_FD, down_DF))
    if is_whole or is_in_order(x, gate_FD, up_FD, down_DF):
        return linear(_inner(x, gate_FD, up_FD), down_DF)
    parts = LONG_ROW_FEED_FORWARD_PARTS
    tokens = math.prod(x.shape[:-1]) // ways_in_use("batch")
    features = len(gate_FD) // ways_in_use("mlp")
    is_large = tokens * features * x.dtype.itemsize > WHOLE_FEED_FORWARD_BYTES
    if x.shape[-2] >= LONG_ROW_TOKENS and is_large and not len(gate_FD) % parts:
        return _feed_forward_in_parts(x, gate_FD, up_FD, down_DF, parts)
    return _by_rows(_turned_feed_forward, _feed_forward, x, gate_FD, up_FD, down_DF)


def _feed_forward(
    x: jax.Array, gate_FD: jax.Array, up_FD: jax.Array, down_DF: jax.Array
) -> jax.Array:
    x_F = jax.nn.silu(_input_first(x.dtype, x, gate_FD)) * _input_first(x.dtype, x, up_FD)
    return _input_first(x.dtype, x_F, down_DF)


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
    """Return `feed_forward`, one part of the features at a time, also in the backward pass.

    So no array has all F features of all rows. Sums over parts are float32. `parts` divides F and
    is the stride of the features of a part, so that every part has equally many on each shard.
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


def _inner(x: jax.Array, gate_GD: Any, up_GD: Any) -> jax.Array:
    return jax.nn.silu(linear(x, gate_GD)) * linear(x, up_GD)


def _cut(weight_FD: jax.Array, parts: int) -> jax.Array:
    """Return [parts, F / parts, D]."""
    return weight_FD.reshape(-1, parts, weight_FD.shape[1]).swapaxes(0, 1)


def _by_rows(few: Callable, many: Callable, x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Compute `few` if x has few rows and the platform is a CPU, else `many`."""
    if math.prod(x.shape[:-1]) > FEW_ROWS:
        return many(x, *weights)
    return jax.lax.platform_dependent(x, *weights, cpu=few, default=many)


def _input_first(dtype: Any, x: jax.Array, weight_OI: jax.Array, *more: jax.Array) -> jax.Array:
    """Compute `_product` with the order of the backend."""
    product = partial(_einsum, dtype) if dtype == x.dtype else partial(_widened, dtype)
    y = product(x, weight_OI)
    return y + _input_first(dtype, *more) if more else y


def _einsum(dtype: Any, x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    precision = precision_of(x)
    return jnp.einsum(
        "...i,oi->...o", x, weight_OI, precision=precision, preferred_element_type=dtype
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(dtype: Any, x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Compute `_einsum` with a dtype wider than x; gradients round dy to the dtype of x.

    Products of float32 dy would read twice the bytes, and take a GPU at least twice the time.
    """
    return _einsum(dtype, x, weight_OI)


def _widened_bwd(dtype: Any, given: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple:
    x = given[0]
    return jax.vjp(partial(_einsum, x.dtype), *given)[1](dy.astype(x.dtype))


_widened.defvjp(lambda dtype, *given: (_einsum(dtype, *given), given), _widened_bwd)


def _weight_first(weight_OI: jax.Array, x_IR: jax.Array, dtype: Any) -> jax.Array:
    """Return weight · x, [O, R]; the barrier keeps XLA from swapping the operands."""
    precision = precision_of(x_IR)
    out_OR = jnp.matmul(weight_OI, x_IR, precision=precision, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(out_OR)


def _as_columns(x: jax.Array) -> jax.Array:
    """Transpose [..., I] to [I, R]."""
    return x.reshape(-1, x.shape[-1]).T


def _as_rows(x_OR: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Transpose columns back to [*shape, O]."""
    return x_OR.T.reshape(*shape, -1)


def sum_in_order(x_N: jax.Array) -> jax.Array:
    """Return Σ over the last axis of [..., N], N ≥ 1, in an order that depends only on N; [...]."""
    while (length := x_N.shape[-1]) > 1:
        parts = min(ADDED_AT_ONCE, length)
        x_N = jnp.pad(x_N, [(0, 0)] * (x_N.ndim - 1) + [(0, -length % parts)])
        x_N = functools.reduce(jnp.add, jnp.split(x_N, parts, axis=-1))
    return x_N[..., 0]


@jax.custom_jvp
def mean_square(x_D: jax.Array) -> jax.Array:
    """Return the mean of x² over the last axis, in float32; [..., 1].

    CPUs sum in order, and so do accelerators with `sums_in_order_on_accelerators`.
    """
    squares_D = jnp.square(x_D.astype(jnp.float32))  # exact for bfloat16, fused with a sum or not
    in_order = partial(sum_in_order, squares_D)
    default = partial(jnp.sum, squares_D, axis=-1)
    if sums_in_order_on_accelerators():
        default = in_order
    total = jax.lax.platform_dependent(cpu=in_order, default=default)
    return total[..., None] / x_D.shape[-1]


@mean_square.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x, change = (y.astype(jnp.float32) for y in (*primals, *tangents))
    return mean_square(*primals), 2 * jnp.mean(x * change, axis=-1, keepdims=True)


@jax.custom_vjp
def scaled(x: jax.Array, weight_D: jax.Array) -> jax.Array:
    """Return x · weight, [..., D]."""
    return x * weight_D


def _scaled_bwd(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight_D = kept
    sums = partial(jnp.sum, axis=tuple(range(x.ndim - 1)))
    return dy * weight_D, jax.lax.platform_dependent(dy * x, cpu=_sums_by_product, default=sums)


def _sums_by_product(terms: jax.Array) -> jax.Array:
    """Return Σ over all axes but the last by a product, because XLA on CPUs adds rows slowly."""
    terms_RD = terms.reshape(-1, terms.shape[-1])
    ones_1R = jnp.ones((1, len(terms_RD)), terms_RD.dtype)
    return jnp.matmul(ones_1R, jax.lax.optimization_barrier(terms_RD), precision="highest")[0]


scaled.defvjp(lambda x, weight_D: (x * weight_D, (x, weight_D)), _scaled_bwd)


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Return the angular frequency of each pair, θ^(−2i/h); float32 [h/2].

    `rope_type: llama3` of Llama 3.1 slows wavelengths beyond original/low by `factor`, keeps
    wavelengths below original/high, and interpolates linearly between.
    """
    h = config.head_dim
    freq = config.rope_theta ** (-jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_positions * freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / scaling.factor


def rope_turns(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of the angle of each pair at each position; two [B, T, h/2]."""
    angle = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jax.lax.platform_dependent(angle, cpu=_turns_once, default=_turns)


def _turns(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.cos(angle), jnp.sin(angle)


def _turns_once(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `_turns` in a branch, or XLA on CPUs repeats it for every head in every layer."""
    # Angles are finite, so the first branch is always taken.
    is_finite = jnp.isfinite(angle.reshape(-1)[0])
    return jax.lax.cond(is_finite, _turns, lambda a: (a, a), angle)


def rotate(x_BTHh: jax.Array, cos_BTh: jax.Array, sin_BTh: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + h/2) of each head by their angles; [B, T, H, h]."""
    first, second = jnp.split(x_BTHh.astype(jnp.float32), 2, axis=-1)
    cos = cos_BTh[:, :, None]
    sin = sin_BTh[:, :, None]
    if x_BTHh.dtype == jnp.bfloat16:  # exact products: a fused multiply-add gives the same bits
        cos, sin = (jax.lax.reduce_precision(x, 8, 15) for x in (cos, sin))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHh.dtype)


def scan_after(body: Callable, totals: Any, xs: Any, *inputs: jax.Array) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of `body(inputs, totals, x) -> (totals, y)`: (totals, stacked y).

    `totals` are shapes (`jax.ShapeDtypeStruct`) and start as zeros, which are made only after all
    `inputs`. Otherwise XLA makes one array of equal zeros when the program starts, and on GPUs one
    array for the loops of all layers.
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
