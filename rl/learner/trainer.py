"""Optimizer steps on one batch of trajectories: log-probs, accumulate, check, apply.

Invariants: an update that is not finite is never applied; micro-batches add up to the full batch;
nothing compiles after `first_run`. The caller sets a mesh (`jax.set_mesh`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from reprise.models.config import trained_specs, with_adapters
from reprise.models.decoder.row_attention import segment_tokens
from reprise.models.decoder.transformer import Params
from reprise.models.sharding import ways_in_use
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import MicroBatch, Packed, TrainSample
from reprise.rl.learner import critic, gradient_accumulation, logprobs
from reprise.rl.learner.config import TrainSpec
from reprise.rl.learner.critic import CRITIC
from reprise.rl.learner.gradient_accumulation import (
    Call,
    Health,
    Network,
    NonFiniteUpdate,
    NonFiniteWeights,
    Report,
    StepScalars,
    accumulate,
    all_finite,
    apply,
    inspect,
    join,
    start,
)
from reprise.rl.learner.logprobs import place, placed_shapes
from reprise.rl.learner.optimizer import TrainState, settle
from reprise.rl.losses import losses
from reprise.rl.records import packing
from reprise.rl.records.packing import Shape
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.runtime.devices import in_turn
from reprise.spec.config import SamplingConfig

if TYPE_CHECKING:
    from reprise.rl.learner.distillation import Teacher

OnPass = Callable[[bool], None]  # argument: whether no update of the batch is applied yet


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """The settings that all updates of a run share; `seed` orders their minibatches.

    `sampling` applies to responses without a sampling; `reference` is the policy of the KL term.
    `base` holds the frozen weights of a policy that trains only an adapter; `teacher` scores the
    tokens of distillation.
    """

    recipe: TrainSpec
    shape: Shape
    sampling: SamplingConfig
    seed: int = 0
    reference: Params | None = None
    base: Params | None = None
    teacher: Teacher | None = None

    def policy(self, trained: Params, dtype: Any = None) -> Params:
        """Return the policy with these trained weights; an adapter is rounded to `dtype`."""
        if self.base is not None and dtype is not None:
            trained = cast_params(trained, dtype)
        return policy_of(trained, self.base, self.recipe)


def policy_of(trained: Params, base: Params | None, recipe: TrainSpec) -> Params:
    lora = recipe.model.lora
    return trained if base is None or lora is None else with_adapters(base, trained, lora)


def _frozen(network: Network, base: Params | None) -> Params | None:
    """Return the frozen weights that the trained weights of a network adapt."""
    return base if network is POLICY else None


def _loss(
    trained: Params,
    base: Params | None,
    batch: MicroBatch,
    scalars: StepScalars,
    recipe: TrainSpec,
) -> Any:
    params = policy_of(trained, base, recipe)
    result_EM = logprobs.logprobs_and_entropy(params, batch, recipe)
    loss, (statistics, finite_B) = losses.loss(
        recipe.algorithm, *result_EM, batch.inputs, scalars.normaliser, scalars.unmoved
    )
    return loss, (statistics, finite_B, None)


POLICY = Network(
    trained_specs,
    _loss,
    lambda recipe: recipe.optimizer,
    lambda recipe: losses.zero_statistics(recipe.algorithm),
)


@partial(jax.jit, static_argnames=("dtype",))
def _cast(params: Params, *, dtype: Any) -> Params:
    return logprobs.cast(params, dtype)


def cast_params(params: Params, dtype: Any) -> Params:
    """Return a copy in `dtype` for rollouts, or the same tree if all its arrays have that dtype."""
    if all(p.dtype == dtype for p in jax.tree.leaves(params)):
        return params
    return _cast(params, dtype=jnp.dtype(dtype))


def cast_call(params: Params, dtype: Any) -> Call:
    """Return the call that `cast_params` makes for parameters of another dtype."""
    return Call(_cast, (params,), {"dtype": jnp.dtype(dtype)})


def batch_shape(recipe: TrainSpec, max_tokens: int) -> Shape:
    """Return the shape of all micro-batches, for prompts and responses of up to `max_tokens`."""
    return packing.batch_shape(
        recipe.trainer.positions_of_micro_batch,
        max_tokens,
        row_multiple=logprobs.batch_ways(),
        copies=ways_in_use("copies"),
        block=segment_tokens(),
    )


def lowered(state: TrainState, learner: Learner) -> list[Any]:
    """Return all steps, lowered for the caller to compile, the largest first."""
    return [call.lower() for call in calls(state, learner)]


def calls(state: TrainState, learner: Learner) -> list[Call]:
    """Return the calls of all steps on an empty batch, the largest first.

    The arrays of the state may be shapes.
    """
    static = {"recipe": learner.recipe}
    plain, batch, scalars, step = _nothing(state, learner, placed_shapes)
    every = []
    for network, trained in _networks(state):
        frozen = _frozen(network, learner.base)
        every += gradient_accumulation.calls(
            trained, batch, scalars, step, frozen, network=network, **static
        )
    for params, recipe in _scored(state.params, learner, shapes_in):
        every.append(Call(logprobs.token_logprobs, (params, plain), {"recipe": recipe}))
    if state.critic:
        every.append(Call(critic.token_values, (state.critic.params, plain), static))
    return every


def first_run(state: TrainState, learner: Learner) -> TrainState:
    """Run every compiled step on an empty batch; the state is donated, and returned unchanged."""
    plain, batch, scalars, step = _nothing(state, learner)
    for params, recipe in _scored(state.params, learner, cast_params):
        in_turn(logprobs.token_logprobs(params, plain, recipe=recipe))
    if state.critic:
        in_turn(critic.token_values(state.critic.params, plain, recipe=learner.recipe))
    unchanged = [  # the policy last: the critic reads its step before it is donated
        gradient_accumulation.run_once(
            trained,
            batch,
            scalars,
            step,
            _frozen(network, learner.base),
            network=network,
            recipe=learner.recipe,
        )
        for network, trained in reversed(_networks(state))
    ]
    return _joined(unchanged[::-1])


def _scored(
    trained: Params, learner: Learner, cast: Callable[[Params, Any], Params]
) -> list[tuple[Any, TrainSpec]]:
    """Return the policies that score samples: before the updates, the reference, the teacher."""
    recipe = learner.recipe
    base = learner.base
    policies = list[tuple[Any, TrainSpec]]()
    if recipe.recomputes_old:
        policies.append((policy_of(trained, base, recipe), recipe))
    has_same_form = policies and base is None and recipe.trainer.dtype == jnp.float32
    if recipe.algorithm.needs_reference and not has_same_form:
        policies.append((cast(trained, recipe.trainer.dtype) if base is None else base, recipe))
    if learner.teacher is not None:
        policies.append((learner.teacher.params, learner.teacher.recipe))
    return policies


def shapes_in(params: Params, dtype: Any) -> Params:
    """Return the shapes of the result of `cast_params`."""

    def one(p: Any) -> jax.ShapeDtypeStruct:
        where = p.sharding if isinstance(p.sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(p.shape, dtype, sharding=where)

    return jax.tree.map(one, params)


def _nothing(
    state: TrainState, learner: Learner, place: Callable[[Any], Any] = place
) -> tuple[MicroBatch, MicroBatch, StepScalars, Any]:
    """Return an empty batch for scoring, another for updates, and the other step arguments."""
    scalars = StepScalars(np.float32(1), np.float32(1), np.bool_(True))
    plain = place(micro_batches.empty(learner.shape))
    batch = plain
    if learner.recipe.has_token_advantages:
        with_critic = state.critic is not None
        batch = place(micro_batches.empty(learner.shape, by_token=True, with_critic=with_critic))
    return plain, batch, scalars, state.step


def _networks(state: TrainState) -> list[tuple[Network, Any]]:
    """Return the trained networks with their states."""
    policy = (POLICY, dataclasses.replace(state, critic=None))
    return [policy, (CRITIC, state.critic)] if state.critic else [policy]


def _joined(states: Sequence[Any]) -> TrainState:
    """Join the states of all networks: the inverse of `_networks`."""
    policy, *others = states
    return dataclasses.replace(policy, critic=others[0] if others else None)


def check_weights(state: TrainState, what: str) -> None:
    """Raise NonFiniteWeights unless all weights of policy and critic are finite."""
    for network, trained in _networks(state):
        if not in_turn(all_finite(trained.params)):
            whose = "the critic" if network is CRITIC else "the policy"
            raise NonFiniteWeights(f"{what}: weights of {whose} are not finite")


def update(
    state: TrainState,
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    step: int,
    learner: Learner,
    *,
    on_pass: OnPass = lambda may_leave: None,
    on_skip: Callable[[NonFiniteUpdate], None] = lambda error: None,
) -> tuple[TrainState, dict[str, float]]:
    """Run all inner updates on one batch of trajectories, with one fetch per optimizer step.

    `state` is donated. `step` (the training step) and `Learner.seed` order the minibatches. Metrics
    have TRL's names: means over tokens and optimizer steps, with `lr` of the last step. Samples
    without a gradient (advantage 0, no other term) count in the divisor of the loss, but no pass is
    spent on them: ratios and `batch/entropy` are means over the other samples. If no sample has a
    gradient, the optimizer takes no step. `on_pass` is called after passes, with whether nothing is
    applied yet: if so, an error that it raises leaves `state` intact. With a critic, `advantages`
    are not used.

    Raises NonFiniteUpdate before such an update is applied, or calls `on_skip`
    (`Trainer.on_nonfinite`). Raises ValueError if a sample does not fit the shape, or a reference
    or critic is missing.
    """
    recipe = learner.recipe
    masks = {"mask_truncated": recipe.algorithm.mask_truncated}
    samples = micro_batches.select(trajectories, advantages, learner.sampling, **masks)
    leave = partial(on_pass, True)
    samples = with_logprobs(learner.policy(state.params), samples, learner, leave)
    distill = recipe.distill
    taught = None
    if distill.enabled:
        from reprise.rl.learner import distillation

        taught = distillation.score(learner.teacher, samples, learner.shape, leave)
    other_metrics = dict[str, float]()
    if recipe.algorithm.resolved.needs_critic:
        samples, other_metrics = _with_critic_targets(state, samples, learner, leave)
    if taught is not None:
        other_metrics |= taught.metrics(samples)
        samples = taught.added_to(samples, distill)
    steps: list[tuple[_StepInputs, list[Report]]] = []
    applied = skipped = num_micro_batches = 0
    for number, part in enumerate(_minibatches(samples, step, learner), start=1):
        where = f"step {step}, optimizer step {number} of its batch"
        inputs = _StepInputs.of(part, learner, where, unmoved=not applied)
        num_micro_batches += len(inputs.packed)
        try:
            leave = partial(on_pass, not applied)
            state, reports = _optimizer_step(state, inputs, learner, leave)
        except NonFiniteUpdate as error:
            if recipe.trainer.on_nonfinite == "stop":
                raise
            on_skip(error)
            skipped += 1
            continue
        applied += inputs.moves
        steps.append((inputs, reports))
    # the mean of −log p over all drawn tokens is an unbiased estimate of the mean entropy; the
    # exact entropy would take a pass over responses without a gradient
    total = sum([t.logprobs.sum(dtype=np.float64) for t in trajectories])
    num_tokens = sum([len(t.logprobs) for t in trajectories])
    counts = {
        "entropy": -float(total) / max(num_tokens, 1),
        "batch/samples": float(len(samples)),
        "batch/left_out": float(len(trajectories) - len(samples)),
        "batch/optimizer_steps": float(applied),
        "batch/micro_batches": float(num_micro_batches),
        "update/skipped": float(skipped),
        "update/without_gradient": float(max(len(steps), not samples) - applied),
    }
    return state, _metrics(steps, counts, other_metrics) if steps else counts


def _minibatches(
    samples: Sequence[TrainSample], step: int, learner: Learner
) -> Iterator[list[TrainSample]]:
    """Yield the samples of each optimizer step of a batch, in order."""
    trainer = learner.recipe.trainer
    group_ids = [s.trajectory.group_id for s in samples]
    for epoch in range(trainer.inner_updates):
        seed = (learner.seed, step, epoch)
        for indices in micro_batches.minibatch_indices(group_ids, trainer.minibatches, seed):
            yield [samples[i] for i in indices]


def _with_critic_targets(
    state: TrainState, samples: list[TrainSample], learner: Learner, on_pass: Callable[[], None]
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return samples with targets of the critic, and its metrics."""
    if state.critic is None:
        raise ValueError(
            f"{learner.recipe.algorithm.name} needs a critic, got a state without one: "
            "dataclasses.replace(state, critic=rl.learner.critic.init(policy, recipe))"
        )
    return critic.evaluate(state.critic.params, samples, learner.shape, learner.recipe, on_pass)


