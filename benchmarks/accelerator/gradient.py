"""A GRPO gradient step of Qwen3-0.6B's shape, against the peak of the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.budget import Figures, Log
from benchmarks.accelerator.sizes import (
    Size,
    accelerator,
    num_weights,
    random_weights,
    summary,
    timed,
    turns_of,
)
from reprise.rl.learner import trainer
from reprise.rl.learner.config import TrainerConfig, TrainSpec
from reprise.rl.learner.optimizer import init_state, make_optimizer
from reprise.rl.records.trajectory import FinishReason, Trajectory
from reprise.spec.config import SamplingConfig

GROUP = 4  # responses to a prompt; together they fill a row
REMATS = ("layer", "dots")  # each a row of the plan


def random_responses(size: Size) -> list[Trajectory]:
    """Return random responses; a group of `GROUP` fills a row."""
    rng = np.random.default_rng(0)
    P = size.row_tokens // 16
    V = size.model.vocab_size
    n = (size.row_tokens - P + 1) // GROUP
    logprobs = np.full(n, -np.log(V), np.float32)
    zeros_T = np.zeros(n, np.int32)
    prompts_GP = rng.integers(0, V, (size.train_rows, P)).astype(np.int32)
    return [
        Trajectory(
            request_id=g * GROUP + i,
            group_id=g,
            sample_index=i,
            prompt_ids=prompt_P,
            response_ids=rng.integers(0, V, n).astype(np.int32),
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
    model = size.model
    p = prompt_tokens - 1
    n = response_tokens
    head = model.vocab_size * model.d_model
    positions = size.train_rows * (p + GROUP * n)
    pairs = size.train_rows * (p * (p + 1) / 2 + GROUP * (n * p + n * (n + 1) / 2))
    products = (num_weights(model) - head) * positions + head * size.train_rows * GROUP * n
    width = model.num_heads * model.head_dim
    return positions, 6.0 * products + 12.0 * model.num_layers * width * pairs


def step(size: Size, remat: str, log: Log) -> Iterator[Figures]:
    """A gradient step that keeps the inputs of layers only, or the outputs of products."""
    done = random_responses(size)
    device = accelerator()
    advantages = np.array([1.0 if t.sample_index % 2 else -1.0 for t in done], np.float32)
    settings = TrainerConfig(
        compute_dtype=size.dtype,
        remat=remat,
        micro_batch_tokens=size.row_tokens * size.train_rows,
    )
    recipe = TrainSpec(size.model, trainer=settings)
    learner = trainer.Learner(
        recipe, trainer.batch_shape(recipe, size.row_tokens), SamplingConfig()
    )
    optimizer = make_optimizer(recipe.optimizer, recipe.total_steps)
    state = init_state(random_weights(size.model, "float32"), optimizer)
    norms = list[float]()

    def update() -> Any:
        nonlocal state
        state, metrics = trainer.update(state, done, advantages, 1, learner)
        norms.append(metrics["grad_norm"])
        return state.params

    seconds_T = turns_of(log, {remat: partial(timed, update)}, size.repeats)[remat]
    positions, needed = operations(size, len(done[0].prompt_ids), done[0].num_tokens)
    figures: Figures = {"remat": remat, "row_tokens": size.row_tokens, "rows": size.train_rows}
    figures |= {"tokens": positions, "responses": len(done)} | summary(seconds_T)
    per_s = 1 / float(np.median(seconds_T))
    figures |= {"tokens_per_s": round(positions * per_s, 1), "operations": needed}
    peak = device and device.operations_per_s
    figures["flops_utilisation"] = round(needed * per_s / peak, 4) if peak else None
    memory = jax.devices()[0].memory_stats() or {}
    figures["peak_bytes"] = memory.get("peak_bytes_in_use")
    yield figures | {"gradient_norm": norms[0]}
