"""One batch of trajectories becomes optimizer steps: score, accumulate, check, apply.

Invariants: an update that is not finite is never applied; micro-batches add up to
the full batch; after `warm_up` nothing compiles. The jitted steps are named here
and in `rl.scoring`; a mesh is the caller's (`jax.set_mesh`), with parameters laid
out by `models.sharding`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.sharding import constrain
from models.transformer import Params, param_specs
from rl import batching, losses, scoring
from rl.batching import MicroBatch, Packed, Sample, Shape
from rl.losses import AlgorithmConfig, TokenStatistics
from rl.optimizer import TrainState, init_state, learning_rate, make_optimizer, settle
from rl.recipe import Recipe, TrainerConfig
from rl.scoring import Processing, place
from rl.trajectory import Trajectory
from spec.sampling import SamplingConfig

__all__ = ["Recipe", "TrainState", "TrainerConfig", "init_state", "make_optimizer", "update"]


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient that is not finite; its update was not applied.

    `state` is the state before the refused optimizer step, whole and usable;
    `samples` are the names of the samples at fault.
    """

    def __init__(self, message: str, state: TrainState, samples: tuple[str, ...]) -> None:
        super().__init__(message)
        self.state = state
        self.samples = samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Float32 gradients and token statistics of the micro-batches of one optimizer step."""

    gradients: Params
    statistics: TokenStatistics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Health:
    """Whether each row's loss, and the gradient of the micro-batch as a whole, are finite."""

    loss_B: jax.Array
    gradient: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the host looks at before an optimizer step is applied."""

    grad_norm: jax.Array
    lr: jax.Array
    statistics: TokenStatistics


def _laid_out(recipe: Recipe, params: Params) -> Params:
    """Pin a tree shaped like the parameters to the sharding table."""
    return jax.tree.map(lambda spec, p: constrain(p, *spec.axes), param_specs(recipe.model), params)


@partial(jax.jit, static_argnames=("recipe",))
def start(*, recipe: Recipe) -> Accumulator:
    """An empty accumulator."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), param_specs(recipe.model))
    return Accumulator(_laid_out(recipe, zeros), losses.zero_statistics(recipe.algorithm))


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("accumulator",))
def accumulate(
    params: Params,
    accumulator: Accumulator,
    batch: MicroBatch,
    processing: Processing,
    normaliser: jax.Array,
    *,
    recipe: Recipe,
) -> tuple[Accumulator, Health]:
    """Add a micro-batch's gradient to the accumulator, in float32; compiled once."""

    def loss_of(params: Params) -> tuple[jax.Array, tuple[TokenStatistics, jax.Array]]:
        logprobs_EM, entropy_EM = scoring.token_logprobs(params, batch, processing, recipe)
        return losses.loss(recipe.algorithm, logprobs_EM, entropy_EM, batch.inputs, normaliser)

    gradients, (statistics, finite_B) = jax.grad(loss_of, has_aux=True)(params)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    total = jax.tree.map(jnp.add, accumulator.gradients, gradients)
    statistics = losses.add_statistics(accumulator.statistics, statistics)
    return Accumulator(_laid_out(recipe, total), statistics), Health(finite_B, finite)


@partial(jax.jit, static_argnames=("recipe",))
def inspect(accumulator: Accumulator, step: jax.Array, *, recipe: Recipe) -> Report:
    """The gradient's norm before clipping, the learning rate to come, and the statistics."""
    lr = learning_rate(recipe.optimizer, recipe.total_steps, step)
    squares = [jnp.sum(g * g) for g in jax.tree.leaves(accumulator.gradients)]
    return Report(jnp.sqrt(sum(squares)), lr, accumulator.statistics)


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def apply(state: TrainState, gradients: Params, commit: jax.Array, *, recipe: Recipe) -> TrainState:
    """One step of the optimizer; with `commit` False the state as it was (for `warm_up`)."""
    optimizer = make_optimizer(recipe.optimizer, recipe.total_steps)
    changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = _laid_out(recipe, optax.apply_updates(state.params, changes))
    after = TrainState(state.step + 1, params, opt_state)
    return jax.tree.map(lambda new, old: jnp.where(commit, new, old), after, state)


