"""The training loop: prompts → rollouts and rewards → advantages → update → checkpoint.

A step is a function of (configuration, step number, state before it). So a run
that was stopped anywhere and resumed writes the same bits as one that never was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.folder import Folder
from models.transformer import Params
from rl import setup as run_setup
from rl.checkpoint.best import BestRecord
from rl.checkpoint.checkpointer import Checkpointer
from rl.cluster.processes import ALONE, Processes
from rl.config import Inputs, RunConfig, TrainConfig
from rl.engine.stats import EngineStats, save_timeline
from rl.engine.worker_record import WorkerLog
from rl.evaluation import RunEvaluation
from rl.learner import trainer
from rl.learner.advantages import overlong_penalties, response_advantages, reward_statistics
from rl.learner.gathering import host_copy
from rl.learner.optimizer import TrainState
from rl.metrics.step_metrics import sample_rows, step_metrics
from rl.metrics.writer import MetricsWriter, RowsOnly, Timings, read_metrics
from rl.pipeline import PipelineRollouts
from rl.rollouts import (
    Rollouts,
    System,
    asked_to_stop,
    generate,
    leave_update_if_asked,
)
from rl.run_checkpoint import Keeper, RunPosition, committed, resume
from rl.runtime.progress import Progress
from rl.runtime.run_files import CHECKPOINTS, METRICS_FILE, ROUNDS_FILE
from rl.runtime.signals import SAVING, Stopped, Watch
from rl.runtime.waits import Patience
from rl.scoring import tell_failures
from rl.step_rollouts import StepRollouts, open_rollouts
from rl.trajectory import Trajectory
from rl.warm_up.step_seconds import SecondsRecord, after_step, at_its_pace, go_on

MOST_SKIPPED_STEPS = 5  # in a row under Trainer.on_nonfinite = "skip": it will not heal


def train(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
    processes: Processes = ALONE,
) -> TrainState:
    """Run or resume in `folder`, up to `Run.steps`; one of the `processes` writes there.

    Raises Stopped where it was asked to stop, and where `Run.time_limit_s` is used up.
    """
    began_s = clock()
    options: dict[str, Any] = {"show": show, "watch": watch, "clock": clock}
    with _opened(config, inputs, folder, **options, processes=processes) as run:
        system, metrics, keeper = run.system, run.metrics, run.keeper
        state, position = run.state, run.position
        keeper.evaluate_with(run.evaluation)
        skipped, workers = 0, WorkerLog(position.step)
        while position.step < config.run.steps:
            timings = Timings(clock, partial(_begins, show, watch, position.step + 1))
            state, position, record = train_step(system, state, position, timings, run.source)
            keeper.whole_step(state, position)
            done, stats = position.step, record.stats
            seen, of_workers = workers.step(done, stats.parts, stats.events, clock())
            with timings.section("checkpoint"):
                if config.checkpoint.due(done) or done == config.run.steps:
                    show.part(done, SAVING)
                    if processes.is_first:
                        save_timeline(folder, done, stats.timeline)
                    keeper.save()
            given = run.seconds, done, stats.timeline, show.message
            turned_off = after_step(system.speculation, *given)
            row = record.metrics | of_workers | turned_off | {"num_tokens": position.num_tokens}
            metrics.write_workers(seen)
            metrics.write_samples(done, record.samples)
            step_s = timings.seconds()
            show.step(metrics.write(done, row | _speed(row, step_s)))
            finish_warm_up(system, state, folder)
            keeper.evaluate_with(run.evaluation)
            skipped = _in_a_row(skipped, row, done)
            if done < config.run.steps:
                late = _out_of_time(config.run, clock() - began_s, sum(step_s.values()), show)
                _stop_together(system, done, late)
        return state


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """The parts of a run, its state and position, and where its responses come from."""

    system: System
    metrics: MetricsWriter | RowsOnly
    evaluation: RunEvaluation
    source: StepRollouts | PipelineRollouts
    seconds: SecondsRecord
    keeper: Keeper
    state: TrainState
    position: RunPosition


@contextlib.contextmanager
def _opened(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    *,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
    processes: Processes,
) -> Iterator[_Run]:
    """Open what a run consists of, as its newest checkpoint left it."""
    with contextlib.ExitStack() as stack:
        files = Folder(folder, create=True)
        best = BestRecord(
            files,
            inputs.evals.fingerprint(config.eval, config.sampling),
            writes=processes.is_first,
            from_first=partial(processes.from_first, "best step"),
        )
        checkpoints = stack.enter_context(
            Checkpointer(
                files.folder(CHECKPOINTS),
                config.checkpoint,
                Patience(config.run.hang_limit_s, watch.alive),
                committed=partial(committed, files, best),
                spared=best.spared,
                processes=processes,
            )
        )
        writer = MetricsWriter(folder, config.metrics) if processes.is_first else RowsOnly()
        metrics = stack.enter_context(writer)
        options: dict[str, Any] = {"show": show, "watch": watch, "clock": clock}
        system, state = stack.enter_context(
            run_setup.build(config, inputs, folder, **options, processes=processes)
        )
        position, state, stale_params, host = resume(checkpoints, state, system)
        metrics.truncate_to_step(position.step)
        processes.barrier("rows of the run", watch.alive)
        rows = read_metrics(folder) if files.exists(METRICS_FILE) else []
        evaluation = RunEvaluation(system, best, metrics, clock, rows)
        seconds = SecondsRecord(files, processes)
        go_on(system.speculation, seconds, position.step)
        source = stack.enter_context(
            open_rollouts(system, position.step + 1, stale_params, host.get("source", {}))
        )
        keeper = stack.enter_context(Keeper(system, checkpoints, source, state, position))
        yield _Run(system, metrics, evaluation, source, seconds, keeper, state, position)


def finish_warm_up(system: System, state: TrainState, folder: Path) -> None:
    """Compile and time what the first step could do without."""
    if system.longer is not None and not system.longer.done:
        given = system.weights(state.params), folder / ROUNDS_FILE, system.speculation.times
        finish = partial(system.longer.finish, *given, processes=system.processes)
        system.engine.do(finish)


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
    source: Callable[..., Rollouts] = generate,
) -> tuple[TrainState, RunPosition, StepRecord]:
    """One step: generate, score, compare, update.

    Returns the new state (the given one is donated), the position after the step, and what is
    to be written of it. `source` is where responses come from.
    """
    step = position.step + 1
    rollouts = source(system, state.params, position.cursor, step, timings)
    tell_failures(system.show, rollouts.scores, step)
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
            on_pass=partial(leave_update_if_asked, system),
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
    row = step_metrics(rollouts.trajectories, rollouts.scores, stats, step, times)
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
    """Trajectories whose rewards hold the length penalty, where there is one, and its mean."""
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
    """The responses' advantages, 0 where they are not trained on, and statistics of the rewards.

    Advantages are those of `trajectories`, statistics those of the rewards as scored. What went
    on from the step before is compared with its siblings of then.
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


def _begins(show: Progress, watch: Watch, step: int, part: str) -> None:
    """A part of a step begins."""
    watch.at(part)
    if part != SAVING:  # most steps save nothing
        show.part(step, part)


def _out_of_time(run: RunConfig, elapsed_s: float, step_s: float, show: Progress) -> bool:
    """Return whether another step of `step_s` would not end within the time limit."""
    if run.time_limit_s is None or elapsed_s + step_s <= run.time_limit_s:
        return False
    show.message(f"stopping: Run.time_limit_s={run.time_limit_s:g} leaves no time for a step")
    return True


def _stop_together(system: System, step: int, late: bool) -> None:
    """Raise Stopped after a step that is the last for want of time; several processes agree."""
    processes = system.processes
    asked = not processes.alone and asked_to_stop(system)
    if processes.any(f"stop after step {step}", late or asked):
        raise Stopped


def _in_a_row(skipped: int, row: Mapping[str, Any], step: int) -> int:
    """Return how many steps in a row, this one included, had no finite update."""
    if not row.get("update/skipped") or row["batch/optimizer_steps"]:
        return 0
    if skipped + 1 == MOST_SKIPPED_STEPS:
        raise trainer.NonFiniteUpdate(
            f"step {step}: no update was finite in {MOST_SKIPPED_STEPS} steps, one after the "
            "other; a lower Optimizer.learning_rate often helps",
            None,
            (),
        )
    return skipped + 1


def _speed(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    """Clock-dependent metrics, told apart by name (`metrics.writer.deterministic_view`)."""
    total = sum(seconds.values())
    tokens = row["completions/mean_length"] * row["completions/count"]
    speed = {"step_time": total, "perf/throughput": tokens / total}
    if "time/rollout" in seconds:  # where rollouts run ahead, a step only waits for them
        speed["perf/rollout_tokens_per_s"] = tokens / max(seconds["time/rollout"], 1e-9)
    return seconds | speed


def policy_params(state: TrainState, *, keep: bool = True) -> Params:
    """The trained weights, ready for `models.hf.save_pretrained`, in the process that keeps them.

    All processes of a run call it together.
    """
    params: Params = host_copy(state.params, keep=keep)
    return params
