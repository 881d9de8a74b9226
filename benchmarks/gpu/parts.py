"""The parts of `benchmarks.gpu`; each yields rows as they are measured.

Kinds take turns, and medians count. Draft acceptance in `rollouts` is synthetic: drafts are tokens
of the plain run, each correct with probability `ACCEPTANCE`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import speculation, workloads
from benchmarks.gpu import same_bits
from benchmarks.gpu.grpo import grpo
from benchmarks.rounds import Rounds, busy
from benchmarks.turns import in_turns
from reprise.models.attention import page_attention
from reprise.models.attention.attention import Packing
from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig, leaves, param_specs
from reprise.models.decoder import row_attention, transformer
from reprise.rl.engine.engine import Engine
from reprise.rl.learner import trainer
from reprise.rl.learner.config import TrainerConfig, TrainSpec
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.records.trajectory import FinishReason, Trajectory
from reprise.rl.slots.config import EngineConfig
from reprise.sched.simulator.roofline import ACCELERATORS, Accelerator
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import no_drafts

Row = dict[str, Any]
Rows = Iterator[Row]
ACCEPTANCE = 0.75  # of a draft token
CALLS = 8  # launched without waiting, which hides the host's part of a call
KERNEL = "mosaic_gpu"  # a Mosaic GPU kernel's name in a lowered program
GROUP = 4  # responses to a prompt; together they fill a row
REMATS = ("layer", "dots")
_OPTIONS: Any = {"qk_norm": True, "tied_embeddings": True}
# Qwen3-0.6B's published configuration; the weights are random
QWEN3_0_6B = ModelConfig(
    *("qwen3", 151936, 1024, 28, 16, 8, 128, 3072),
    rope_theta=1e6,
    max_positions=40960,
    **_OPTIONS,
)
TINY_POLICY = ModelConfig(*("qwen3", 64, 32, 1, 2, 1, 16, 64), max_positions=512, **_OPTIONS)


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of all parts; a gradient step has `train_rows` of `row_tokens`."""

    name: str = "real"
    model: ModelConfig = QWEN3_0_6B
    dtype: str = "bfloat16"
    slots: int = 64
    live_positions: tuple[int, ...] = (2048, 8192)  # of each slot
    page_tokens: int = 128
    heads: tuple[int, int, int] = (32, 8, 128)  # query and key/value heads, and size, of an 8B
    attention_rows: tuple[int, int] = (2, 8192)  # rows and tokens of a row
    baseline: str = "cudnn"  # the implementation of `jax.nn.dot_product_attention`
    prompt_tokens: int = 128
    new_tokens: int = 512  # of the longest response
    row_tokens: int = 4096
    train_rows: int = 4
    repeats: int = 7
    node_count: int = 8  # of a slot

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            slots=self.slots,
            min_slots=self.slots,
            max_nodes=self.node_count,
            page_tokens=self.page_tokens,
        )


_TINY: Any = {
    **{"slots": 4, "live_positions": (16, 48), "page_tokens": 16, "heads": (4, 2, 16)},
    **{"attention_rows": (1, 96), "baseline": "xla", "prompt_tokens": 6, "new_tokens": 16},
    **{"row_tokens": 64, "train_rows": 2},
    **{"repeats": 5, "node_count": 4},
}
SIZES = {"real": Size(), "tiny": Size("tiny", TINY_POLICY, "float32", **_TINY)}


def accelerator(kind: str | None = None) -> Accelerator | None:
    """Return the figures of a device by jax's name: "NVIDIA H100 80GB HBM3" is an H100."""
    kind = kind or jax.devices()[0].device_kind
    found = [device for name, device in ACCELERATORS.items() if re.search(rf"\b{name}\b", kind)]
    return found[0] if found else None


def num_weights(model: ModelConfig) -> int:
    """Count the weights that products read, hence not embeddings that are only looked up."""
    numbers = sum(int(np.prod(spec.shape)) for spec in leaves(param_specs(model)))
    return numbers if model.tied_embeddings else numbers - model.vocab_size * model.d_model