def with_logprobs(
    params: Params,
    samples: list[TrainSample],
    learner: Learner,
    on_pass: Callable[[], None] = logprobs.unwatched,
) -> list[TrainSample]:
    """Return samples with the log-probs under reference and old policy that the algorithm needs."""
    algorithm = learner.recipe.algorithm

    def under(params: Params) -> list[np.ndarray]:
        return logprobs.sample_logprobs(params, samples, learner.shape, learner.recipe, on_pass)

    old: Sequence[np.ndarray | None] = [None] * len(samples)
    if learner.recipe.recomputes_old:
        old = under(params)
    elif algorithm.resolved.old_logprobs == "emission":
        old = [s.trajectory.emission_logprobs for s in samples]
    reference: Sequence[np.ndarray | None] = [None] * len(samples)
    in_targets = algorithm.kl_in_reward and algorithm.resolved.needs_critic
    if algorithm.has_kl_loss or in_targets:
        reference = under(_reference(learner))
    return [
        dataclasses.replace(s, old_logprobs=x, reference_logprobs=y)
        for s, x, y in zip(samples, old, reference, strict=True)
    ]


def token_kl(
    trajectories: Sequence[Trajectory],
    learner: Learner,
    on_pass: Callable[[], None] = logprobs.unwatched,
) -> list[np.ndarray]:
    """Return log π − log π_ref of all response tokens, with π as in the rollout; float32."""
    samples = [TrainSample(t, 0.0, t.sampling or learner.sampling) for t in trajectories]
    reference = logprobs.sample_logprobs(
        _reference(learner), samples, learner.shape, learner.recipe, on_pass
    )
    return [t.logprobs - r for t, r in zip(trajectories, reference, strict=True)]


