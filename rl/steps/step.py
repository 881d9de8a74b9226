"""A training step (generate, score, compare, update) and its record for the run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from reprise.rl.assembly.system import System
from reprise.rl.exchange.responses import without_failed_groups
from reprise.rl.learner import trainer
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.losses.advantages import (
    RewardPart,
    overlong_penalties,
    response_advantages,
    reward_statistics,
)
from reprise.rl.metrics.step_metrics import sample_rows, step_metrics
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.rewards.scores import Score
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.eval_sets import task_names
from reprise.rl.steps.learning_checks import check_failures, compared_groups, missing_signal
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import Rollouts, generate
from reprise.rl.warm_up.step_seconds import at_its_pace


@dataclasses.dataclass(frozen=True, eq=False)
class StepRecord:
    """One step as the run folder records it: a row of metrics, and its samples.

    `missing` says why the rewards of the step taught nothing; None if they taught something.
    """

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    stats: EngineStats
    missing: str | None = None


def train_step(
    system: System,
    state: TrainState,
    position: RunPosition,
    timings: Timings,
    rollouts_of: Callable[..., Rollouts] = generate,
) -> tuple[TrainState, RunPosition, StepRecord]:
    """Run one step: generate, score, compare, update.

    Returns the new state (the old state is donated), the position after the step, and its record.
    """
    step = position.step + 1
    rollouts = rollouts_of(system, state.params, position.cursor, step, timings)
    check_failures(system.config, system.show.message, rollouts.scores, step)
    group_ids = compared_groups(system.config, rollouts.trajectories)
    used = rollouts.used
    trajectories = without_failed_groups(rollouts.trajectories, rollouts.scores, group_ids)
    trajectories, penalties = punish_length(system.config, trajectories)
    parts = list[RewardPart]()
    if system.config.algorithm.resolved.advantages == "group_by_reward":
        parts = reward_parts(system.config, rollouts.scores, trajectories)
    missing = missing_signal(system.config, trajectories, group_ids, used, parts)
    with timings.section("update"):
        trajectories, kl = _subtract_kl(system, trajectories)
        advantages, rewards = _advantages(system.config, rollouts, trajectories, parts)
        state, updates = trainer.update(
            state,
            [t for t, use in zip(trajectories, used, strict=True) if use],
            advantages[used],
            step,
            system.learner,
            on_pass=system.leave_update_if_stopped,
            on_skip=lambda error: system.show.message(f"warning: skipped: {error}"),
        )
    system.reuse.after_update(updates)
    record = dataclasses.replace(_record(system, rollouts, advantages, step), missing=missing)
    tokens = position.num_tokens + int(record.metrics.pop("rollout_tokens"))
    record.metrics.update(rollouts.metrics | rewards | penalties | updates | kl)
    return state, RunPosition(step, tokens, rollouts.cursor), record


def _record(system: System, rollouts: Rollouts, advantages: np.ndarray, step: int) -> StepRecord:
    stats = rollouts.stats
    times = system.speculation.times_now
    if not system.config.speculation.enabled:
        times = None  # without speculation, the table would only price reuse
    if times is not None:
        times = at_its_pace(stats.timeline, times)
    names = {spec: name for name, spec in task_names(system.config.task)}
    specs = [rollouts.prompts.examples[t.group_id].spec for t in rollouts.trajectories]
    tasks = [names[spec] for spec in specs] if len(names) > 1 else ()
    row = step_metrics(rollouts.trajectories, rollouts.scores, stats, step, times, tasks)
    samples = sample_rows(
        system.inputs.tokenizer,
        rollouts.prompts.examples,
        rollouts.trajectories,
        rollouts.completions,
        rollouts.scores,
        None if system.config.algorithm.resolved.needs_critic else advantages,
    )
    return StepRecord(row, samples, stats)


def punish_length(
    config: TrainConfig, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return trajectories with any length penalty in their rewards, and its mean as a metric."""
    limits = [(t.sampling or config.sampling).max_new_tokens for t in trajectories]
    buffers = [config.algorithm.overlong_tokens(limit) for limit in limits]
    if not any(buffers):
        return list(trajectories), {}
    lengths = [t.longest_turn_tokens for t in trajectories]
    penalties = overlong_penalties(lengths, limits, buffers)
    punished = [
        t if t.reward is None else dataclasses.replace(t, reward=t.reward + float(penalty))
        for t, penalty in zip(trajectories, penalties, strict=True)
    ]
    return punished, {"reward/overlong_penalty": float(penalties.mean())}


def _subtract_kl(
    system: System, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return trajectories with any KL penalty in their rewards, and metrics of the KL.

    R_i = r_i − β · Σ_t (log π(y_t) − log π_ref(y_t)), with π as the engine drew y. A critic
    subtracts the penalty token by token (`rl.learner.critic`).
    """
    algorithm = system.config.algorithm
    if not algorithm.kl_in_reward or algorithm.resolved.needs_critic:
        return list(trajectories), {}
    leave = partial(system.leave_update_if_stopped, True)
    written = [t for t in trajectories if t.num_tokens]  # not failed before the first turn
    kl = trainer.token_kl(written, system.learner, leave)
    found = iter([float(kl_T.sum(dtype=np.float64)) for kl_T in kl])
    sums = [next(found) if t.num_tokens else 0.0 for t in trajectories]
    penalised = [
        t
        if t.reward is None
        else dataclasses.replace(t, reward=t.reward - algorithm.kl_coefficient * total)
        for t, total in zip(trajectories, sums, strict=True)
    ]
    num_tokens = max(sum(map(len, kl)), 1)
    return penalised, {"kl": sum(sums) / num_tokens}


def _advantages(
    config: TrainConfig,
    rollouts: Rollouts,
    trajectories: Sequence[Trajectory],
    parts: Sequence[RewardPart],
) -> tuple[np.ndarray, dict[str, float]]:
    """Return advantages, 0 for responses that are not trained on, and statistics of the rewards.

    Advantages include the penalties in `trajectories`; statistics use the rewards as scored.
    """
    algorithm = config.algorithm.resolved
    group_ids = [t.group_id for t in trajectories]
    advantages = response_advantages(
        [t.reward for t in trajectories],
        group_ids,
        algorithm.advantages,
        algorithm.advantage_normalisation,
        parts,
    )
    advantages[~rollouts.used] = 0
    return advantages, reward_statistics([s.total for s in rollouts.scores], group_ids)


def reward_parts(
    config: TrainConfig, scores: Sequence[Score], trajectories: Sequence[Trajectory]
) -> list[RewardPart]:
    """Return the values of each reward function by response, and the penalties as a last part.

    A failed response with a reward (`Reward.on_failure` is `zero`) has 0 everywhere.
    """
    parts = []
    for name, weight in zip(config.reward.names, config.reward.full_weights, strict=True):
        values = [0.0 if score.failure else score.values.get(name) for score in scores]
        parts.append(RewardPart(weight, values))
    pairs = zip(trajectories, scores, strict=True)
    penalties = [(t.reward or 0.0) - (score.total or 0.0) for t, score in pairs]
    return [*parts, RewardPart(1.0, penalties)]


def speed_metrics(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    """Return timing metrics, which `metrics.writer.deterministic_view` recognizes by name."""
    total = sum(seconds.values())
    tokens = row.get("completions/mean_length", 0.0) * row["completions/count"]
    speed = {"step_time": total, "perf/throughput": tokens / total}
    if "time/rollout" in seconds:  # a pipeline only waits for rollouts
        speed["perf/rollout_tokens_per_s"] = tokens / max(seconds["time/rollout"], 1e-9)
    return seconds | speed
