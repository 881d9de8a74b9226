"""One step: generate, score, compare, update; and its record for the run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.config import TrainConfig
from rl.engine.stats import EngineStats
from rl.eval_sets import task_names
from rl.learner import trainer
from rl.learner.advantages import overlong_penalties, response_advantages, reward_statistics
from rl.learner.optimizer import TrainState
from rl.metrics.step_metrics import sample_rows, step_metrics
from rl.metrics.writer import Timings
from rl.responses import report_failures
from rl.rollouts import Rollouts, generate
from rl.run_checkpoint import RunPosition
from rl.system import System
from rl.trajectory import Trajectory
from rl.warm_up.step_seconds import at_its_pace


@dataclasses.dataclass(frozen=True, eq=False)
class StepRecord:
    """One step as the run folder records it: a row of metrics, and its samples."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    stats: EngineStats


def train_step(
    system: System,
    state: TrainState,
    position: RunPosition,
    timings: Timings,
    rollouts_of: Callable[..., Rollouts] = generate,
) -> tuple[TrainState, RunPosition, StepRecord]:
    """One step: generate, score, compare, update.

    Returns the new state (the old one is donated), the position after the step, and its record.
    """
    step = position.step + 1
    rollouts = rollouts_of(system, state.params, position.cursor, step, timings)
    report_failures(system.show, rollouts.scores, step)
    trajectories, penalties = punish_length(system.config, rollouts.trajectories)
    advantages, rewards = _advantages(system.config, rollouts, trajectories)
    used = rollouts.used
    with timings.section("update"):
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
    record = _record(system, rollouts, advantages, step)
    tokens = position.num_tokens + int(record.metrics.pop("rollout_tokens"))
    record.metrics.update(rollouts.metrics | rewards | penalties | updates)
    return state, RunPosition(step, tokens, rollouts.cursor), record


def _record(system: System, rollouts: Rollouts, advantages: np.ndarray, step: int) -> StepRecord:
    stats, times = rollouts.stats, system.speculation.times_now
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
    """Return trajectories with the length penalty in their rewards, if any, and its mean."""
    limits = [(t.sampling or config.sampling).max_new_tokens for t in trajectories]
    buffers = [config.algorithm.overlong_tokens(limit) for limit in limits]
    if not any(buffers):
        return list(trajectories), {}
    penalties = overlong_penalties([t.num_tokens for t in trajectories], limits, buffers)
    punished = [
        t if t.reward is None else dataclasses.replace(t, reward=t.reward + float(penalty))
        for t, penalty in zip(trajectories, penalties, strict=True)
    ]
    return punished, {"reward/overlong_penalty": float(penalties.mean())}


def _advantages(
    config: TrainConfig, rollouts: Rollouts, trajectories: Sequence[Trajectory]
) -> tuple[np.ndarray, dict[str, float]]:
    """Return advantages, 0 for responses that are not trained on, and statistics of the rewards.

    Advantages have the penalties of `trajectories`, statistics the rewards as scored. Responses
    that continued from the step before are compared with their siblings.
    """
    algorithm = config.algorithm.resolved
    siblings, _ = punish_length(config, rollouts.siblings)
    compared = [*trajectories, *siblings]
    advantages = response_advantages(
        [t.reward for t in compared],
        [t.group_id for t in compared],
        algorithm.advantages,
        algorithm.advantage_normalisation,
    )[: len(trajectories)]
    advantages[~rollouts.used] = 0
    group_ids = [t.group_id for t in trajectories]
    return advantages, reward_statistics([s.total for s in rollouts.scores], group_ids)


def speed_metrics(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    """Return metrics of the clock, which `metrics.writer.deterministic_view` knows by name."""
    total = sum(seconds.values())
    tokens = row["completions/mean_length"] * row["completions/count"]
    speed = {"step_time": total, "perf/throughput": tokens / total}
    if "time/rollout" in seconds:  # a pipeline only waits for rollouts
        speed["perf/rollout_tokens_per_s"] = tokens / max(seconds["time/rollout"], 1e-9)
    return seconds | speed