def _reference(learner: Learner) -> Params:
    if learner.reference is None:
        raise ValueError(
            f"kl_coefficient={learner.recipe.algorithm.kl_coefficient} needs a reference policy, "
            "got none: pass reference=params, or set Algorithm.kl_coefficient = 0"
        )
    return settle(learner.reference)


@dataclasses.dataclass(frozen=True)
class _StepInputs:
    """One optimizer step: the packed micro-batches of its samples, and the scalars of its losses.

    `num_tokens` counts the tokens of all its responses, including responses that are left out
    because they have no gradient. Without `moves` no sample has a gradient, and nothing is applied.
    """

    samples: Sequence[TrainSample]
    packed: Sequence[Packed]
    scalars: StepScalars
    where: str
    moves: bool
    num_tokens: int

    @classmethod
    def of(
        cls, samples: list[TrainSample], learner: Learner, where: str, *, unmoved: bool
    ) -> _StepInputs:
        """Pack the samples that have a gradient; all samples count in the normaliser."""
        algorithm = learner.recipe.algorithm
        num_tokens = sum([len(s.trajectory.response_ids) for s in samples])
        aggregation = algorithm.resolved.aggregation
        limit_tokens = sum([s.sampling.max_new_tokens for s in samples])
        divisor = losses.normaliser_of(num_tokens, len(samples), aggregation, limit_tokens)
        scalars = StepScalars(np.float32(divisor), np.float32(num_tokens), np.bool_(unmoved))
        moves_all = learner.recipe.moves_every_sample
        moving = [s for s in samples if moves_all or s.advantage]
        used = moving or samples  # for the statistics
        assert learner.shape.copies == ways_in_use("copies"), "micro-batches of another mesh"
        packed = micro_batches.micro_batches(used, learner.shape)
        return cls(used, packed, scalars, where, bool(moving), num_tokens)


