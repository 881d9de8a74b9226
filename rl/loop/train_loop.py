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

import jax
import numpy as np

from models.folder import Folder
from models.transformer import Params
from rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from rl.checkpoint.manifest import Content
from rl.checkpoint.reader import NoWholeCheckpointError
from rl.engine.stats import EngineStats, save_timeline
from rl.learner import trainer
from rl.learner.advantages import overlong_penalties, response_advantages, reward_statistics
from rl.learner.optimizer import TrainState
from rl.loop import setup as run_setup
from rl.loop.async_rollouts import AsyncRollouts, SyncRollouts, open_source
from rl.loop.experiment import Inputs, TrainConfig
from rl.loop.generation import Rollouts, System, generate, leave_if_asked, tell_failures
from rl.loop.run_folder import CHECKPOINTS, NEWEST_FILE
from rl.metrics.step_metrics import sample_rows, step_metrics
from rl.metrics.writer import MetricsWriter, Timings
from rl.rewards.process import RewardWorkerError
from rl.runtime.progress import Progress
from rl.runtime.signals import SAVING, Stopped, Watch
from rl.runtime.waits import Hang, Patience
from rl.trajectory import Trajectory
from rl.workers.coordinator import WorkerError
from spec.reuse.rollout_cache import RolloutCache

MOST_SKIPPED_STEPS = 5  # in a row under Trainer.on_nonfinite = "skip": it will not heal


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """How far a run is: whole steps done, response tokens so far, prompts consumed of the data."""

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
) -> TrainState:
    """Run or resume in `folder`, up to `Run.steps`; raises Stopped where it was asked to stop."""
    with contextlib.ExitStack() as stack:
        run = Folder(folder, create=True)
        checkpoints = stack.enter_context(
            Checkpointer(
                run.folder(CHECKPOINTS),
                config.checkpoint,
                Patience(config.run.hang_limit_s, watch.alive),
                committed=lambda step: run.replace(NEWEST_FILE, f"{step}\n"),
            )
        )
        metrics = stack.enter_context(MetricsWriter(folder, config.metrics))
        system, state = stack.enter_context(
            run_setup.opened(config, inputs, folder, show=show, watch=watch, clock=clock)
        )
        place, state, host = _resume(checkpoints, state, system)
        metrics.truncate_to_step(place.step)
        source = stack.enter_context(
            open_source(system, place.step + 1, state.behind, host.get("source", {}))
        )
        state = dataclasses.replace(state, behind=None, drafter=None)
        saved, skipped = place.step, 0
        learnt = _learnt(system, source)
        _mark(system)

        def save() -> None:
            host = _host_state(system, place) | learnt
            arrays = source.saved(state, place.step)
            if system.drafter is not None:
                drafter, host["drafter"] = system.drafter.saved()
                arrays = dataclasses.replace(arrays, drafter=drafter)
            checkpoints.save(place.step, arrays, host, _spilled(system.cache))

        with _saving_when_stopped(system, lambda: (saved, place, state), save, checkpoints):
            while (done := place.step) < config.run.steps:
                timings = Timings(clock, partial(_begins, show, watch, place.step + 1))
                state, place, wrote = train_step(system, state, place, timings, source)
                done, learnt = place.step, _learnt(system, source)
                _mark(system)
                with timings.section("checkpoint"):
                    if config.checkpoint.due(done) or done == config.run.steps:
                        save_timeline(folder, done, wrote.stats.timeline)
                        save()
                        saved = done
                row = wrote.metrics | {"num_tokens": place.num_tokens}
                metrics.write_samples(done, wrote.samples)
                show.step(metrics.write(done, row | _speed(row, timings.seconds())))
                skipped = _in_a_row(skipped, row, done)
        return state


