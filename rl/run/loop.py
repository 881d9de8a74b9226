"""The training loop: prompts → rollouts and rewards → advantages → update → checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reprise.models.decoder.transformer import Params
from reprise.models.folder import Folder
from reprise.rl.assembly import setup
from reprise.rl.assembly.system import System
from reprise.rl.checkpoint.best import BestRecord
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.learner import logprobs, trainer
from reprise.rl.learner.optimizer import SavedArrays, TrainState
from reprise.rl.metrics.writer import MetricsWriter, RowsOnly, Timings, lost_rows, read_metrics
from reprise.rl.records.packing import Shape
from reprise.rl.records.stats import save_timeline
from reprise.rl.records.worker_record import WorkerLog
from reprise.rl.run.evaluation import RunEvaluation
from reprise.rl.run.run_checkpoint import RunCheckpointer, committed, resume
from reprise.rl.runtime.progress import Progress
from reprise.rl.runtime.run_files import CHECKPOINTS, METRICS_FILE
from reprise.rl.runtime.signals import SAVING, Stopped, Watch
from reprise.rl.runtime.waits import Deadline
from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.settings.config import RunConfig, TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.steps.learning_checks import LearningWatch
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import StepRollouts
from reprise.rl.steps.step import StepRecord, speed_metrics, train_step
from reprise.rl.warm_up.step_seconds import SecondsRecord, after_step, go_on

MAX_SKIPPED_STEPS = 5  # in a row with Trainer.on_nonfinite = "skip"; the run would not recover


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
    """Run or resume in `folder`, up to `Run.steps`; return the last state.

    A step is a function of (configuration, step number, state before it), so a run that is stopped
    anywhere and resumed writes the same bits as an uninterrupted run. Raises Stopped if a stop is
    requested, or if `Run.time_limit_s` leaves no time for another step.
    """
    start_s = clock()
    num_skipped = 0
    begins = partial(_begins, show, watch)
    learning = LearningWatch(config, show.message)
    with _opened(config, inputs, folder, show, watch, clock, processes) as run:
        system = run.system
        state = run.state
        position = run.position
        run.checkpointer.evaluate_with(run.evaluation)
        saving = Timings(clock)
        with saving.section("checkpoint"):  # so that the first row has this part too
            pass
        while position.step < config.run.steps:
            timings = Timings(clock, partial(begins, position.step + 1), saving)
            state, position, record = train_step(system, state, position, timings, run.rollouts)
            run.checkpointer.whole_step(state, position)
            row = run.write(position, record, timings, clock())
            if position.step == run.position.step + 1:
                _warn_of_stops(config.run, timings, show)
                _warn_of_padding(system.learner.shape, record.metrics, show)
            saving = Timings(clock, partial(begins, position.step))
            run.save_if_due(position.step, record, saving)
            step_s = timings.total_s - timings.before_s + saving.total_s
            run.checkpointer.evaluate_with(run.evaluation)
            num_skipped = _in_a_row(num_skipped, row, position.step)
            learning.after(position.step, row, record.missing)
            if position.step < config.run.steps:
                is_late = _is_out_of_time(config.run, clock() - start_s, step_s, show)
                _stop_together(system, position.step, is_late)
        learning.end()
        return state


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """The parts of a run, and its state and position at the start."""

    system: System
    folder: Path
    metrics: MetricsWriter | RowsOnly
    workers: WorkerLog
    evaluation: RunEvaluation
    rollouts: StepRollouts
    seconds: SecondsRecord
    checkpointer: RunCheckpointer
    state: TrainState
    position: RunPosition

    def save_if_due(self, step: int, record: StepRecord, timings: Timings) -> None:
        """Save a checkpoint after the last step, and whenever one is due.

        The metrics row of the step has been written before: a kill in between would lose the row.
        """
        system = self.system
        config = self.system.config
        with timings.section("checkpoint"):
            if step == config.run.steps or self.checkpointer.is_due():
                system.show.part(step, SAVING)
                if system.processes.is_first:
                    save_timeline(self.folder, step, record.stats.timeline)
                self.checkpointer.save()

    def write(
        self, position: RunPosition, record: StepRecord, timings: Timings, now_s: float
    ) -> dict[str, Any]:
        """Write the samples of a step, then its metrics; return the metrics."""
        step = position.step
        stats = record.stats
        show = self.system.show
        workers, of_workers = self.workers.step(step, stats.parts, stats.events, now_s)
        turned_off = after_step(
            self.system.speculation,
            self.seconds,
            step,
            stats.timeline,
            show.message,
            self.system.reuse.mode,
        )
        row = record.metrics | of_workers | turned_off | {"num_tokens": position.num_tokens}
        self.metrics.write_workers(workers)
        self.metrics.write_samples(step, record.samples)
        seconds = timings.seconds()
        show.step(self.metrics.write(step, row | speed_metrics(row, seconds)))
        return row


@contextlib.contextmanager
def _opened(
    config: TrainConfig,
    inputs: Inputs,
    folder: Path,
    show: Progress,
    watch: Watch,
    clock: Callable[[], float],
    processes: Processes,
) -> Iterator[_Run]:
    """Open the parts of a run at its newest checkpoint; process 0 writes the folder."""
    with contextlib.ExitStack() as stack:
        files = Folder(folder, create=True)
        enter = stack.enter_context
        best = BestRecord(
            files,
            inputs.evals.fingerprint(config.eval, config.sampling),
            writes=processes.is_first,
            from_first=partial(processes.from_first, "best step"),
        )
        checkpoints = enter(
            Checkpointer(
                files.folder(CHECKPOINTS),
                config.checkpoint,
                Deadline(config.run.hang_limit_s, watch.heartbeat),
                committed=partial(committed, files, best),
                spared=best.spared,
                light=SavedArrays.OF_TRAINING,
                processes=processes,
            )
        )
        metrics: MetricsWriter | RowsOnly
        metrics = enter(MetricsWriter(folder, config.metrics) if processes.is_first else RowsOnly())
        system, state = enter(
            setup.build(
                config, inputs, folder, show=show, watch=watch, clock=clock, processes=processes
            )
        )
        position, state, stale_params, host = resume(checkpoints, state, system)
        metrics.truncate_to_step(position.step)
        processes.barrier("rows of the run", watch.heartbeat)
        rows = read_metrics(folder) if files.exists(METRICS_FILE) else []
        if processes.is_first and (lost := lost_rows(rows, position.step)):
            show.message(f"warning: {folder / METRICS_FILE} {lost}")
        evaluation = RunEvaluation(system, best, metrics, clock, rows)
        seconds = SecondsRecord(files, processes)
        go_on(system.speculation, seconds, position.step)
        saved = host.get("source", {})
        rollouts = enter(open_rollouts(system, position.step + 1, stale_params, saved))
        saver = enter(
            RunCheckpointer(system, checkpoints, rollouts, metrics, clock, state, position)
        )
        checkpoints.tidy()
        yield _Run(
            system=system,
            folder=folder,
            metrics=metrics,
            workers=WorkerLog(position.step),
            evaluation=evaluation,
            rollouts=rollouts,
            seconds=seconds,
            checkpointer=saver,
            state=state,
            position=position,
        )


@contextlib.contextmanager
def open_rollouts(
    system: System, first_step: int, stale_params: Params | None, state: Mapping[str, Any]
) -> Iterator[StepRollouts]:
    """Yield the rollout source for the mode of a run, from `first_step` on.

    A resumed run has the weights before the last update in `stale_params`, and the saved `state`.
    """
    config = system.config
    engine = system.engine
    if config.sched.mode == "pipeline":
        from reprise.rl.steps.pipeline import PipelineRollouts

        with PipelineRollouts(system, first_step, stale_params) as pipeline:
            pipeline.load_state(state)
            yield pipeline
    elif isinstance(engine, AheadEngine):
        from reprise.rl.steps.ahead import AheadRollouts

        num_groups = system.partition.max_groups(config.rollout.prompts_per_step)
        with engine.open(num_groups * config.rollout.group_size, config.longest_tokens):
            yield AheadRollouts(engine)
    else:  # also a process without workers
        yield StepRollouts()


def _begins(show: Progress, watch: Watch, step: int, part: str) -> None:
    """Record the start of a part of a step."""
    watch.at(part)
    if part != SAVING:  # most steps save nothing
        show.part(step, part)


def _warn_of_stops(run: RunConfig, timings: Timings, show: Progress) -> None:
    """Warn if an update takes longer than a stop may, since a stop waits for the update."""
    update_s = timings.seconds().get("time/update", 0.0)
    if update_s > run.stop_limit_s:
        show.message(
            f"warning: an update took {update_s:.1f} s, and Run.stop_limit_s={run.stop_limit_s:g}: "
            "a stop during one leaves the newest checkpoint as it is; set it to "
            f"{math.ceil(1.5 * update_s)} if this machine's scheduler waits as long (KillWait of "
            "SLURM, terminationGracePeriodSeconds of Kubernetes: often 30)"
        )


def _warn_of_padding(shape: Shape, row: Mapping[str, Any], show: Progress) -> None:
    """Recommend smaller micro-batches if more than half of the batch is padding."""
    padding = row.get("batch/padding", 0.0)
    ways = logprobs.batch_ways()
    if padding > 0.5 and shape.rows > ways:
        show.message(
            f"note: {padding:.0%} of the update's positions are padding; "
            f"Trainer.micro_batch_tokens={shape.length * ways} has the least, in more passes"
        )


def _is_out_of_time(run: RunConfig, elapsed_s: float, step_s: float, show: Progress) -> bool:
    """Return whether another step of `step_s` would end after the time limit."""
    if run.time_limit_s is None or elapsed_s + step_s <= run.time_limit_s:
        return False
    show.message(f"stopping: Run.time_limit_s={run.time_limit_s:g} leaves no time for a step")
    return True


def _stop_together(system: System, step: int, is_late: bool) -> None:
    """Raise Stopped if the time is up, or if any of several processes has a stop request."""
    processes = system.processes
    is_requested = not processes.alone and system.is_stop_requested()
    if processes.any(f"stop after step {step}", is_late or is_requested):
        raise Stopped


def _in_a_row(num_skipped: int, row: Mapping[str, Any], step: int) -> int:
    """Return the number of consecutive steps, this step included, without a finite update."""
    if not row.get("update/skipped") or row["batch/optimizer_steps"]:
        return 0
    if num_skipped + 1 == MAX_SKIPPED_STEPS:
        raise trainer.NonFiniteUpdate(
            f"step {step}: no update was finite in {MAX_SKIPPED_STEPS} steps, one after the "
            "other; a lower Optimizer.learning_rate often helps",
            None,
            (),
        )
    return num_skipped + 1
