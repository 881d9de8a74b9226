"""Norms, rotary positions and cache writes of new tokens: one kernel, by Triton.

A program has one head of one token: of a query, a key or a value. XLA has several kernels for that.

    x ← x / √(mean(x²) + eps) · weight    if the policy norms queries and keys
    (x₁, x₂) ← (x₁ cos − x₂ sin, x₂ cos + x₁ sin)

Results are rounded after each of the two, as by `rms_norm` and `rotate` of `models.decoder`.
Values and their keys are written as by `finite_values` of `models.attention.attention`.

X tokens, H query heads, K key/value heads, h head size, P pages, T positions of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Places(NamedTuple):
    """Pages of keys and values, [P, K, T, h], and the page and the offset of each token, [X]."""

    keys_PKTh: jax.Array
    values_PKTh: jax.Array
    page_X: jax.Array
    offset_X: jax.Array


def takes(head_dim: int, dtype: Any) -> str | None:
    """Return None if the kernel takes these sizes, else the reason in one sentence."""
    if head_dim not in (64, 128):
        return f"expected a head size of 64 or 128, got {head_dim}"
    if jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    return None


def append(
    places: Places,
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    cos_Xh: jax.Array,
    sin_Xh: jax.Array,
    *norms_h: jax.Array,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the queries, and the pages with the keys and values of the tokens.

    Tokens whose page is below 0 or P are not written. `cos_Xh` and `sin_Xh` are float32 [X, h/2],
    `norms_h` the weights of the norms of queries and keys, or none.
    """
    pages = places.keys_PKTh, places.values_PKTh
    H = q_XHh.shape[1]
    K = k_XKh.shape[1]
    q_XHh, keys, values = _call(
        partial(_append, H, K, eps),
        H + 2 * K,
        [q_XHh, k_XKh, v_XKh],
        [cos_Xh, sin_Xh, *norms_h, places.page_X, places.offset_X, *pages],
        [q_XHh, *pages],
        interpret,
        aliases=2,
    )
    return q_XHh, keys, values


def turn(
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    cos_Xh: jax.Array,
    sin_Xh: jax.Array,
    *norms_h: jax.Array,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys, [X, H, h] and [X, K, h], also keys of values that are not finite."""
    H = q_XHh.shape[1]
    inputs = cos_Xh, sin_Xh, *norms_h
    q_XHh, k_XKh = _call(
        partial(_turn, H, eps),
        H + k_XKh.shape[1],
        [q_XHh, k_XKh, v_XKh],
        inputs,
        [q_XHh, k_XKh],
        interpret,
    )
    return q_XHh, k_XKh


def _call(
    kernel: Callable[..., None],
    num_heads: int,
    heads: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    results: Sequence[jax.Array],
    interpret: Any,
    aliases: int = 0,
) -> Sequence[jax.Array]:
    """Call a kernel for each token and each of its first heads; the last inputs may be aliased.

    XLA projects queries, keys and values in one product, whose result needs no copy if the kernel
    takes them as one array.
    """
    X, _, h = heads[0].shape
    joined_XJ = jnp.concatenate([x.reshape(X, -1) for x in heads], axis=1)
    joined_XJh = joined_XJ.reshape(X, -1, h)
    last = 1 + len(inputs)
    varying = jax.typeof(joined_XJh).manual_axis_type  # under shard_map, results vary as inputs do
    return pl.pallas_call(
        kernel,
        grid=(X, num_heads),
        in_specs=[pl.no_block_spec] * last,
        out_specs=[pl.no_block_spec] * len(results),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in results
        ],
        input_output_aliases={last - i: len(results) - i for i in range(1, aliases + 1)},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="heads",
    )(joined_XJh, *inputs)


def _turn(num_heads: int, eps: float, *refs: Any) -> None:
    joined_ref, cos_ref, sin_ref, *norm_refs, q_out, k_out = refs
    x = pl.program_id(0)
    head = pl.program_id(1)

    @pl.when(head < num_heads)
    def _query() -> None:
        q = _turned(joined_ref, x, head, cos_ref, sin_ref, norm_refs[:1], eps)
        _store(q_out, (x, head), q)

    @pl.when(head >= num_heads)
    def _key() -> None:
        k = _turned(joined_ref, x, head, cos_ref, sin_ref, norm_refs[1:], eps)
        _store(k_out, (x, head - num_heads), k)


def _append(num_heads: int, num_kv_heads: int, eps: float, *refs: Any) -> None:
    joined_ref, cos_ref, sin_ref, *norm_refs, page_ref, offset_ref, _, _ = refs[:-3]
    q_out, keys_out, values_out = refs[-3:]
    x = pl.program_id(0)
    head = pl.program_id(1)
    page = page_ref[x]
    offset = offset_ref[x]
    is_here = (page >= 0) & (page < keys_out.shape[0])
    first_value = num_heads + num_kv_heads

    @pl.when(head < num_heads)
    def _query() -> None:
        q = _turned(joined_ref, x, head, cos_ref, sin_ref, norm_refs[:1], eps)
        _store(q_out, (x, head), q)

    @pl.when((head >= num_heads) & (head < first_value) & is_here)
    def _key() -> None:
        k = _turned(joined_ref, x, head, cos_ref, sin_ref, norm_refs[1:], eps)
        num_bad = jnp.sum((~_is_finite(joined_ref[x, head + num_kv_heads, :])).astype(jnp.int32))
        k = [jnp.where(num_bad == 0, part, jnp.nan) for part in k]
        _store(keys_out, (page, head - num_heads, offset), k)

    @pl.when((head >= first_value) & is_here)
    def _value() -> None:
        v = joined_ref[x, head, :]
        values_out[page, head - first_value, offset, :] = jnp.where(_is_finite(v), v, 0)


def _turned(
    joined_ref: Any,
    x: jax.Array,
    head: jax.Array,
    cos_ref: Any,
    sin_ref: Any,
    norm_refs: Sequence[Any],
    eps: float,
) -> list[jax.Array]:
    """Return both halves of a head, float32."""
    half = cos_ref.shape[1]
    halves = pl.ds(0, half), pl.ds(half, half)
    first, second = (joined_ref[x, head, part].astype(jnp.float32) for part in halves)
    for norm_ref in norm_refs:
        total = jnp.sum(first * first) + jnp.sum(second * second)
        scale = jax.lax.rsqrt(total / (2 * half) + eps)
        first, second = (
            (y * scale * norm_ref[part].astype(jnp.float32)).astype(joined_ref.dtype)
            for y, part in zip((first, second), halves, strict=True)
        )
        first = first.astype(jnp.float32)
        second = second.astype(jnp.float32)
    cos = cos_ref[x, :]
    sin = sin_ref[x, :]
    return [first * cos - second * sin, second * cos + first * sin]


def _store(ref: Any, at: tuple[Any, ...], halves: Sequence[jax.Array]) -> None:
    for i, half in enumerate(halves):
        ref[*at, pl.ds(i * len(half), len(half))] = half.astype(ref.dtype)


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf
