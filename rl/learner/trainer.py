"""One batch of trajectories becomes optimizer steps: score, accumulate, check, apply.

Invariants: an update that is not finite is never applied; micro-batches add up to
the full batch; after `warm_up` nothing compiles. The jitted steps are named here
and in `rl.learner.logprobs`; a mesh is the caller's (`jax.set_mesh`), with parameters laid
out by `models.sharding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.transformer import Params, param_specs
from rl import packing
from rl.learner import critic, gradient_accumulation, logprobs, losses, micro_batches
from rl.learner.algorithms import AlgorithmConfig
from rl.learner.config import TrainerConfig, TrainSpec
from rl.learner.gradient_accumulation import Accumulator, Health, NonFiniteUpdate, Report
from rl.learner.logprobs import place
from rl.learner.losses import TokenStatistics
from rl.learner.micro_batches import MicroBatch, Packed, TrainSample
from rl.learner.optimizer import TrainState, init_state, learning_rate, make_optimizer, settle
from rl.packing import Shape
from rl.runtime.parallel_compile import OnCompiled, compile_all, unwatched
from rl.trajectory import Trajectory
from spec.config import SamplingConfig
from spec.sampling import Processing

OnPass = Callable[[bool], None]  # whether nothing of the batch is applied yet

__all__ = [
    "NonFiniteUpdate",
    "TrainSpec",
    "TrainState",
    "TrainerConfig",
    "init_state",
    "make_optimizer",
    "update",
]


@partial(jax.jit, static_argnames=("recipe",))
def start(*, recipe: TrainSpec) -> Accumulator:
    """An empty accumulator."""
    nothing = losses.zero_statistics(recipe.algorithm)
    return gradient_accumulation.zeros(param_specs(recipe.model), nothing)


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("accumulator",))
def accumulate(
    params: Params,
    accumulator: Accumulator,
    batch: MicroBatch,
    processing: Processing,
    normaliser: jax.Array,
    unmoved: jax.Array,
    *,
    recipe: TrainSpec,
) -> tuple[Accumulator, Health]:
    """Add a micro-batch's gradient to the accumulator, in float32; compiled once.

    `unmoved`: it is of the first optimizer step of its batch (`losses.loss`).
    """

    def loss_of(params: Params) -> tuple[jax.Array, tuple[TokenStatistics, jax.Array]]:
        logprobs_EM, entropy_EM = logprobs.token_logprobs(params, batch, processing, recipe)
        inputs = batch.inputs
        return losses.loss(recipe.algorithm, logprobs_EM, entropy_EM, inputs, normaliser, unmoved)

    gradients, (statistics, finite_B) = jax.grad(loss_of, has_aux=True)(params)
    specs = param_specs(recipe.model)
    return gradient_accumulation.add(accumulator, gradients, statistics, finite_B, specs)


@partial(jax.jit, static_argnames=("recipe",))
def inspect(accumulator: Accumulator, step: jax.Array, *, recipe: TrainSpec) -> Report:
    """The gradient's norm before clipping, the learning rate to come, and the statistics."""
    lr = learning_rate(recipe.optimizer, recipe.total_steps, step)
    return gradient_accumulation.report(accumulator, lr)


@partial(jax.jit, static_argnames=("recipe",), donate_argnames=("state",))
def apply(
    state: TrainState, gradients: Params, commit: jax.Array, *, recipe: TrainSpec
) -> TrainState:
    """One step of the optimizer; with `commit` False the state as it was (for `warm_up`).

    Of the policy alone: the state is handed in without its critic.
    """
    optimizer = make_optimizer(recipe.optimizer, recipe.total_steps)
    changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    params = gradient_accumulation.laid_out(param_specs(recipe.model), params)
    after = TrainState(state.step + 1, params, opt_state)
    return jax.tree.map(lambda new, old: jnp.where(commit, new, old), after, state)


@partial(jax.jit, static_argnames=("dtype",))
def _cast(params: Params, *, dtype: Any) -> Params:
    return logprobs.cast(params, dtype)


