"""Attention from nodes of slots to the pages that hold their positions.

TPUs and Hopper GPUs have kernels (`models.kernels`). The portable path, their reference, reads a
few pages of every slot at a time and keeps a running maximum and sum.

B slots, W nodes of a slot, N pages of a slot, P pages, T positions of a page, C pages that are read
at a time, H query heads, K key/value heads, h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reprise.models.attention.attention import PartialSoftmax, merged, partial_attention
from reprise.models.attention.entries import VALUES, place_of, write_entries
from reprise.models.kernels.find import find
from reprise.models.kernels.shared.powers import NEGATIVE
from reprise.models.layout import PAGE_BLOCK_POSITIONS

KERNEL_NODES = 64  # the most nodes of a slot that a kernel takes


def attend_pages(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    for_cpu: bool,
) -> PartialSoftmax:
    """Return the softmax over the first `length` positions of each slot, in the pages of `table`.

    Table entries beyond the positions of a slot are arbitrary. With `for_cpu`, keys are [P, K, h,
    T]. On a mesh, call this inside `jax.shard_map`.
    """
    q_BWHh = q_BWHh.astype(keys_PKTh.dtype)
    paths = {} if for_cpu else _kernels(q_BWHh.shape[3], keys_PKTh.shape[2], keys_PKTh.dtype)
    if not paths:
        return _portable(q_BWHh, keys_PKTh, values_PKTh, table_BN, length_B, for_cpu=for_cpu)
    out, top, total = jax.lax.platform_dependent(
        q_BWHh, keys_PKTh, values_PKTh, table_BN, length_B, **paths, default=_as_tuple
    )
    return PartialSoftmax(out, top, total)


def append_and_attend(
    q_B1Hh: jax.Array,
    k_BKh: jax.Array,
    v_BKh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    position_B: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write one entry per slot, and attend from its node to all positions up to it.

    Returns attention in the dtype of the pages, [B, 1, H, h], keys and values. Slots without a page
    at their position write nothing and get 0. On a mesh, call this inside `jax.shard_map`.
    """
    P, _, T, h = keys_PKTh.shape
    dtype = keys_PKTh.dtype
    page_B, offset_B = place_of(table_BN, jnp.arange(len(position_B)), position_B, keys_PKTh)
    length_B = jnp.where(page_B < P, position_B + 1, 0)
    q_B1Hh = q_B1Hh.astype(dtype)
    k_BKh = k_BKh.astype(dtype)
    v_BKh = v_BKh.astype(dtype)

    def apart(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        table_BN: jax.Array,
        length_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = write_entries(keys, k, page_B, offset_B, VALUES)
        values = write_entries(values, v, page_B, offset_B, VALUES)
        result = attend_pages(q, keys, values, table_BN, length_B, for_cpu=False)
        out = jnp.where(result.total > 0, result.out / result.total, 0)
        return out.astype(dtype), keys, values

    kernel = find("page_attention", "tpu", h, T, dtype)
    if isinstance(kernel, str):
        return apart(q_B1Hh, k_BKh, v_BKh, keys_PKTh, values_PKTh, table_BN, length_B)
    return jax.lax.platform_dependent(
        q_B1Hh,
        k_BKh,
        v_BKh,
        keys_PKTh,
        values_PKTh,
        table_BN,
        length_B,
        tpu=kernel.append_and_attend,
        default=apart,
    )


def _as_tuple(*inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    result = _portable(*inputs, for_cpu=False)
    return result.out, result.top, result.total


def _kernels(head_dim: int, page_tokens: int, dtype: Any) -> dict[str, Callable[..., Any]]:
    """Return the kernels that take these sizes, by platform."""
    result: dict[str, Callable[..., Any]] = {}
    for platform in ("tpu", "cuda"):
        kernel = find("page_attention", platform, head_dim, page_tokens, dtype)
        if not isinstance(kernel, str):
            result[platform] = _some_nodes_at_a_time(kernel.attend_pages)
    return result


def _some_nodes_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel for any number of nodes, which passes them as several slots."""

    def attend(
        q_BWHh: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        table_BN: jax.Array,
        length_B: jax.Array,
    ) -> tuple[jax.Array, ...]:
        B, W, H, h = q_BWHh.shape
        if W <= KERNEL_NODES:
            return kernel(q_BWHh, keys, values, table_BN, length_B)
        n = -(-W // KERNEL_NODES)
        q_BXHh = jnp.pad(q_BWHh, ((0, 0), (0, n * KERNEL_NODES - W), (0, 0), (0, 0)))
        cut = q_BXHh.reshape(B * n, KERNEL_NODES, H, h)
        result = kernel(cut, keys, values, jnp.repeat(table_BN, n, axis=0), jnp.repeat(length_B, n))
        return tuple(x.reshape(B, n * KERNEL_NODES, H, -1)[:, :W] for x in result)

    return attend


def _portable(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    for_cpu: bool,
) -> PartialSoftmax:
    B, W, H, h = q_BWHh.shape
    P, K, T, _ = values_PKTh.shape
    N = table_BN.shape[1]
    C = max(1, min(N, PAGE_BLOCK_POSITIONS // T))
    table_BN = jnp.pad(table_BN, ((0, 0), (0, -N % C)))

    def step(i: jax.Array, so_far: PartialSoftmax) -> PartialSoftmax:
        page_BC = jnp.clip(jax.lax.dynamic_slice_in_dim(table_BN, i * C, C, axis=1), 0, P - 1)
        k_BCKTh = keys_PKTh[page_BC]
        v_BCKTh = values_PKTh[page_BC]
        k_BKhCT = k_BCKTh.transpose((0, 2, 3, 1, 4) if for_cpu else (0, 2, 4, 1, 3))
        k_BKhS = k_BKhCT.reshape(B, K, h, C * T)
        v_BKSh = v_BCKTh.transpose(0, 2, 1, 3, 4).reshape(B, K, C * T, h)
        seen_BS = i * C * T + jnp.arange(C * T) < length_B[:, None]
        mask_BWS = jnp.broadcast_to(seen_BS[:, None], (B, W, C * T))
        return merged(so_far, partial_attention(q_BWHh, k_BKhS, v_BKSh, mask_BWS))

    none = PartialSoftmax(
        jnp.zeros((B, W, H, h), jnp.float32),
        jnp.full((B, W, H, 1), NEGATIVE, jnp.float32),
        jnp.zeros((B, W, H, 1), jnp.float32),
    )
    blocks = (jnp.max(length_B) + C * T - 1) // (C * T)
    result = jax.lax.fori_loop(0, blocks, step, none)
    some_B111 = (length_B > 0)[:, None, None, None]  # if all keys are masked, weights are equal
    return PartialSoftmax(
        jnp.where(some_B111, result.out, 0), result.top, jnp.where(some_B111, result.total, 0)
    )
