"""Kernels of attention, the portable paths on the same inputs, and cuDNN if it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.budget import Figures, Log
from benchmarks.accelerator.sizes import Size, accelerator, summary, timed, to_floor, turns_of
from reprise.models.attention import page_attention
from reprise.models.attention.attention import Packing
from reprise.models.decoder import row_attention

CALLS = 8  # launched without waiting, which hides the host's part of a call
KERNEL = "mosaic_gpu", "tpu_custom_call"  # names of kernels of ours in a lowered program


@partial(jax.jit, static_argnames="how")
def attend_pages(q_BWHh: jax.Array, *cache: jax.Array, how: str) -> jax.Array:
    """Attention of nodes to their slots' pages, float32 [B, W, H, h]."""
    attend = page_attention._portable if how == "portable" else page_attention.attend_pages
    keys_PKTh, values_PKTh, table_BN, length_B = cache
    sums = attend(q_BWHh, keys_PKTh, values_PKTh, table_BN, length_B, for_cpu=False)
    return sums.out / sums.total


@partial(jax.jit, static_argnames=("how", "backward"))
def attend_rows(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    weight_BTHh: jax.Array,
    *,
    how: str,
    backward: bool,
) -> Any:
    """Causal attention: its output, or the gradients of Σ weight · output."""
    zeros_BT = jnp.zeros(q_BTHh.shape[:2], jnp.int32)
    packing = Packing(zeros_BT, zeros_BT + 1, zeros_BT)  # one prompt; number 0 is padding

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if how in ("ours", "portable"):
            return row_attention.attend_rows(q, k, v, packing)
        implementation: Any = how
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def weighed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(weight_BTHh.astype(jnp.float32) * attend(q, k, v))

    qkv = q_BTHh, k_BTKh, v_BTKh
    return jax.grad(weighed, argnums=(0, 1, 2))(*qkv) if backward else attend(*qkv)


def of_pages(size: Size, log: Log) -> Iterator[Figures]:
    """Attention of nodes to pages, against keys and values read once."""
    B = size.slots
    T = size.page_tokens
    device = accelerator()
    query_heads, kv_heads, h = size.heads
    for live in size.live_positions:
        N = -(-live // T)
        pages = [_normal(size, seed, B * N, kv_heads, T, h) for seed in (1, 2)]
        table_BN = np.random.default_rng(0).permutation(B * N).reshape(B, N).astype(np.int32)
        floor_s = sum(x.nbytes for x in pages) / device.bytes_per_s if device else None
        for nodes in (1, size.node_count):
            shape: Figures = {"slots": B, "live_positions": live, "nodes": nodes}
            queries = _normal(size, 0, B, nodes, query_heads, h)
            inputs = queries, *pages, jnp.asarray(table_BN), jnp.full(B, live, jnp.int32)
            yield from compared(size, log, shape, attend_pages, inputs, "portable", floor_s)


def of_rows(size: Size, log: Log) -> Iterator[Figures]:
    """Causal attention of training rows, forward, and forward and backward."""
    B, T = size.attention_rows
    query_heads, kv_heads, h = size.heads
    heads = (query_heads, kv_heads, kv_heads, query_heads)
    inputs = tuple(_normal(size, i, B, T, num_heads, h) for i, num_heads in enumerate(heads))
    for backward in (False, True):
        shape = {"rows": B, "row_tokens": T, "backward": backward}
        attend = partial(attend_rows, backward=backward)
        yield from compared(size, log, shape, attend, inputs, size.baseline, None)


def _normal(size: Size, seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, size.dtype)


def compiled(attend: Any, inputs: Any, how: str) -> tuple[bool, Callable[..., Any]]:
    """Return whether the program has a kernel of ours, and the program."""
    why_portable = row_attention.why_portable
    jax.clear_caches()  # of programs traced with the other path
    if how == "portable":
        row_attention.why_portable = lambda *_: "the benchmark measures it"
    try:
        lowered = jax.jit(partial(attend, how=how)).lower(*inputs)
    finally:
        row_attention.why_portable = why_portable
    text = lowered.as_text()
    return any(name in text for name in KERNEL), lowered.compile()


def compared(
    size: Size,
    log: Log,
    shape: Figures,
    attend: Any,
    inputs: Any,
    baseline: str,
    floor_s: float | None,
) -> Iterator[Figures]:
    """Compile, run and time the ways to attend; one that fails costs its own row only."""
    has_kernel = dict[str, bool]()
    calls = dict[str, Callable[[], float]]()
    outputs = dict[str, list[jax.Array]]()
    log.phase("compile")
    for how in dict.fromkeys(("ours", "portable", baseline)):
        try:
            has_kernel[how], step = compiled(attend, inputs, how)
            outputs[how] = jax.block_until_ready(jax.tree.leaves(step(*inputs)))
            calls[how] = partial(timed, partial(step, *inputs), CALLS)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield {**shape, "how": how, "not_run": why}
    reference = outputs.get("portable")
    differences = {how: reference and difference(x, reference) for how, x in outputs.items()}
    del outputs
    seconds = turns_of(log, calls, size.repeats)
    for how, seconds_T in seconds.items():
        row: Figures = {**shape, "how": how, "kernel": has_kernel[how]}
        row |= summary(seconds_T, seconds.get(baseline), f"to_{baseline}")
        row |= to_floor(seconds_T, floor_s)
        yield row | {"difference_to_portable": differences[how]}


def difference(arrays: Any, reference: Any) -> float:
    """Return the largest difference relative to the largest number of the reference."""
    worst = 0.0
    for x, y in zip(arrays, reference, strict=True):
        x, y = (a.astype(jnp.float32) for a in (x, y))
        worst = np.maximum(worst, jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))  # keeps a NaN
    return float(f"{worst:.3g}")
