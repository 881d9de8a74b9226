"""The training loop: prompts → rollouts and rewards → advantages → update → checkpoint.

A step is a function of (configuration, step number, state before it). So a run
that was stopped anywhere and resumed writes the same bits as one that never was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from models.folder import Folder
from models.transformer import Params
from rl.checkpoint.best import BestRecord
from rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from rl.checkpoint.manifest import Content
from rl.checkpoint.reader import NoWholeCheckpointError
from rl.cluster.processes import ALONE, Processes
from rl.engine.stats import EngineStats, save_timeline
from rl.engine.worker_record import WorkerLog
from rl.learner import trainer
from rl.learner.advantages import overlong_penalties, response_advantages, reward_statistics
from rl.learner.gathering import host_copy
from rl.learner.optimizer import SavedArrays, TrainState
from rl.loop import setup as run_setup
from rl.loop.async_rollouts import AsyncRollouts, SyncRollouts, open_source
from rl.loop.evaluation import RunEvaluation
from rl.loop.exchange import AGREED, PeerFailed
from rl.loop.experiment import Inputs, RunConfig, TrainConfig
from rl.loop.generation import (
    Rollouts,
    System,
    asked_to_stop,
    generate,
    leave_update_if_asked,
    tell_failures,
)
from rl.metrics.step_metrics import sample_rows, step_metrics
from rl.metrics.writer import MetricsWriter, RowsOnly, Timings, read_metrics
from rl.runtime.progress import Progress
from rl.runtime.run_files import CHECKPOINTS, METRICS_FILE, NEWEST_FILE, ROUNDS_FILE
from rl.runtime.signals import SAVING, Stopped, Watch
from rl.runtime.waits import Patience
from rl.trajectory import Trajectory
from spec.reuse.rollout_cache import RolloutCache

MOST_SKIPPED_STEPS = 5  # in a row under Trainer.on_nonfinite = "skip": it will not heal


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """The progress of a run: whole steps, response tokens, and prompts consumed of the data."""

    step: int = 0
    num_tokens: int = 0
    cursor: int = 0


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
    with contextlib.ExitStack() as stack:
        run = Folder(folder, create=True)
        best = BestRecord(
            run,
            inputs.evals.fingerprint(config.eval, config.sampling),
            writes=processes.is_first,
            from_first=partial(processes.from_first, "best step"),
        )
        checkpoints = stack.enter_context(
            Checkpointer(
                run.folder(CHECKPOINTS),
                config.checkpoint,
                Patience(config.run.hang_limit_s, watch.alive),
                committed=partial(_committed, run, best),
                spared=best.spared,
                processes=processes,
            )
        )
        writes = processes.is_first
        metrics = stack.enter_context(
            MetricsWriter(folder, config.metrics) if writes else RowsOnly()
        )
        options: dict[str, Any] = {"show": show, "watch": watch, "clock": clock}
        system, state = stack.enter_context(
            run_setup.build(config, inputs, folder, **options, processes=processes)
        )
        position, state, stale_params, host = _resume(checkpoints, state, system)
        metrics.truncate_to_step(position.step)
        processes.barrier("rows of the run", watch.alive)
        rows = read_metrics(folder) if run.exists(METRICS_FILE) else []
        evaluation = RunEvaluation(system, best, metrics, clock, rows)
        source = stack.enter_context(
            open_source(system, position.step + 1, stale_params, host.get("source", {}))
        )
        keeper = stack.enter_context(_Keeper(system, checkpoints, source, state, position))
        keeper.evaluate_with(evaluation)
        skipped, workers = 0, WorkerLog(position.step)
        while position.step < config.run.steps:
            timings = Timings(clock, partial(_begins, show, watch, position.step + 1))
            state, position, record = train_step(system, state, position, timings, source)
            keeper.whole_step(state, position)
            done, stats = position.step, record.stats
            seen, of_workers = workers.step(done, stats.parts, stats.events, clock())
            with timings.section("checkpoint"):
                if config.checkpoint.due(done) or done == config.run.steps:
                    show.part(done, SAVING)
                    if processes.is_first:
                        save_timeline(folder, done, stats.timeline)
                    keeper.save()
            row = record.metrics | of_workers | {"num_tokens": position.num_tokens}
            metrics.write_workers(seen)
            metrics.write_samples(done, record.samples)
            show.step(metrics.write(done, row | _speed(row, timings.seconds())))
            finish_warm_up(system, state, folder)
            keeper.evaluate_with(evaluation)
            skipped = _in_a_row(skipped, row, done)
            if done < config.run.steps:
                late = _out_of_time(
                    config.run, clock() - began_s, sum(timings.seconds().values()), show
                )
                _stop_together(system, done, late)
        return state


def finish_warm_up(system: System, state: TrainState, folder: Path) -> None:
    """Compile and time what the first step could do without."""
    if system.longer is not None and not system.longer.done:
        given = system.weights(state.params), folder / ROUNDS_FILE, system.speculation.times
        finish = partial(system.longer.finish, *given, processes=system.processes)
        system.engine.do(finish)


class _Keeper:
    """Saves the last whole step: when asked to, and before an error ends the run.

    A step that was under way leaves no trace, except that the drafter keeps what it has learnt
    when an error ends the step. Nothing is saved after an update was refused once others of its
    step had been applied: the whole step's buffers are gone then, and the newest checkpoint stands.
    """

    def __init__(
        self,
        system: System,
        checkpoints: Checkpointer,
        source: SyncRollouts | AsyncRollouts,
        state: TrainState,
        position: RunPosition,
    ) -> None:
        self._system, self._checkpoints, self._source = system, checkpoints, source
        self._saved_step = position.step
        self.whole_step(state, position)

    def whole_step(self, state: TrainState, position: RunPosition) -> None:
        """Make this step the one that a step left half way goes back to."""
        system = self._system
        self._state, self._position = state, position
        self._learnt = {
            "reuse": system.reuse.state(),
            "speculation": system.speculation.state(),
            "source": self._source.state(),
        }
        system.cache.mark()
        if system.drafter is not None:
            system.drafter.trainer.buffer.mark()

    def save(self) -> None:
        system, position = self._system, self._position
        system.speculation.settle()
        host = {
            "num_tokens": position.num_tokens,
            "cursor": position.cursor,
            "data": [len(system.inputs.task), system.inputs.data_digest],
            "rollouts": system.cache.state(),
            **self._learnt,
        }
        drafter = None
        if system.drafter is not None:
            drafter, host["drafter"] = system.drafter.saved()
        stale_params = self._source.stale_params(self._state, position.step)
        arrays = SavedArrays.of(self._state, stale_params, drafter)
        self._checkpoints.save(position.step, arrays, host, _spilled(system.cache))
        self._saved_step = position.step

    def evaluate_with(self, evaluation: RunEvaluation) -> None:
        """Evaluate the last whole step if that is due; a step that is the best is saved."""
        step = self._position.step
        if (
            evaluation.due(step)
            and evaluation(self._state.params, step)
            and self._saved_step < step
        ):
            self._system.watch.at(SAVING)
            self.save()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ends = (*AGREED, PeerFailed, trainer.NonFiniteUpdate)
        if kind is None or not issubclass(kind, ends):
            return
        system = self._system
        system.watch.at(SAVING)
        system.speculation.settle()
        system.cache.undo()
        if system.drafter is not None:
            system.drafter.trainer.buffer.undo()
        whole = not any(x.is_deleted() for x in jax.tree.leaves(self._state))
        if self._position.step > self._saved_step and whole:
            self.save()
        self._checkpoints.wait()


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
    times = system.speculation.times
    row = step_metrics(rollouts.trajectories, rollouts.scores, rollouts.stats, step, times)
    samples = sample_rows(
        system.inputs.tokenizer,
        rollouts.prompts.examples,
        rollouts.trajectories,
        rollouts.completions,
        rollouts.scores,
        None if system.config.algorithm.resolved.needs_critic else advantages,
    )
    return StepRecord(row, samples, rollouts.stats)


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


def _resume(
    checkpoints: Checkpointer, state: TrainState, system: System
) -> tuple[RunPosition, TrainState, Params | None, dict[str, Any]]:
    """Position, state, stale weights and host state of the newest whole checkpoint, or the start's.

    Stale weights are those that answer the next step, where rollouts run ahead.
    """
    drafter, behind = system.drafter, None
    if system.config.sched.mode == "pipeline":
        behind = trainer.cast_params(state.params, system.engine.dtype)
    template = SavedArrays.of(state, behind, None if drafter is None else drafter.trainer.state)
    try:
        restored = checkpoints.restore(template)
    except NoWholeCheckpointError as error:
        if error.problems:
            raise
        return RunPosition(), state, None, {}
    for warning in restored.warnings:
        system.show.message(f"warning: {warning}")
    system.show.message(f"resuming after step {restored.step}")
    host, done, arrays = restored.host, restored.step, restored.arrays
    if cached := host.get("rollouts"):
        files = None if restored.files is None else Folder(restored.files)
        system.cache.load_state(cached, files, restored.damaged_files)
    system.reuse.load_state(host.get("reuse", {}))
    system.speculation.load_state(host.get("speculation", {}))
    if drafter is not None:
        drafter.load(arrays.drafter, host["drafter"], exact=drafter.spot is None)
    now = [len(system.inputs.task), system.inputs.data_digest]
    if (then := host.get("data", now)) != now:
        system.show.message(
            f"warning: the data is not that of step {done} ({then[0]:,} examples then, {now[0]:,} "
            "now): until the next epoch some may come again, and others not at all"
        )
    # checkpoints from before dynamic sampling hold no cursor: it followed from the step
    cursor = int(host.get("cursor", done * system.config.rollout.prompts_per_step))
    return RunPosition(done, int(host["num_tokens"]), cursor), arrays.state, arrays.behind, host


def _spilled(cache: RolloutCache) -> LinkedFiles | None:
    """The files of the rollout cache, for a checkpoint to link."""
    files = cache.spilled().values()
    if cache.folder is None or not files:
        return None
    return LinkedFiles(cache.folder, {f.name: Content(f.num_bytes, f.sha256) for f in files})


def _committed(run: Folder, best: BestRecord, step: int) -> None:
    """The checkpoint of a step is whole; called in the background."""
    run.replace(NEWEST_FILE, f"{step}\n")
    best.committed(step)


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
