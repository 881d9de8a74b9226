"""A GRPO gradient step, gradient and update, with what the backward pass keeps in two ways.

    utilisation = operations / (seconds · peak)
    operations  = 6 · weights of products · tokens + 12 · layers · heads · head size · pairs

The head counts for response tokens alone. A pair is a position and one before it, or itself, that
it sees. What `Trainer.remat` computes again is not counted. A token is a position in use.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.sizes import (
    Row,
    Rows,
    Size,
    accelerator,
    in_turns,
    num_weights,
    random_weights,
    summary,
    timed,
)
from models.config import ModelConfig
from rl.learner import micro_batches
from rl.learner.config import TrainerConfig, TrainSpec
from rl.learner.gradient_accumulation import StepScalars, accumulate, apply, inspect, start
from rl.learner.logprobs import place
from rl.learner.losses import normaliser_of
from rl.learner.micro_batches import Packed, TrainSample
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.learner.trainer import POLICY, batch_shape
from rl.trajectory import FinishReason, Trajectory

GROUP = 4  # responses to a prompt, which fill a row
REMATS = ("layer", "dots")


def samples(size: Size) -> list[TrainSample]:
    """Return random responses, a group to a row, with advantages that sum to 0."""
    rng, made = np.random.default_rng(0), []
    P = size.row_tokens // 16
    n = (size.row_tokens - P + 1) // GROUP
    for g in range(size.train_rows):
        prompt_ids = rng.integers(0, size.model.vocab_size, P).astype(np.int32)
        for i in range(GROUP):
            logprobs = np.full(n, -np.log(size.model.vocab_size), np.float32)
            trajectory = Trajectory(
                request_id=g * GROUP + i,
                group_id=g,
                sample_index=i,
                prompt_ids=prompt_ids,
                response_ids=rng.integers(0, size.model.vocab_size, n).astype(np.int32),
                logprobs=logprobs,
                policy_versions=np.zeros(n, np.int32),
                origins=np.zeros(n, np.uint8),
                finish_reason=FinishReason.LENGTH,
                reward=float(i % 2),
                emission_logprobs=logprobs,
            )
            made.append(TrainSample(trajectory, 1.0 if i % 2 else -1.0))
    return made


def operations(model: ModelConfig, of: list[TrainSample], used_positions: int) -> float:
    """Return the operations of a step, those of the formula above; each group lies in one row."""
    head = model.vocab_size * model.d_model
    groups = {s.trajectory.group_id: len(s.trajectory.prompt_ids) - 1 for s in of}
    pairs = sum(p * (p + 1) / 2 for p in groups.values())
    for s in of:
        n = s.trajectory.num_tokens
        pairs += n * groups[s.trajectory.group_id] + n * (n + 1) / 2
    responses = sum(s.trajectory.num_tokens for s in of)
    products = (num_weights(model) - head) * used_positions + head * responses
    return 6.0 * products + 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs


class Bench:
    """A training state and its micro-batches, which the steps of all recipes share."""

    def __init__(self, size: Size) -> None:
        self.size, self.samples = size, samples(size)
        self.recipes = {remat: self.recipe(remat) for remat in REMATS}
        self.packed: list[Packed] = micro_batches.micro_batches(
            self.samples, batch_shape(self.recipes["layer"], size.row_tokens)
        )
        self.batches = [place(p.batch) for p in self.packed]
        recipe = self.recipes["layer"]
        optimizer = make_optimizer(recipe.optimizer, recipe.total_steps)
        weights = random_weights(size.model, "float32")
        self.state: TrainState = init_state(weights, optimizer)
        self.norm = float("nan")

    def recipe(self, remat: str) -> TrainSpec:
        tokens = self.size.row_tokens * self.size.train_rows
        settings: Any = {"compute_dtype": self.size.dtype, "micro_batch_tokens": tokens}
        return TrainSpec(self.size.model, trainer=TrainerConfig(remat=remat, **settings))

    def step(self, remat: str, commit: bool = True) -> jax.Array:
        """Make a step; returns the norm of its gradient, and keeps the new state."""
        static: Any = {"network": POLICY, "recipe": self.recipes[remat]}
        tokens = sum(s.trajectory.num_tokens for s in self.samples)
        aggregation = self.recipes[remat].algorithm.resolved.aggregation
        limits = sum(s.sampling.max_new_tokens for s in self.samples)
        normaliser = normaliser_of(tokens, len(self.samples), aggregation, limits)
        scalars = StepScalars(np.float32(normaliser), np.float32(tokens), np.bool_(True))
        total = start(**static)
        for batch in self.batches:
            total, _ = accumulate(self.state.params, total, batch, scalars, **static)
        report = inspect(total, self.state.step, **static)
        self.state = apply(self.state, total.gradients, np.bool_(commit), **static)
        jax.block_until_ready(self.state)
        return report.grad_norm


def rows(size: Size) -> Rows:
    bench = Bench(size)
    norms = {remat: float(bench.step(remat, commit=False)) for remat in REMATS}
    kinds = {remat: partial(timed, partial(bench.step, remat)) for remat in REMATS}
    seconds, device = in_turns(kinds, size.repeats), accelerator()
    used = sum(p.used_positions for p in bench.packed)
    needed = operations(size.model, bench.samples, used)
    for remat, taken_T in seconds.items():
        row: Row = {"remat": remat, "row_tokens": size.row_tokens, "rows": size.train_rows}
        row |= {"tokens": used, "responses": len(bench.samples)}
        row |= summary(taken_T, seconds["layer"], "to_layer")
        median_s = float(np.median(taken_T))
        row["tokens_per_s"] = round(used / median_s, 1)
        row["operations"] = needed
        row["flops_utilisation"] = (
            None if device is None else round(needed / median_s / device.operations_per_s, 4)
        )
        row["gradient_norm"] = norms[remat]
        yield row