def cast_params(params: Params, dtype: Any) -> Params:
    """A copy in `dtype` for rollouts; the very same tree where all of it has that dtype."""
    if all(p.dtype == dtype for p in jax.tree.leaves(params)):
        return params
    return _cast(params, dtype=jnp.dtype(dtype))


def batch_shape(recipe: TrainSpec, max_tokens: int) -> Shape:
    """The shape of all micro-batches, under the mesh in use.

    `max_tokens` bounds prompt and response together.
    """
    return packing.batch_shape(
        recipe.trainer.micro_batch_tokens, max_tokens, row_multiple=logprobs.batch_ways()
    )


def warm_up(
    state: TrainState, shape: Shape, *, recipe: TrainSpec, told: OnCompiled = unwatched
) -> TrainState:
    """Compile every step, in threads, and run each on nothing.

    Returns the state, unchanged; the one given is donated. `told` hears how many are compiled.
    """
    processing = Processing.of(SamplingConfig())
    scores = recipe.algorithm.needs_reference or recipe.scores_old
    judge, state = state.critic, dataclasses.replace(state, critic=None)
    accumulator = start(recipe=recipe)
    plain = place(micro_batches.empty(shape))
    batch = place(micro_batches.empty(shape, judged=True)) if judge else plain
    rest, no = (processing, np.float32(1), np.bool_(True)), np.bool_(False)
    lowered = [
        inspect.lower(accumulator, state.step, recipe=recipe),
        apply.lower(state, accumulator.gradients, no, recipe=recipe),
        accumulate.lower(state.params, accumulator, batch, *rest, recipe=recipe),
    ]
    if scores:
        lowered += [logprobs.score.lower(state.params, plain, processing, recipe=recipe)]
    if judge:
        lowered += critic.programs(judge, plain, batch, state.step, recipe)
    compile_all(lowered, len(lowered), told)

    # calls find what was compiled; running them once proves it, and settles their buffers
    accumulator, _ = accumulate(state.params, accumulator, batch, *rest, recipe=recipe)
    if scores:
        logprobs.score(state.params, plain, processing, recipe=recipe)
    inspect(accumulator, state.step, recipe=recipe)
    if judge:
        judge = critic.run_once(judge, plain, batch, state.step, recipe)
    state = apply(state, accumulator.gradients, no, recipe=recipe)
    return dataclasses.replace(state, critic=judge)