def random_weights(model: ModelConfig, dtype: str) -> transformer.Params:
    params = transformer.init(model, jax.random.key(0))
    return jax.tree.map(lambda p: p.astype(dtype), params)


def timed(call: Callable[[], Any], calls: int = 1) -> float:
    """Return the mean seconds of calls that are launched without waiting."""
    began_s = time.perf_counter()
    found = [call() for _ in range(calls)]
    jax.block_until_ready(found)
    return (time.perf_counter() - began_s) / calls


def summary(seconds_T: np.ndarray, other_T: np.ndarray | None = None, name: str = "") -> Row:
    """Return the median in ms with its quartiles, and the median of ratios to another kind."""

    def rounded(x: Any) -> float:
        return float(f"{float(x):.4g}")

    quartiles = [rounded(x) for x in 1e3 * np.quantile(seconds_T, [0.25, 0.75])]
    row: Row = {"ms": rounded(1e3 * np.median(seconds_T)), "ms_quartiles": quartiles}
    row["repeats"] = len(seconds_T)
    return row if other_T is None else row | {name: rounded(np.median(seconds_T / other_T))}


# --- rounds -------------------------------------------------------------------------------


def paged_rounds(size: Size, live: int) -> tuple[Rounds, np.ndarray, np.ndarray]:
    """Return rounds on pages of random keys and values, plain tokens [B, N], and their nodes."""
    B, N = size.slots, size.node_count
    config = dataclasses.replace(size.engine_config, rounds_per_fetch=N)
    engine, params = (
        Engine(size.model, config, dtype=size.dtype),
        random_weights(size.model, size.dtype),
    )
    bench = Rounds(engine, params, live)
    bench.state[0] = filled(bench.state[0])
    plain_BN, drafts = bench.plain(busy(B, live)), no_drafts(B, N - 1)
    drafts.tokens_AN[:] = plain_BN[:, :-1]
    drafts.parents_AN[:] = np.arange(-1, N - 2)
    drafts.count_A[:] = N - 1
    return bench, plain_BN, bench.pack(drafts, B * N)


def filled(cache: KVCache) -> KVCache:
    """Fill all pages in place with random numbers: zeros would be faster than real values."""

    def fill(pages: tuple[jax.Array, ...], seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), len(pages))
        return tuple(
            _repeat(jax.random.normal(k, x.shape[1:], x.dtype), x)
            for k, x in zip(keys, pages, strict=True)
        )

    return dataclasses.replace(cache, keys=fill(cache.keys, 0), values=fill(cache.values, 1))