@partial(jax.jit, static_argnames=("dtype",))
def _cast(params: Params, *, dtype: Any) -> Params:
    return scoring.cast(params, dtype)


def cast_params(params: Params, dtype: Any) -> Params:
    """A copy in `dtype` for rollouts; the very same tree where all of it has that dtype."""
    if all(p.dtype == dtype for p in jax.tree.leaves(params)):
        return params
    return _cast(params, dtype=jnp.dtype(dtype))


def batch_shape(recipe: Recipe, max_tokens: int) -> Shape:
    """The shape of all micro-batches, under the mesh in use.

    `max_tokens` bounds prompt and response together.
    """
    return batching.batch_shape(
        recipe.trainer.micro_batch_tokens, max_tokens, row_multiple=scoring.batch_ways()
    )


def warm_up(state: TrainState, shape: Shape, *, recipe: Recipe) -> TrainState:
    """Compile every step, in threads, and run each on nothing.

    Returns the state, unchanged; the one given is donated.
    """
    processing = Processing.of(SamplingConfig())
    algorithm = recipe.algorithm
    scores = algorithm.needs_reference or algorithm.old_logprobs == "recomputed"
    accumulator = start(recipe=recipe)
    batch = place(batching.empty(shape))
    rest = (processing, np.float32(1))
    lowered = [
        inspect.lower(accumulator, state.step, recipe=recipe),
        apply.lower(state, accumulator.gradients, np.bool_(False), recipe=recipe),
        accumulate.lower(state.params, accumulator, batch, *rest, recipe=recipe),
    ]
    if scores:
        lowered += [scoring.score.lower(state.params, batch, processing, recipe=recipe)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda program: program.compile(), lowered))

    # calls find what was compiled; running them once proves it, and settles their buffers
    accumulator, _ = accumulate(state.params, accumulator, batch, *rest, recipe=recipe)
    if scores:
        scoring.score(state.params, batch, processing, recipe=recipe)
    inspect(accumulator, state.step, recipe=recipe)
    return apply(state, accumulator.gradients, np.bool_(False), recipe=recipe)