def _optimizer_step(
    state: TrainState, inputs: _StepInputs, learner: Learner, on_pass: Callable[[], None]
) -> tuple[TrainState, list[Report]]:
    """Accumulate, fetch once, check all networks and apply.

    Returns the state and a report per network; without an update, only the report of the policy.
    """
    recipe = learner.recipe
    networks = _networks(state)
    totals = [start(network=network, recipe=recipe) for network, _ in networks]
    health: list[list[Health]] = [[] for _ in networks]
    for p in inputs.packed:
        batch = place(p.batch)
        for n, (network, trained) in enumerate(networks):
            frozen = _frozen(network, learner.base)
            totals[n], healthy = in_turn(
                accumulate(
                    trained.params,
                    totals[n],
                    batch,
                    inputs.scalars,
                    frozen,
                    network=network,
                    recipe=recipe,
                )
            )
            health[n].append(healthy)
        logprobs.keep_pace(health[-1], on_pass)
    totals = [in_turn(join(total)) for total in totals]
    reported = [
        in_turn(inspect(total, state.step, network=network, recipe=recipe))
        for total, (network, _) in zip(totals, networks, strict=True)
    ]
    reports, health = jax.device_get((reported, health))
    for (network, _), report, healthy in zip(networks, reports, health, strict=True):
        whose = "critic's " if network is CRITIC else ""
        gradient_accumulation.check(
            state, report, healthy, inputs.samples, inputs.packed, inputs.where, whose=whose
        )
    if not inputs.moves:
        return state, reports[:1]
    after = [
        in_turn(apply(trained, total.gradients, np.bool_(True), network=network, recipe=recipe))
        for total, (network, trained) in zip(totals, networks, strict=True)
    ]
    return _joined(after), reports


def _metrics(
    steps: Sequence[tuple[_StepInputs, list[Report]]],
    counts: dict[str, float],
    other_metrics: dict[str, float],
) -> dict[str, float]:
    """Return the metrics of all optimizer steps; mismatch metrics are of the first step only."""
    reports = [reports_N[0] for _, reports_N in steps]
    num_tokens = sum(inputs.num_tokens for inputs, _ in steps)
    metrics = losses.metrics_of(gradient_accumulation.summed(reports), num_tokens)
    first = losses.metrics_of(reports[0].statistics)
    unmoved = {name: first[name] for name in losses.MISMATCH if name in first}
    metrics = {k: v for k, v in metrics.items() if k not in losses.MISMATCH} | unmoved
    metrics["loss"] /= len(reports)
    metrics["grad_norm"] = float(np.mean([r.grad_norm for r in reports]))
    metrics["lr"] = float(reports[-1].lr)
    metrics |= counts | other_metrics
    if critic_reports := [reports_N[1] for _, reports_N in steps if len(reports_N) > 1]:
        metrics |= critic.metrics_of(critic_reports)
    padding = [micro_batches.padding_fraction(inputs.packed) for inputs, _ in steps]
    return metrics | {"batch/padding": float(np.mean(padding))}