def _broadcast(page: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.broadcast_to(page, pages.shape)


# Without `keep_unused` the pages would not be donated: they do not fit twice.
_repeat = jax.jit(_broadcast, donate_argnums=1, keep_unused=True)


def rounds(size: Size) -> Rows:
    """Plain and verifying rounds, against weights, keys and values read once.

    floor = (weights + keys and values of live positions) · bytes of a number / bandwidth
    """
    device, N, model = accelerator(), size.node_count, size.model
    for live in size.live_positions:
        bench, plain_BN, nodes_5M = paged_rounds(size, live)
        verified_BN, count_B = bench.verify(busy(size.slots, live), nodes_5M)
        emitted_BN = np.arange(verified_BN.shape[1]) < count_B[:, None]
        differ = (verified_BN != plain_BN[:, : verified_BN.shape[1]]) & emitted_BN
        kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size.slots * live
        num_bytes = (num_weights(model) + kv) * jnp.dtype(size.dtype).itemsize
        floor_s = num_bytes / device.bytes_per_s if device else None
        verify = partial(bench.verify, nodes_5M=nodes_5M)
        kinds = {
            "plain": lambda bench=bench: bench.seconds(bench.plain) / N,
            "verify": partial(bench.seconds, verify),
        }
        seconds = in_turns(kinds, size.repeats)
        for name, seconds_T in seconds.items():
            is_plain = name == "plain"
            row: Row = {"round": name, "slots": size.slots, "live_positions": live}
            row["nodes"] = size.slots * (1 if is_plain else N)
            row |= summary(seconds_T, seconds["plain"], "to_plain") | to_floor(seconds_T, floor_s)
            row["tokens"] = plain_BN.size if is_plain else int(count_B.sum())
            yield row if is_plain else row | {"tokens_that_differ": int(differ.sum())}
        del bench, kinds, verify  # the next pages need the memory


def to_floor(seconds_T: np.ndarray, floor_s: float | None) -> Row:
    if floor_s is None:
        return {"floor_ms": None, "to_floor": None}
    ratio = round(float(np.median(seconds_T)) / floor_s, 3)
    return {"floor_ms": round(1e3 * floor_s, 4), "to_floor": ratio}


# --- kernels ------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="how")
def attend_pages(q_BWHh: jax.Array, *cache: jax.Array, how: str) -> jax.Array:
    """Attention of nodes to their slots' pages, float32 [B, W, H, h]."""
    attend = page_attention._portable if how == "portable" else page_attention.attend_pages
    sums = attend(q_BWHh, *cache, for_cpu=False)
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


def kernels(size: Size) -> Rows:
    """Our kernels of attention, the portable paths on the same inputs, and cuDNN if it runs."""
    B, T, device = size.slots, size.page_tokens, accelerator()
    query_heads, kv_heads, h = size.heads

    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, size.dtype)

    for live in size.live_positions:
        N = -(-live // T)
        pages = [normal(seed, B * N, kv_heads, T, h) for seed in (1, 2)]
        table_BN = np.random.default_rng(0).permutation(B * N).reshape(B, N).astype(np.int32)
        floor_s = sum(x.nbytes for x in pages) / device.bytes_per_s if device else None
        for nodes in (1, size.node_count):
            shape: Row = {"attention": "pages", "slots": B, "live_positions": live, "nodes": nodes}
            queries = normal(0, B, nodes, query_heads, h)
            inputs = queries, *pages, jnp.asarray(table_BN), jnp.full(B, live, jnp.int32)
            yield from compared(size, shape, attend_pages, inputs, "portable", floor_s)
    B, T = size.attention_rows
    heads = (query_heads, kv_heads, kv_heads, query_heads)
    inputs = tuple(normal(i, B, T, num_heads, h) for i, num_heads in enumerate(heads))
    for backward in (False, True):
        shape = {"attention": "rows", "rows": B, "row_tokens": T, "backward": backward}
        attend = partial(attend_rows, backward=backward)
        yield from compared(size, shape, attend, inputs, size.baseline, None)


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
    return KERNEL in lowered.as_text(), lowered.compile()


def compared(
    size: Size, shape: Row, attend: Any, inputs: Any, baseline: str, floor_s: float | None
) -> Rows:
    """Compile, run and time the ways to attend; one that fails costs its own row only."""
    has_kernel, calls, outputs = {}, {}, {}
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
    seconds = in_turns(calls, size.repeats)
    for how, seconds_T in seconds.items():
        row = {**shape, "how": how, "kernel": has_kernel[how]}
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


# --- rollouts, training, flips ------------------------------------------------------------


def rollouts(size: Size) -> Rows:
    """Speculative rollouts against plain ones of the same responses; every token is compared."""
    params = random_weights(size.model, size.dtype)
    shape = size.slots, size.new_tokens, ACCEPTANCE, size.prompt_tokens
    work = workloads.replay("synthetic", size.model, params, *shape)
    bench = speculation.open_bench(work, size.engine_config)
    row = speculation.compare(bench, "replay", size.repeats)
    yield {"requests": size.slots, "acceptance": ACCEPTANCE, "synthetic": True, **row}


def random_responses(size: Size) -> list[Trajectory]:
    """Return random responses; a group of `GROUP` fills a row."""
    rng, P, V = np.random.default_rng(0), size.row_tokens // 16, size.model.vocab_size
    n = (size.row_tokens - P + 1) // GROUP
    logprobs, zeros_T = np.full(n, -np.log(V), np.float32), np.zeros(n, np.int32)
    prompts_GP = rng.integers(0, V, (size.train_rows, P)).astype(np.int32)
    return [
        Trajectory(
            *(g * GROUP + i, g, i, prompt_P, rng.integers(0, V, n).astype(np.int32)),
            logprobs=logprobs,
            policy_versions=zeros_T,
            origins=zeros_T.astype(np.uint8),
            finish_reason=FinishReason.LENGTH,
            reward=float(i % 2),
            emission_logprobs=logprobs,
        )
        for g, prompt_P in enumerate(prompts_GP)
        for i in range(GROUP)
    ]


def operations(size: Size, prompt_tokens: int, response_tokens: int) -> tuple[int, float]:
    """Return the positions of a step and its operations; recomputed ones do not count.

        6 · weights of products · positions + 12 · layers · heads · head size · pairs

    The head counts for response tokens only. A pair is a position and one that it attends to.
    """
    model, p, n = size.model, prompt_tokens - 1, response_tokens
    head, positions = model.vocab_size * model.d_model, size.train_rows * (p + GROUP * n)
    pairs = size.train_rows * (p * (p + 1) / 2 + GROUP * (n * p + n * (n + 1) / 2))
    products = (num_weights(model) - head) * positions + head * size.train_rows * GROUP * n
    width = model.num_heads * model.head_dim
    return positions, 6.0 * products + 12.0 * model.num_layers * width * pairs


def training(size: Size) -> Rows:
    """GRPO gradient steps that store all activations of products, or layer inputs only."""
    done, device = random_responses(size), accelerator()
    advantages = np.array([1.0 if t.sample_index % 2 else -1.0 for t in done], np.float32)
    learners, states, norms = {}, {}, dict[str, float]()
    for remat in REMATS:
        settings: Any = {"compute_dtype": size.dtype, "remat": remat}
        settings["micro_batch_tokens"] = size.row_tokens * size.train_rows
        recipe = TrainSpec(size.model, trainer=TrainerConfig(**settings))
        shape = trainer.batch_shape(recipe, size.row_tokens)
        learners[remat] = trainer.Learner(recipe, shape, SamplingConfig())
        optimizer = make_optimizer(recipe.optimizer, recipe.total_steps)
        states[remat] = init_state(random_weights(size.model, "float32"), optimizer)

    def step(remat: str) -> Any:
        learner = learners[remat]
        states[remat], metrics = trainer.update(states[remat], done, advantages, 1, learner)
        norms.setdefault(remat, metrics["grad_norm"])
        return states[remat].params

    kinds = {remat: partial(timed, partial(step, remat)) for remat in REMATS}
    seconds = in_turns(kinds, size.repeats)
    positions, needed = operations(size, len(done[0].prompt_ids), done[0].num_tokens)
    for remat, seconds_T in seconds.items():
        row: Row = {"remat": remat, "row_tokens": size.row_tokens, "rows": size.train_rows}
        row |= {"tokens": positions, "responses": len(done)}
        row |= summary(seconds_T, seconds["layer"], "to_layer")
        per_s = 1 / float(np.median(seconds_T))
        row |= {"tokens_per_s": round(positions * per_s, 1), "operations": needed}
        peak = device and device.operations_per_s
        row["flops_utilisation"] = round(needed * per_s / peak, 4) if peak else None
        yield row | {"gradient_norm": norms[remat]}


PARTS: dict[str, Callable[[Size], Rows]] = {
    "grpo": lambda size: grpo(size.name),
    "rounds": rounds,
    "kernels": kernels,
    "rollouts": rollouts,
    "training": training,
    "same_bits": same_bits.rows,
}
