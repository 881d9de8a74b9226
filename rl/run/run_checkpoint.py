"""The last whole step of a run: saved to a checkpoint, and restored from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from reprise.models.config import trained_specs
from reprise.models.decoder.transformer import Params
from reprise.models.folder import Folder
from reprise.rl.assembly.system import System
from reprise.rl.checkpoint import reader
from reprise.rl.checkpoint.best import BestRecord
from reprise.rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from reprise.rl.checkpoint.folders import step_folder
from reprise.rl.checkpoint.manifest import Content
from reprise.rl.checkpoint.reader import NoWholeCheckpointError
from reprise.rl.data.prompts import UnreadableExample
from reprise.rl.exchange.responses import AGREED, PeerFailed
from reprise.rl.learner import critic, trainer
from reprise.rl.learner.optimizer import SavedArrays, TrainState, make_optimizer, state_shapes
from reprise.rl.metrics.writer import MetricsWriter
from reprise.rl.run.evaluation import RunEvaluation
from reprise.rl.runtime.run_files import NEWEST_FILE
from reprise.rl.runtime.signals import SAVING
from reprise.rl.settings.config import TrainConfig, drafter_shape, recipe
from reprise.rl.settings.inputs import Inputs
from reprise.rl.steps.learning_checks import NotLearning
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.rollouts import StepRollouts
from reprise.spec.reuse.rollout_cache import RolloutCache


class RunCheckpointer:
    """Saves the last whole step, on `save` and before an error stops the run.

    An interrupted step leaves no trace, except that the drafter keeps its training if an error
    stops the step. If an update is rejected after other updates of its step, the buffers of the
    last whole step are gone: nothing is saved, and the newest checkpoint stays.
    """

    def __init__(
        self,
        system: System,
        checkpoints: Checkpointer,
        rollouts: StepRollouts,
        metrics: MetricsWriter,
        clock: Callable[[], float],
        state: TrainState,
        position: RunPosition,
    ) -> None:
        self._system = system
        self._checkpoints = checkpoints
        self._rollouts = rollouts
        self._metrics = metrics
        self._clock = clock
        self._saved_step = position.step
        self._saved_s = clock()
        self.whole_step(state, position)

    def whole_step(self, state: TrainState, position: RunPosition) -> None:
        """Record a completed step as the rollback point of an interrupted one."""
        system = self._system
        self._state = state
        self._position = position
        system.watch.whole_step = position.step
        self._learned = {
            "reuse": system.reuse.state(),
            "speculation": system.speculation.state(),
            "source": self._rollouts.state(),
        }
        system.cache.mark()
        if system.drafter is not None:
            system.drafter.mark()

    def is_due(self) -> bool:
        """Return whether a checkpoint is due by steps or, in any process, by minutes."""
        config = self._system.config.checkpoint
        step = self._position.step
        if config.due(step) or not config.every_minutes:
            return config.due(step)
        is_late = self._clock() - self._saved_s >= 60 * config.every_minutes
        return self._system.processes.any(f"save after step {step}", is_late)

    def save(self) -> None:
        """Save the last whole step, after syncing the rows that were written up to it.

        Raises NonFiniteWeights, and the errors of `Checkpointer.save`.
        """
        system = self._system
        position = self._position
        trainer.check_weights(
            self._state,
            f"the checkpoint of step {position.step} is not saved (a lower "
            "Optimizer.learning_rate often helps)",
        )
        self._metrics.sync()
        system.speculation.settle()
        host = {
            "num_tokens": position.num_tokens,
            "cursor": position.cursor,
            "data": [len(system.inputs.task), system.inputs.data_digest],
            "prompts": system.inputs.prompts_digest,
            "contents": dict(system.inputs.contents),
            "rollouts": system.cache.state(),
            **self._learned,
        }
        drafter = None
        if system.drafter is not None:
            drafter, host["drafter"] = system.drafter.saved()
        stale_params = self._rollouts.stale_params(self._state, position.step)
        arrays = SavedArrays.of(self._state, stale_params, drafter)
        self._checkpoints.save(position.step, arrays, host, _spilled(system.cache))
        self._saved_step, self._saved_s = position.step, self._clock()

    def evaluate_with(self, evaluation: RunEvaluation) -> None:
        """Evaluate the last whole step if an evaluation is due; save the step if it is the best."""
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
        ends = (*AGREED, PeerFailed, trainer.NonFiniteUpdate, NotLearning, UnreadableExample)
        if kind is None or not issubclass(kind, ends):
            return
        if kind is UnreadableExample and not self._system.processes.alone:
            return  # the other processes may have read it, and would not save
        system = self._system
        system.watch.at(SAVING)
        system.speculation.settle()
        system.cache.undo()
        if system.drafter is not None:
            system.drafter.undo()
        whole = not any(x.is_deleted() for x in jax.tree.leaves(self._state))
        if self._position.step > self._saved_step and whole:
            self.save()
        self._checkpoints.wait()


def resume(
    checkpoints: Checkpointer, state: TrainState, system: System
) -> tuple[RunPosition, TrainState, Params | None, dict[str, Any]]:
    """Return position, state, stale weights and host state of the newest checkpoint, or the start.

    In a pipeline the stale weights answer the next step; None means the weights of the state.
    """
    drafter = system.drafter
    behind = None
    if system.config.sched.mode == "pipeline":
        behind = trainer.shapes_in(state.params, system.engine.dtype)
    template = SavedArrays.of(state, behind, None if drafter is None else drafter.template)
    state_paths = tuple(f".{field.name}" for field in dataclasses.fields(TrainState))
    try:
        restored = checkpoints.restore(template, optional=SavedArrays.OPTIONAL, frees=state_paths)
    except NoWholeCheckpointError as error:
        if error.problems:
            raise
        return RunPosition(), state, None, {}
    for warning in restored.warnings:
        system.show.message(f"warning: {warning}")
    folder = step_folder(checkpoints.directory, restored.step)
    try:
        trainer.check_weights(restored.arrays.state, str(folder))
    except trainer.NonFiniteWeights as error:
        fix = "move this folder away to go on from the checkpoint before"
        raise NoWholeCheckpointError(f"{error}: {fix}", {}) from error
    system.show.message(f"resuming after step {restored.step}")
    host = restored.host
    done = restored.step
    arrays = restored.arrays
    for part in restored.lacking:
        system.show.message(f"the checkpoint holds no {part[1:]}: it begins after step {done}")
    files = None if restored.files is None else Folder(restored.files)
    system.cache.load_state(host["rollouts"], files, restored.damaged_files)
    system.reuse.load_state(host["reuse"])
    system.speculation.load_state(host["speculation"])
    if drafter is not None and ".drafter" not in restored.lacking:
        drafter.load(arrays.drafter, host["drafter"], exact=drafter.waits_for_training)
    now = [len(system.inputs.task), system.inputs.data_digest]
    if (then := host["data"]) != now:
        system.show.message(
            f"warning: the data is not that of step {done} ({then[0]:,} examples then, {now[0]:,} "
            "now): until the next epoch some may come again, and others not at all"
        )
    elif host.get("prompts", system.inputs.prompts_digest) != system.inputs.prompts_digest:
        system.show.message(
            f"warning: the prompts have other tokens than up to step {done}: the policy's "
            "tokenizer, its chat template, Task or the version of transformers has changed"
        )
    behind = None if ".behind" in restored.lacking else arrays.behind
    position = RunPosition(done, int(host["num_tokens"]), int(host["cursor"]))
    return position, arrays.state, behind, host


def check_can_resume(config: TrainConfig, inputs: Inputs, checkpoints: Path) -> None:
    """Compare the shapes in the checkpoint of a run with the shapes of `config`; read no array.

    Raises StructureMismatchError.
    """
    reader.check_structure(checkpoints, saved_shapes(config, inputs), SavedArrays.OPTIONAL)


def saved_shapes(config: TrainConfig, inputs: Inputs) -> SavedArrays:
    """Return the array shapes in the checkpoints of a run; open no device."""
    spec = recipe(config, inputs.model)
    model = inputs.model
    state = state_shapes(trained_specs(model), make_optimizer(config.optimizer, spec.total_steps))
    if config.algorithm.resolved.needs_critic:
        state = dataclasses.replace(state, critic=critic.shapes(spec))
    behind = state.params if config.sched.mode == "pipeline" else None
    drafter = None
    shape = drafter_shape(config, model)
    if shape is not None:
        from reprise.spec.eagle import model as eagle
        from reprise.spec.eagle_training.training import state_of

        init = lambda: eagle.init(shape, jax.random.key(0))  # noqa: E731
        drafter = jax.eval_shape(lambda: state_of(config.drafter_training, init()))
    return SavedArrays.of(state, behind, drafter)


def _spilled(cache: RolloutCache) -> LinkedFiles | None:
    """Return the files of the rollout cache, for a checkpoint to link."""
    files = cache.spilled().values()
    if cache.folder is None or not files:
        return None
    return LinkedFiles(cache.folder, {f.name: Content(f.num_bytes, f.sha256) for f in files})


def committed(run: Folder, best: BestRecord, step: int) -> None:
    """Record that the checkpoint of a step is whole; called in the background."""
    run.replace(NEWEST_FILE, f"{step}\n")
    best.committed(step)