def update(
    state: TrainState,
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    recipe: TrainSpec,
    shape: Shape,
    sampling: SamplingConfig,
    step: int,
    seed: int = 0,
    reference: Params | None = None,
    on_pass: OnPass = lambda may_leave: None,
    on_skip: Callable[[NonFiniteUpdate], None] = lambda error: None,
) -> tuple[TrainState, dict[str, float]]:
    """All inner updates of one batch of trajectories; one fetch an optimizer step.

    `state` is donated. `step` (the training step) and `seed` order the minibatches.
    Metrics under TRL's names: means over tokens and optimizer steps, `lr` the last.
    A batch without a usable sample changes nothing and gives `batch/*` alone. Samples
    without a gradient (advantage 0, no KL) still count in the loss's divisor, so that the
    update is the same, but no pass is spent on them, and means over tokens lack them. Where no
    sample has a gradient the optimizer makes no step: momentum alone moves nothing. `on_pass` is
    called as passes are done, and told whether nothing is applied yet; what it raises then leaves
    `state` whole. With a critic, `advantages` are not looked at: it makes its own from the rewards.

    Raises NonFiniteUpdate before such an update is applied, where `Trainer.on_nonfinite` does not
    have it skipped: `on_skip` is told then. Raises ValueError where a sample does not fit the
    shape, or a reference or critic is needed and missing.
    """
    algorithm, trainer = recipe.algorithm, recipe.trainer
    samples = micro_batches.select(
        trajectories, advantages, mask_truncated=algorithm.mask_truncated
    )
    leave = partial(on_pass, True)
    samples = with_scores(state.params, samples, shape, sampling, recipe, reference, leave)
    samples, critic_metrics = _judged(state, samples, shape, recipe, leave)
    processing = Processing.of(sampling)
    reports: list[tuple[Report, Report | None]] = []
    packed_all: list[Packed] = []
    used: list[float] = []
    applied = skipped = 0
    for epoch in range(trainer.inner_updates):
        group_ids = [s.trajectory.group_id for s in samples]
        for indices in micro_batches.minibatch_indices(
            group_ids, trainer.minibatches, (seed, step, epoch)
        ):
            part = [samples[i] for i in indices]
            num_tokens = sum(s.trajectory.num_tokens for s in part)
            normaliser = losses.normaliser_of(
                num_tokens,
                len(part),
                algorithm.resolved.aggregation,
                sampling.max_new_tokens,
            )
            moves = any(_moves(s, algorithm) for s in part)
            part = _with_gradient(part, algorithm)
            packed = micro_batches.micro_batches(part, shape)
            where = f"step {step}, optimizer step {len(reports) + skipped + 1} of its batch"
            step_inputs = _StepInputs(
                *(part, packed, normaliser, num_tokens, processing, where),
                unmoved=not applied,
                moves=moves,
            )
            packed_all += packed
            try:
                state, report, judged = _optimizer_step(
                    state, step_inputs, recipe, partial(on_pass, not applied)
                )
            except NonFiniteUpdate as error:
                if trainer.on_nonfinite == "stop":
                    raise
                on_skip(error)
                skipped += 1
                continue
            applied += moves
            reports.append((report, judged))
            used.append(micro_batches.padding_fraction(packed))
    counts = {
        "batch/samples": float(len(samples)),
        "batch/left_out": float(len(trajectories) - len(samples)),
        "batch/optimizer_steps": float(applied),
        "batch/micro_batches": float(len(packed_all)),
        "update/skipped": float(skipped),
        "update/without_gradient": float(len(reports) - applied),
    }
    if not reports:
        return state, counts
    metrics = _combined([report for report, _ in reports]) | counts | critic_metrics
    if judged_reports := [judged for _, judged in reports if judged is not None]:
        metrics |= critic.metrics_of(judged_reports)
    return state, metrics | {"batch/padding": float(np.mean(used))}


def _judged(
    state: TrainState,
    samples: list[TrainSample],
    shape: Shape,
    recipe: TrainSpec,
    on_pass: Callable[[], None],
) -> tuple[list[TrainSample], dict[str, float]]:
    """Samples with what the critic says of them, where the algorithm has one."""
    if not recipe.algorithm.resolved.needs_critic:
        return samples, {}
    if state.critic is None:
        raise ValueError(
            f"{recipe.algorithm.name} needs a critic, got a state without one: "
            "dataclasses.replace(state, critic=rl.learner.critic.init(policy, recipe))"
        )
    return critic.judge(state.critic.params, samples, shape, recipe, on_pass)


def _with_gradient(samples: list[TrainSample], algorithm: AlgorithmConfig) -> list[TrainSample]:
    """The samples that move the policy; all of them where none does, for the statistics."""
    return [s for s in samples if _moves(s, algorithm)] or samples


def _moves(sample: TrainSample, algorithm: AlgorithmConfig) -> bool:
    """Whether a sample has a gradient."""
    has_other_terms = algorithm.needs_reference or algorithm.resolved.needs_critic
    return has_other_terms or bool(sample.advantage)


