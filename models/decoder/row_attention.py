"""Attention over long packed rows, block by block: memory grows linearly with the row length.

A pair of a query block and a key block is skipped if no query sees a key. The forward pass keeps a
running maximum and sum; the backward pass computes the scores again. TPUs, Hopper GPUs and CPUs
have kernels (`models.kernels`); the portable path below is their reference.

    forward    out = Σ_s 2^(score_s log₂e − top) v_s / Σ,   lse = top/log₂e + log Σ
    backward   p = e^(score − lse),  δ = Σ_h dout · out
               dv += pᵀ dout,  ds = p (dout vᵀ − δ),  dq += ds k,  dk += dsᵀ q

B rows, T positions, n blocks, C positions of a block of queries or keys (S for keys if both occur),
H heads, K key/value heads, G = H/K, h head size.
Sources: arXiv 1805.02867 (running softmax), arXiv 2205.14135 (blocks, and the backward pass).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from reprise.models import sums_in_order_on_accelerators
from reprise.models.attention.attention import (
    LOG2_E,
    NEGATIVE,
    Packing,
    may_see,
    power_of_two,
    precision_of,
    weights,
)
from reprise.models.config import ModelConfig
from reprise.models.decoder.layers import scan_after
from reprise.models.kernels.find import find, module_of, takes
from reprise.models.layout import LONG_ROW_BLOCK_TOKENS, LONG_ROW_TOKENS, shard_shape
from reprise.models.sharding import Axes, by_device, platform_in_use, sizes_in_use

PLATFORMS = ("tpu", "cuda", "cpu")  # with kernels
_QUERY_AXES: Axes = ("batch", None, "heads", None)
_KEY_AXES = ("batch", None, "kv_heads", None)
_SUM_AXES = ("batch", "heads", None)
_PLACE_AXES = ("batch", None)
_FORWARD_AXES = _QUERY_AXES, _KEY_AXES, _KEY_AXES, _PLACE_AXES, _PLACE_AXES
_BACKWARD_AXES = *_FORWARD_AXES, _QUERY_AXES, _SUM_AXES, _QUERY_AXES


@jax.custom_vjp
def attend_rows(
    q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, packing: Packing
) -> jax.Array:
    """Return softmax(q·k/√h)·v over s ≤ t in the prompt of t, shared or in the response of t."""
    return _attend_fwd(q_BTHh, k_BTKh, v_BTKh, packing)[0]


def _attend_fwd(
    q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, packing: Packing
) -> tuple[jax.Array, tuple]:
    inputs = q_BTHh, k_BTKh, v_BTKh, packing.prompt_BT, packing.branch_BT
    out_BTHh, lse_BHT = _where_taken(_forward_by_kernel, _forward_by_blocks, inputs)
    return out_BTHh, (q_BTHh, k_BTKh, v_BTKh, packing, out_BTHh, lse_BHT)


def _attend_bwd(kept: tuple, dout_BTHh: jax.Array) -> tuple:
    q_BTHh, k_BTKh, v_BTKh, packing, *rest = kept
    inputs = q_BTHh, k_BTKh, v_BTKh, packing.prompt_BT, packing.branch_BT, *rest, dout_BTHh
    return *_where_taken(_backward_by_kernel, _backward_by_blocks, inputs), None


attend_rows.defvjp(_attend_fwd, _attend_bwd)


def is_faster(config: ModelConfig, num_tokens: int, dtype: Any) -> bool:
    """Return whether this attention is faster than a mask for rows of T tokens.

    It is for long rows, and on CPUs and accelerators that sum in order for every row that the
    kernel takes.
    """
    if num_tokens >= LONG_ROW_TOKENS:
        return True
    if (platform := platform_in_use()) != "cpu" and not sums_in_order_on_accelerators():
        return False
    shapes = [(1, num_tokens, n, config.head_dim) for n in (config.num_heads, config.num_kv_heads)]
    return takes("row_attention", platform, *shapes, dtype)


def segment_tokens() -> int:
    """Return the multiple of positions at which row segments start (`rl.records.packing`)."""
    if (platform := platform_in_use()) == "cpu" or not sums_in_order_on_accelerators():
        return 1
    from reprise.models.kernels.gpu import hopper
    from reprise.models.kernels.tpu import softmax_tpu  # Pallas: a second to import

    return softmax_tpu.KEYS if platform == "tpu" else hopper.ROWS


def _where_taken(by_kernel: Callable, by_blocks: Callable, inputs: Sequence[jax.Array]) -> Any:
    """Call `by_kernel` on platforms with a kernel that takes the inputs, else `by_blocks`."""
    # Pallas kernels are slow to trace. CPUs that compile for another platform have long rows.
    if platform_in_use() == "cpu" and inputs[0].shape[1] < LONG_ROW_TOKENS:
        is_taken = why_portable(inputs[0], inputs[1], "cpu") is None
        return by_kernel("cpu", *inputs) if is_taken else by_blocks(*inputs)
    paths = {
        platform: partial(by_kernel, platform)
        for platform in PLATFORMS
        if why_portable(inputs[0], inputs[1], platform) is None
    }
    if not paths:
        return by_blocks(*inputs)
    return jax.lax.platform_dependent(*inputs, **paths, default=by_blocks)


def why_portable(q_BTHh: jax.Array, k_BTKh: jax.Array, platform: str) -> str | None:
    """Return why a platform and mesh take the portable path; None if they take the kernel."""
    sizes = sizes_in_use()
    ways = sizes.get("tensor", 1)
    if k_BTKh.shape[2] % ways:
        return f"expected key/value heads that {ways} devices divide, got {k_BTKh.shape[2]}"
    q_shape = q_BTHh.shape
    kv_shape = k_BTKh.shape
    if sizes:
        q_shape = shard_shape(sizes, q_shape, _QUERY_AXES)
        kv_shape = shard_shape(sizes, kv_shape, _KEY_AXES)
    kernel = find("row_attention", platform, q_shape, kv_shape, q_BTHh.dtype)
    return kernel if isinstance(kernel, str) else None


def _forward_by_kernel(platform: str, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    B, T, H, _ = inputs[0].shape
    results = (inputs[0].shape, _QUERY_AXES), ((B, H, T), _SUM_AXES)
    forward = module_of("row_attention", platform).forward
    return by_device(forward, inputs, _FORWARD_AXES, results)


def _backward_by_kernel(
    platform: str, *inputs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    results = tuple((x.shape, axes) for x, axes in zip(inputs[:3], _BACKWARD_AXES, strict=False))
    backward = module_of("row_attention", platform).backward
    return by_device(backward, inputs, _BACKWARD_AXES, results)


@struct.dataclass
class _Blocks:
    """Blocks of queries [n, B, K, G, C, h], of keys and values [n, B, K, C, h], and seen pairs."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    prompt: jax.Array
    branch: jax.Array
    seen_nn: jax.Array

    @staticmethod
    def of(*inputs: jax.Array) -> _Blocks:
        q_BTHh, k_BTKh, v_BTKh, prompt_BT, branch_BT = inputs
        K = k_BTKh.shape[2]
        prompt_nBC = _cut(prompt_BT, -1)  # added positions see only themselves
        branch_nBC = _cut(branch_BT, 0)
        return _Blocks(
            _by_head(_cut(q_BTHh), K),
            _by_head(_cut(k_BTKh), K)[:, :, :, 0],
            _by_head(_cut(v_BTKh), K)[:, :, :, 0],
            prompt_nBC,
            branch_nBC,
            _seen(prompt_nBC, branch_nBC),
        )

    def mask(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Return mask[b, c, s]: position c of block i may see position s of block j."""
        C = self.prompt.shape[2]
        at_C = jnp.arange(C)
        before_CS = j * C + at_C[None, :] <= i * C + at_C[:, None]
        return before_CS & may_see(self.prompt[i], self.branch[i], self.prompt[j], self.branch[j])

    def scores(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Return q·k/√h · log₂e of queries in block i with keys in block j, [B, K, G, C, S]."""
        products = _product("bkgch,bksh->bkgcs", self.q[i], self.k[j])
        scores = products * (self.q.shape[-1] ** -0.5 * LOG2_E)
        return jnp.where(self.mask(i, j)[:, None, None], scores, NEGATIVE)


def _forward_by_blocks(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs, [B, T, H, h], and the log of each sum, [B, H, T], by the portable path."""
    args = _Blocks.of(*inputs)
    q_BTHh, _, v_BTKh, *_ = inputs
    n, B, K, G, C, h = args.q.shape

    def of_queries(inputs: tuple, _: tuple, i: jax.Array) -> tuple[tuple, tuple]:
        (blocks,) = inputs

        def meet(j: jax.Array, carry: tuple) -> tuple:
            out, top, total = carry
            scores = blocks.scores(i, j)
            higher = jnp.maximum(top, jnp.round(scores.max(axis=-1)))
            p = weights(scores, higher[..., None], v_BTKh.dtype)
            scale = power_of_two(top - higher)
            new = _product("bkgcs,bksh->bkgch", p.astype(v_BTKh.dtype), blocks.v[j])
            return out * scale[..., None] + new, higher, total * scale + p.sum(axis=-1)

        none = jnp.zeros((B, K, G, C, h), jnp.float32), jnp.full((B, K, G, C), NEGATIVE)
        start = *none, jnp.zeros((B, K, G, C), jnp.float32)
        out, top, total = jax.lax.fori_loop(0, i + 1, partial(_where_seen, blocks, i, meet), start)
        return (), ((out / total[..., None]).astype(v_BTKh.dtype), top / LOG2_E + jnp.log(total))

    _, (out_nBKGCh, lse_nBKGC) = scan_after(of_queries, (), jnp.arange(n), args)
    lse_BTH1 = _rows(lse_nBKGC[..., None], (*q_BTHh.shape[:3], 1))
    return _rows(out_nBKGCh, q_BTHh.shape), lse_BTH1[..., 0].swapaxes(1, 2)


def _backward_by_blocks(*inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values by the portable path."""
    q_BTHh, k_BTKh, v_BTKh, _, _, out_BTHh, lse_BHT, dout_BTHh = inputs
    args = _Blocks.of(*inputs[:5])
    K = k_BTKh.shape[2]
    n = len(args.q)
    scale = q_BTHh.shape[-1] ** -0.5
    lse = _by_head(_cut(lse_BHT.swapaxes(1, 2)[..., None] * LOG2_E), K)
    dout_by_head = _by_head(_cut(dout_BTHh), K)
    products_BTH1 = (dout_BTHh.astype(jnp.float32) * out_BTHh).sum(axis=-1, keepdims=True)
    delta = _by_head(_cut(products_BTH1), K)

    def of_queries(inputs: tuple, carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
        blocks, dout = inputs

        def meet(j: jax.Array, carry: tuple) -> tuple:
            dq, dk, dv = carry
            p = jnp.exp2(blocks.scores(i, j) - lse[i])
            dv_j = _product("bkgcs,bkgch->bksh", p.astype(dout.dtype), dout[i])
            dp = _product("bkgch,bksh->bkgcs", dout[i], blocks.v[j])
            ds = (p * (dp - delta[i])).astype(q_BTHh.dtype)
            dq = dq + _product("bkgcs,bksh->bkgch", ds, blocks.k[j])
            dk_j = _product("bkgcs,bkgch->bksh", ds, blocks.q[i])
            return dq, dk.at[j].add(dk_j), dv.at[j].add(dv_j)

        none = jnp.zeros(blocks.q.shape[1:], jnp.float32)
        looped = partial(_where_seen, blocks, i, meet)
        dq, dk, dv = jax.lax.fori_loop(0, i + 1, looped, (none, *carry))
        return (dk, dv), (dq * scale).astype(q_BTHh.dtype)

    total = jax.ShapeDtypeStruct(args.k.shape, jnp.float32)
    (dk, dv), dq = scan_after(of_queries, (total, total), jnp.arange(n), args, dout_by_head)
    dk = (dk * scale).astype(k_BTKh.dtype)[:, :, :, None]
    dv = dv.astype(v_BTKh.dtype)[:, :, :, None]
    return _rows(dq, q_BTHh.shape), _rows(dk, k_BTKh.shape), _rows(dv, v_BTKh.shape)


def _where_seen(blocks: _Blocks, i: jax.Array, meet: Callable, j: jax.Array, carry: tuple) -> tuple:
    """Compute a block of queries with a block of keys if any query sees any key."""
    return jax.lax.cond(blocks.seen_nn[i, j], partial(meet, j), lambda carry: carry, carry)


def _seen(prompt_nBC: jax.Array, branch_nBC: jax.Array) -> jax.Array:
    """Return which pairs of blocks may see one another in any row, by ranges; bool [n, n]."""

    def overlap(x_nBC: jax.Array) -> jax.Array:
        low_nB = x_nBC.min(axis=2)
        high_nB = x_nBC.max(axis=2)
        return (low_nB[:, None] <= high_nB) & (low_nB <= high_nB[:, None])

    shared_nB = branch_nBC.min(axis=2) == 0
    return (overlap(prompt_nBC) & (shared_nB | overlap(branch_nBC))).any(axis=2)


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=precision_of(x), preferred_element_type=jnp.float32)


def _cut(x_BTi: jax.Array, filling: int = 0) -> jax.Array:
    """Return blocks of positions, [n, B, C, …], with the last block padded."""
    B, T, *rest = x_BTi.shape
    C = min(T, LONG_ROW_BLOCK_TOKENS)
    n = -(-T // C)
    widths = [(0, 0), (0, n * C - T), *[(0, 0)] * len(rest)]
    x_BTi = jnp.pad(x_BTi, widths, constant_values=filling)
    return jnp.moveaxis(x_BTi.reshape(B, n, C, *rest), 1, 0)


def _by_head(x_nBCHi: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return [n, B, K, G, C, i] for H = K · G heads."""
    n, B, C, H, i = x_nBCHi.shape
    x_nBCKGi = x_nBCHi.reshape(n, B, C, num_kv_heads, H // num_kv_heads, i)
    return x_nBCKGi.transpose(0, 1, 3, 4, 2, 5)


def _rows(x_nBKGCi: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return [B, T, H, i] from blocks."""
    B, T, H, i = shape
    x_BnCKGi = x_nBKGCi.transpose(1, 0, 4, 2, 3, 5)
    return x_BnCKGi.reshape(B, -1, H, i)[:, :T]
