"""Attention: our kernels, the portable paths on the same inputs, and cuDNN where it runs.

Differences are the largest of any number, relative to the largest number of the portable result.
Attention of training sees plain causal rows, so that cuDNN computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.sizes import Row, Rows, Size, accelerator, in_turns, summary, timed
from models import page_attention, row_attention
from models.attention import Packing

CALLS = 8  # launched one behind the other, so that the host's part of a call is hidden
KERNEL = "mosaic_gpu"  # what the call of a Mosaic GPU kernel is named in a lowered program
PORTABLE = "the benchmark asks for it"
Step = tuple[bool, Callable[..., Any]]  # whether it calls a kernel of ours, and the step


@partial(jax.jit, static_argnames="portable")
def of_pages(
    q_BWHh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    table_BN: jax.Array,
    length_B: jax.Array,
    *,
    portable: bool,
) -> jax.Array:
    """Attention of nodes to their slots' pages, float32 [B, W, H, h]."""
    attend = page_attention._portable if portable else page_attention.attend_pages
    found = attend(q_BWHh, keys_PKTh, values_PKTh, table_BN, length_B)
    return found.out / found.total


@partial(jax.jit, static_argnames=("how", "backward"))
def of_rows(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    weight_BTHh: jax.Array,
    *,
    how: str,
    backward: bool,
) -> tuple[jax.Array, ...]:
    """Causal attention by `how`: its output, or the gradients of Σ weight · output."""
    zeros_BT = jnp.zeros(q_BTHh.shape[:2], jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if how in ("ours", "portable"):
            return row_attention.attend_rows(q, k, v, Packing(zeros_BT, zeros_BT, zeros_BT))
        implementation: Any = how
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    if not backward:
        return (attend(q_BTHh, k_BTKh, v_BTKh),)

    def weighed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(weight_BTHh.astype(jnp.float32) * attend(q, k, v))

    return jax.grad(weighed, argnums=(0, 1, 2))(q_BTHh, k_BTKh, v_BTKh)


def rows(size: Size) -> Rows:
    for live in size.live_positions:
        for nodes in (1, size.node_count):
            yield from _page_rows(size, live, nodes)
    for backward in (False, True):
        yield from _row_rows(size, backward)


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def difference(found: Any, reference: Any) -> float:
    """Return the largest difference relative to the largest number of the reference."""
    worst = 0.0
    for x, y in zip(found, reference, strict=True):
        of_reference = jnp.abs(y.astype(jnp.float32))
        apart = jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)))
        worst = max(worst, float(apart / jnp.max(of_reference)))
    return worst


def _page_rows(size: Size, live: int, nodes: int) -> Rows:
    B, T, heads = size.slots, size.page_tokens, size.heads
    N = -(-live // T)
    pages = B * N, heads.keys, T, heads.size
    inputs = (
        _normal(0, (B, nodes, heads.queries, heads.size), size.dtype),
        _normal(1, pages, size.dtype),
        _normal(2, pages, size.dtype),
        jnp.asarray(np.random.default_rng(0).permutation(B * N).reshape(B, N), jnp.int32),
        jnp.full(B, live, jnp.int32),
    )
    steps = {
        name: partial(_compiled_pages, inputs, name == "portable") for name in ("ours", "portable")
    }
    device, moved = accelerator(), 2 * int(np.prod(pages)) * size.itemsize
    floor_ms = None if device is None else 1e3 * moved / device.bytes_per_s
    shape = {"attention": "pages", "slots": B, "live_positions": live, "nodes_of_a_slot": nodes}
    yield from _compared(size, shape, steps, inputs, "portable", floor_ms)


def _row_rows(size: Size, backward: bool) -> Rows:
    (B, T), heads = size.attention_rows, size.heads
    queries, keys = (B, T, heads.queries, heads.size), (B, T, heads.keys, heads.size)
    shapes = queries, keys, keys, queries
    inputs = tuple(_normal(i, shape, size.dtype) for i, shape in enumerate(shapes))
    steps = {
        how: partial(_compiled_rows, inputs, how, backward)
        for how in ("ours", "portable", size.baseline)
    }
    shape = {"attention": "rows", "rows": B, "row_tokens": T, "backward": backward}
    yield from _compared(size, shape, steps, inputs, size.baseline, None)


def _compiled_pages(inputs: Any, portable: bool) -> Step:
    lowered = of_pages.lower(*inputs, portable=portable)
    return KERNEL in lowered.as_text(), lowered.compile()


def _compiled_rows(inputs: Any, how: str, backward: bool) -> Step:
    usual = row_attention.why_portable
    jax.clear_caches()  # of what was traced with the other path
    if how == "portable":
        row_attention.why_portable = lambda *_: PORTABLE
    try:
        lowered = of_rows.lower(*inputs, how=how, backward=backward)
    finally:
        row_attention.why_portable = usual
    return KERNEL in lowered.as_text(), lowered.compile()


def _compared(
    size: Size,
    shape: Row,
    compiled: dict[str, Callable[[], Step]],
    inputs: Any,
    baseline: str,
    floor_ms: float | None,
) -> Rows:
    """Compile, run and time the steps; a baseline of others that fails costs its own row alone."""
    steps, found = dict[str, Step](), {}
    for name, compile_step in compiled.items():
        try:
            step = compile_step()
            found[name] = jax.block_until_ready(jax.tree.leaves(step[1](*inputs)))
            steps[name] = step
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if name in ("ours", "portable"):
                raise
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            yield {**shape, "how": name, "not_run": why}
    apart = {name: difference(x, found["portable"]) for name, x in found.items()}
    del found
    calls = {
        name: partial(timed, partial(step, *inputs), CALLS) for name, (_, step) in steps.items()
    }
    seconds = in_turns(calls, size.repeats)
    for name, taken_T in seconds.items():
        row = {**shape, "how": name, "kernel": steps[name][0]}
        row |= summary(taken_T, seconds.get(baseline), f"to_{baseline}")
        row["difference_to_portable"] = float(f"{apart[name]:.3g}")
        if floor_ms is not None:
            row |= {"floor_ms": round(floor_ms, 4), "to_floor": round(row["ms"] / floor_ms, 3)}
        yield row