def with_scores(
    params: Params,
    samples: list[TrainSample],
    shape: Shape,
    sampling: SamplingConfig,
    recipe: TrainSpec,
    reference: Params | None,
    on_pass: Callable[[], None] = logprobs.unwatched,
) -> list[TrainSample]:
    """Samples with the log-probs under reference and current policy that the algorithm asks for.

    A batch of one optimizer step needs no `recomputed` ones: that step has them (`losses.loss`).
    """
    algorithm = recipe.algorithm
    if recipe.scores_old:
        old = logprobs.score_samples(params, samples, shape, sampling, recipe, on_pass)
        samples = [
            dataclasses.replace(s, old_logprobs=x) for s, x in zip(samples, old, strict=True)
        ]
    elif algorithm.resolved.old_logprobs == "emission":
        samples = [
            dataclasses.replace(s, old_logprobs=s.trajectory.emission_logprobs) for s in samples
        ]
    if algorithm.needs_reference:
        if reference is None:
            raise ValueError(
                f"kl_coefficient={algorithm.kl_coefficient} needs a reference policy, got none: "
                "pass reference=params, or set Algorithm.kl_coefficient = 0"
            )
        settled = settle(reference)
        kept = logprobs.score_samples(settled, samples, shape, sampling, recipe, on_pass)
        samples = [
            dataclasses.replace(s, reference_logprobs=x) for s, x in zip(samples, kept, strict=True)
        ]
    return samples


@dataclasses.dataclass(frozen=True)
class _StepInputs:
    """What one optimizer step is made of."""

    samples: Sequence[TrainSample]
    packed: Sequence[Packed]
    normaliser: float
    num_tokens: int
    processing: Processing
    where: str
    unmoved: bool
    moves: bool  # else there is no gradient: nothing is applied


def _optimizer_step(
    state: TrainState, step: _StepInputs, recipe: TrainSpec, on_pass: Callable[[], None]
) -> tuple[TrainState, Report, Report | None]:
    """Accumulate, fetch once, check, apply. Returns the new state and the reports on the host.

    The second report is the critic's; nothing is applied unless both pass the check.
    """
    judge = state.critic
    accumulator, health = start(recipe=recipe), []
    total = critic.start(recipe=recipe) if judge else None
    critic_health: list[Health] = []
    for p in step.packed:
        batch = place(p.batch)
        normaliser = np.float32(step.normaliser)
        accumulator, healthy = accumulate(
            state.params,
            accumulator,
            batch,
            step.processing,
            normaliser,
            np.bool_(step.unmoved),
            recipe=recipe,
        )
        health.append(healthy)
        if judge:
            tokens = np.float32(step.num_tokens)
            total, healthy = critic.accumulate(judge.params, total, batch, tokens, recipe=recipe)
            critic_health.append(healthy)
        logprobs.keep_pace(critic_health or health, on_pass)
    asked = (inspect(accumulator, state.step, recipe=recipe), health)
    also = (critic.inspect(total, state.step, recipe=recipe), critic_health) if judge else None
    (report, health), judged = jax.device_get((asked, also))
    rest = step.samples, step.packed, step.where
    gradient_accumulation.check(state, report, health, *rest)
    if judged:
        gradient_accumulation.check(state, judged[0], judged[1], *rest, whose="critic's ")
    if not step.moves:
        return state, report, None
    yes, policy = np.bool_(True), dataclasses.replace(state, critic=None)
    policy = apply(policy, accumulator.gradients, yes, recipe=recipe)
    if judge and total:
        judge = critic.apply(judge, total.gradients, yes, recipe=recipe)
    return dataclasses.replace(policy, critic=judge), report, judged[0] if judged else None


def _combined(reports: Sequence[Report]) -> dict[str, float]:
    """One set of metrics from all optimizer steps; the mismatch from the first, the unmoved one."""
    metrics = losses.metrics_of(gradient_accumulation.summed(reports))
    first = losses.metrics_of(reports[0].statistics)
    unmoved = {name: first[name] for name in losses.MISMATCH if name in first}
    metrics = {k: v for k, v in metrics.items() if k not in losses.MISMATCH} | unmoved
    metrics["loss"] /= len(reports)
    metrics["grad_norm"] = float(np.mean([r.grad_norm for r in reports]))
    metrics["lr"] = float(reports[-1].lr)
    return metrics