def update(
    state: TrainState,
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    recipe: Recipe,
    shape: Shape,
    sampling: SamplingConfig,
    step: int,
    seed: int = 0,
    reference: Params | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """All inner updates of one batch of trajectories; one fetch an optimizer step.

    `state` is donated. `step` (the training step) and `seed` order the minibatches.
    Metrics under TRL's names: means over tokens and optimizer steps, `lr` the last.
    A batch without a usable sample changes nothing and gives `batch/*` alone. Samples
    without a gradient (advantage 0, no KL) still count in the loss's divisor, so that the
    update is the same, but no pass is spent on them, and means over tokens lack them.

    Raises NonFiniteUpdate before such an update is applied; ValueError where a
    sample does not fit the shape, or a reference is needed and missing.
    """
    algorithm, trainer = recipe.algorithm, recipe.trainer
    samples = batching.select(trajectories, advantages, mask_truncated=algorithm.mask_truncated)
    samples = with_scores(state.params, samples, shape, sampling, recipe, reference)
    processing = Processing.of(sampling)
    reports: list[Report] = []
    packed_all: list[Packed] = []
    used: list[float] = []
    for epoch in range(trainer.inner_updates):
        group_ids = [s.trajectory.group_id for s in samples]
        for indices in batching.minibatch_indices(
            group_ids, trainer.minibatches, (seed, step, epoch)
        ):
            part = [samples[i] for i in indices]
            num_tokens = sum(s.trajectory.num_tokens for s in part)
            normaliser = losses.normaliser_of(num_tokens, len(part), algorithm.aggregation)
            part = _with_gradient(part, algorithm)
            packed = batching.micro_batches(part, shape)
            where = f"step {step}, optimizer step {len(reports) + 1} of its batch"
            state, report = _optimizer_step(
                state, part, packed, normaliser, processing, recipe, where
            )
            reports.append(report)
            packed_all += packed
            used.append(batching.padding_fraction(packed))
    counts = {
        "batch/samples": float(len(samples)),
        "batch/left_out": float(len(trajectories) - len(samples)),
        "batch/optimizer_steps": float(len(reports)),
        "batch/micro_batches": float(len(packed_all)),
    }
    if not reports:
        return state, counts
    return state, _combined(reports) | counts | {"batch/padding": float(np.mean(used))}


def _with_gradient(samples: list[Sample], algorithm: AlgorithmConfig) -> list[Sample]:
    """The samples that move the policy; all of them where none does, for the statistics."""
    if algorithm.needs_reference:
        return samples
    return [s for s in samples if s.advantage] or samples


def with_scores(
    params: Params,
    samples: list[Sample],
    shape: Shape,
    sampling: SamplingConfig,
    recipe: Recipe,
    reference: Params | None,
) -> list[Sample]:
    """Samples with the log-probs under reference and current policy that the algorithm asks for."""
    algorithm = recipe.algorithm
    if algorithm.old_logprobs == "recomputed":
        old = scoring.score_samples(params, samples, shape, sampling, recipe)
        samples = [
            dataclasses.replace(s, old_logprobs=x) for s, x in zip(samples, old, strict=True)
        ]
    elif algorithm.old_logprobs == "emission":
        samples = [
            dataclasses.replace(s, old_logprobs=s.trajectory.emission_logprobs) for s in samples
        ]
    if algorithm.needs_reference:
        if reference is None:
            raise ValueError(
                f"kl_coefficient={algorithm.kl_coefficient} needs a reference policy, got none: "
                "pass reference=params, or set Algorithm.kl_coefficient = 0"
            )
        kept = scoring.score_samples(settle(reference), samples, shape, sampling, recipe)
        samples = [
            dataclasses.replace(s, reference_logprobs=x) for s, x in zip(samples, kept, strict=True)
        ]
    return samples


def _optimizer_step(
    state: TrainState,
    samples: Sequence[Sample],
    packed: Sequence[Packed],
    normaliser: float,
    processing: Processing,
    recipe: Recipe,
    where: str,
) -> tuple[TrainState, Report]:
    """Accumulate, fetch once, check, apply. Returns the new state and the report on the host."""
    accumulator, health = start(recipe=recipe), []
    for p in packed:
        accumulator, healthy = accumulate(
            state.params,
            accumulator,
            place(p.batch),
            processing,
            np.float32(normaliser),
            recipe=recipe,
        )
        health.append(healthy)
    report, health = jax.device_get((inspect(accumulator, state.step, recipe=recipe), health))
    _check(state, report, health, samples, packed, where)
    return apply(state, accumulator.gradients, np.bool_(True), recipe=recipe), report


def _check(
    state: TrainState,
    report: Report,
    health: Sequence[Health],
    samples: Sequence[Sample],
    packed: Sequence[Packed],
    where: str,
) -> None:
    """Raises NonFiniteUpdate, naming the fewest samples that can be at fault."""
    pairs = list(zip(packed, health, strict=True))
    bad = [i for p, h in pairs for i, ok in zip(p.sample_indices, h.loss_B, strict=False) if not ok]
    what = "the loss"
    if not bad:
        if np.isfinite(report.grad_norm) and np.isfinite(report.statistics.sums["loss"]):
            return
        what = f"the gradient (norm {report.grad_norm})"
        bad = [i for p, h in pairs if not h.gradient for i in p.sample_indices]
        bad = bad or list(range(len(samples)))
    names = tuple(samples[i].name for i in sorted(bad))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise NonFiniteUpdate(
        f"{where}: {what} is not finite in {len(names)} of {len(samples)} samples: {shown}. "
        "The update was not applied. Look at these samples' log-probs and rewards; a lower "
        "Optimizer.learning_rate often helps",
        state,
        names,
    )


def _combined(reports: Sequence[Report]) -> dict[str, float]:
    """One set of metrics from all optimizer steps; the mismatch from the first, the unmoved one."""
    total = reports[0].statistics
    for report in reports[1:]:
        total = TokenStatistics(
            {name: total.sums[name] + value for name, value in report.statistics.sums.items()},
            {n: np.maximum(total.maxima[n], v) for n, v in report.statistics.maxima.items()},
        )
    metrics = losses.metrics_of(total)
    first = losses.metrics_of(reports[0].statistics)
    metrics |= {name: first[name] for name in losses.MISMATCH}
    metrics["loss"] /= len(reports)
    metrics["grad_norm"] = float(np.mean([r.grad_norm for r in reports]))
    metrics["lr"] = float(reports[-1].lr)
    return metrics