@dataclasses.dataclass(frozen=True, eq=False)
class StepRecord:
    """What a step leaves in the run folder: a row of metrics, and its samples."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]]
    stats: EngineStats


def train_step(
    system: System,
    state: TrainState,
    place: RunPosition,
    timings: Timings,
    generate: Callable[..., Rollouts] = generate,
) -> tuple[TrainState, RunPosition, StepRecord]:
    """One step: generate, score, compare, update.

    Returns the new state (the given one is donated), the place after the step, and what is
    to be written of it. `generate` is where responses come from.
    """
    config, step = system.config, place.step + 1
    rollouts = generate(system, state.params, place.cursor, step, timings)
    tell_failures(system.show, rollouts.scores, step)
    trajectories, penalty_metrics = punish_length(config, rollouts.trajectories)
    advantages, reward_metrics = _advantages(config, rollouts, trajectories)
    used = rollouts.used
    with timings.section("update"):
        state, update_metrics = trainer.update(
            state,
            [t for t, use in zip(trajectories, used, strict=True) if use],
            advantages[used],
            recipe=system.recipe,
            shape=system.shape,
            sampling=config.sampling,
            step=step,
            seed=config.run.seed,
            reference=system.reference,
            on_pass=partial(leave_if_asked, system),
            on_skip=lambda error: system.show.message(f"warning: skipped: {error}"),
        )
    system.reuse.after_update(update_metrics)
    row = step_metrics(rollouts.trajectories, rollouts.scores, rollouts.stats, step)
    samples = sample_rows(
        system.inputs.tokenizer,
        rollouts.prompts.examples,
        rollouts.trajectories,
        rollouts.completions,
        rollouts.scores,
        None if config.algorithm.resolved.needs_critic else advantages,
    )
    tokens = place.num_tokens + int(row.pop("rollout_tokens"))
    place = RunPosition(step, tokens, place.cursor + rollouts.num_asked)
    row |= rollouts.metrics | reward_metrics | penalty_metrics | update_metrics
    return state, place, StepRecord(row, samples, rollouts.stats)


def punish_length(
    config: TrainConfig, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], dict[str, float]]:
    """Trajectories whose rewards hold the length penalty, where there is one, and its mean."""
    limit = config.sampling.max_new_tokens
    buffer = config.algorithm.overlong_tokens(limit)
    if not buffer or not trajectories:
        return list(trajectories), {}
    penalties = overlong_penalties([t.num_tokens for t in trajectories], limit, buffer)
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
) -> tuple[RunPosition, TrainState, dict[str, Any]]:
    """Place, state and host state: those of the newest whole checkpoint, else the start."""
    template = state
    if system.config.sched.mode == "pipeline":
        behind = trainer.cast_params(state.params, system.engine.dtype)
        template = dataclasses.replace(state, behind=behind)
    if system.drafter is not None:
        template = dataclasses.replace(template, drafter=system.drafter.trainer.state)
    try:
        restored = checkpoints.restore(template)
    except NoWholeCheckpointError as error:
        if error.problems:
            raise
        return RunPosition(), state, {}
    for warning in restored.warnings:
        system.show.message(f"warning: {warning}")
    system.show.message(f"resuming after step {restored.step}")
    if cached := restored.host.get("rollouts"):
        files = None if restored.files is None else Folder(restored.files)
        system.cache.load_state(cached, files, restored.damaged_files)
    system.reuse.load_state(restored.host.get("reuse", {}))
    system.speculation.load_state(restored.host.get("speculation", {}))
    if system.drafter is not None:
        exact = system.drafter.spot is None
        system.drafter.load(restored.arrays.drafter, restored.host["drafter"], exact=exact)
    host, done = restored.host, restored.step
    # checkpoints from before dynamic sampling hold no cursor: it followed from the step
    cursor = int(host.get("cursor", done * system.config.rollout.prompts_per_step))
    return RunPosition(done, int(host["num_tokens"]), cursor), restored.arrays, host


@contextlib.contextmanager
def _saving_when_stopped(
    system: System,
    now: Callable[[], tuple[int, RunPosition, TrainState]],
    save: Callable[[], None],
    checkpoints: Checkpointer,
) -> Iterator[None]:
    """Save the last whole step before what ends the run goes on its way.

    The step that was under way has left no trace; of one that ends for other reasons than being
    asked to, what the drafter has learnt stays. Not where an update was refused after others of
    its step had been applied: the whole step's buffers are gone then, and the newest checkpoint
    stands.
    """
    try:
        yield
    except (Stopped, trainer.NonFiniteUpdate, RewardWorkerError, WorkerError, Hang):
        system.watch.at(SAVING)
        saved, place, state = now()
        system.speculation.settle()
        system.cache.undo()
        if system.drafter is not None:
            system.drafter.trainer.buffer.undo()
        whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
        if place.step > saved and whole:
            save()
        checkpoints.wait()
        raise


def _mark(system: System) -> None:
    """A step is whole: it is what a step that is left half way goes back to."""
    system.cache.mark()
    if system.drafter is not None:
        system.drafter.trainer.buffer.mark()


def _host_state(system: System, place: RunPosition) -> dict[str, Any]:
    """What a resumed run needs besides arrays, and besides what steps have learnt."""
    system.speculation.settle()
    return {
        "num_tokens": place.num_tokens,
        "cursor": place.cursor,
        "rollouts": system.cache.state(),
    }


def _learnt(system: System, source: SyncRollouts | AsyncRollouts) -> dict[str, Any]:
    """What the host has learnt in whole steps; a step that is left half way is not to add to it."""
    return {
        "reuse": system.reuse.state(),
        "speculation": system.speculation.state(),
        "source": source.state(),
    }


def _spilled(cache: RolloutCache) -> LinkedFiles | None:
    """The files of the rollout cache, for a checkpoint to link."""
    files = cache.spilled().values()
    if cache.folder is None or not files:
        return None
    return LinkedFiles(cache.folder, {f.name: Content(f.num_bytes, f.sha256) for f in files})


def _begins(show: Progress, watch: Watch, step: int, part: str) -> None:
    """A part of a step begins."""
    watch.at(part)
    show.part(step, part)


def _in_a_row(skipped: int, row: Mapping[str, Any], step: int) -> int:
    """So many steps in a row, this one included, had no update that was finite."""
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


def policy_params(state: TrainState) -> Params:
    """The trained weights, ready for `models.hf.save_pretrained`."""
    return jax.tree.map(np.asarray, state.params)
