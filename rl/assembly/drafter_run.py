"""The learned drafter of a run: how a run opens, trains and saves the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.models.folder import Folder
from reprise.rl.assembly.listeners import StepListener
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.checkpoint.reader import NoWholeCheckpointError
from reprise.rl.cluster.processes import ALONE
from reprise.rl.drafter_training.config import DrafterConfig, shape_of
from reprise.rl.drafter_training.spot_trainer import SpotTrainer
from reprise.rl.drafter_training.trainer import BufferSink, DrafterTrainer, TrainContext
from reprise.rl.engine.engine import Engine, RolloutEngine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.exchange.responses import WHOLE, Partition
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.runtime.run_files import DRAFTER
from reprise.rl.runtime.waits import Deadline
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import DrafterTrainingConfig
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.eagle_training.training import DrafterState, state_of
from reprise.spec.eagle_training.training_data import DataBuffer, RequestSample

_VOCABULARY_PROMPTS = 20_000


def open_drafter(config: TrainConfig, inputs: Inputs) -> EagleWeights:
    """Return the initial drafter of a run; the first prompts determine a reduced vocabulary."""
    first = range(min(len(inputs.task), _VOCABULARY_PROMPTS))
    prompts = (inputs.encode(inputs.task[i], config.task) for i in first)
    training = config.drafter_training
    seed = config.run.seed
    return first_drafter(config.drafter, training, inputs.model, seed, prompts)


def first_drafter(
    options: DrafterConfig,
    training: DrafterTrainingConfig,
    model: ModelConfig,
    seed: int,
    texts: Iterable[Sequence[int] | np.ndarray],
) -> EagleWeights:
    """Return the initial drafter in float32, loaded from a folder or randomly initialized.

    A reduced vocabulary has the most frequent tokens of `texts`, which are not read otherwise.
    """
    if options.directory is not None:
        drafter = eagle_files.load(options.directory, model)
        master = jax.tree.map(lambda p: p.astype(jnp.float32), drafter.params)
        return dataclasses.replace(drafter, params=master)
    shape = shape_of(options, training, model)
    ids_U = None
    if shape.draft_vocab_size:
        ids_U = frequent_tokens(texts, model, shape.draft_vocab_size)
    return EagleWeights(shape, eagle.init(shape, jax.random.key(seed)), ids_U)


def frequent_tokens(
    texts: Iterable[Sequence[int] | np.ndarray], model: ModelConfig, size: int
) -> np.ndarray:
    """Return the end tokens and the most frequent tokens of `texts`, ascending, int32 [size]."""
    counts_V = np.zeros(model.vocab_size, np.int64)
    for tokens in texts:
        np.add.at(counts_V, np.asarray(tokens), 1)
    counts_V[list(model.eos_token_ids)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts_V, kind="stable")[:size]).astype(np.int32)


class DrafterRun(StepListener):
    """Drafter training during a run, step by step. Created by `open_run`.

    If workers are other programs, `trainer_engine` is an engine on the trainer devices of process
    0. This engine sums and applies gradients, and trains after rollouts.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: DrafterTrainer,
        spot: SpotTrainer | None,
        trainer_engine: Engine | None = None,
    ) -> None:
        self.trainer = trainer
        self.spot = spot
        self.trainer_engine = trainer_engine
        self._config = config
        self._rl_step = 0
        self._first_step = 0

    @property
    def trains(self) -> bool:
        """True if the run trains the drafter; otherwise the drafter keeps its initial weights."""
        return self.spot is not None or self._config.drafter.steps_after_rollout > 0

    def sink(self, step: int) -> BufferSink | None:
        """Return a sink that stores hidden states of sampled requests of `step` for training."""
        if not self.trains:
            return None
        config = self._config
        buffer = self.trainer.buffer
        width = self.trainer.learned.config.hidden_width
        token_bytes = width * np.dtype(config.trainer.dtype).itemsize + np.dtype(np.int32).itemsize
        # in pipeline mode the previous step is still incomplete
        before = step - 1 if config.sched.mode == "pipeline" else step
        share = buffer.share_for(
            before, config.rollout.num_requests, config.longest_tokens, token_bytes
        )
        return BufferSink(buffer, step, RequestSample(config.run.seed, step, share))

    def before_rollout(self, spec: RolloutSpec, step: int) -> RolloutSpec:
        """Prepare to train on a rollout, and add the sink; a step may have several rollouts."""
        if step != self._rl_step:
            self._rl_step = step
            self._first_step = self.trainer.step
        if self.spot is None:
            self.trainer.begin(step)
        else:
            self.spot.prepare(spec.params, step)
        return dataclasses.replace(spec, sink=self.sink(step))

    @property
    def learned(self) -> LearnedDrafter:
        return self.trainer.learned

    @property
    def waits_for_training(self) -> bool:
        """True if the run waits for training after each rollout; False if idle workers train."""
        return self.spot is None

    @property
    def trained_this_step(self) -> bool:
        """True if the drafter has trained in this step; always False with spot training."""
        return self.spot is None and self.trainer.step != self._first_step

    def after_rollout(self, engine: RolloutEngine, weights: Params, timings: Timings) -> None:
        """Train for `steps_after_rollout` steps, and publish weights for the next rollout."""
        if self._config.sched.mode == "pipeline" and not self.waits_for_training:
            return  # the workers run the next step, and publish what idle ones learn
        with timings.section("drafter"):
            if not self.trains:
                return
            trainer = self.trainer
            steps = self._config.drafter.steps_after_rollout
            if steps:
                do_at(
                    engine,
                    self.trainer_engine or engine.engines[0],
                    lambda e: trainer.run_steps(steps, trainer.context(e, e.place(weights))),
                )
            trainer.publish()

    def warm_up(self, engine: RolloutEngine, weights: Params) -> None:
        """Compile the training programs on every worker that may train."""
        if not self.trains:
            return
        trainer = self.trainer
        workers = engine.engines
        if self.trainer_engine is not None:
            workers = [self.trainer_engine]  # other programs compile their programs
        for worker in workers if self.spot is not None else workers[:1]:
            do_at(engine, worker, lambda e: trainer.warm_up(trainer.context(e, e.place(weights))))

    def mark(self) -> None:
        """Make the current buffer the rollback point of `undo`."""
        self.trainer.buffer.mark()

    def undo(self) -> None:
        """Remove all entries since `mark`."""
        self.trainer.buffer.undo()

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """Return means over drafter steps since the last call, and the size of the buffer."""
        rows = self.trainer.take_history()
        buffer = self.trainer.buffer
        means = {
            f"drafter/{name}": float(np.mean([row[name] for row in rows]))
            for name in (rows[0] if rows else ())
        }
        return means | {
            "drafter/steps": float(len(rows)),
            "drafter/total_steps": float(self.trainer.step),
            "drafter/buffer_bytes": float(buffer.num_bytes),
            "drafter/buffer_sequences": float(buffer.num_sequences),
        }

    @property
    def template(self) -> DrafterState:
        """Arrays with the shapes that a run checkpoint restores."""
        return self.trainer.state

    def saved(self) -> tuple[DrafterState, dict[str, Any]]:
        """Return the arrays and the plain state for a run checkpoint."""
        state, step = self.trainer.snapshot()
        return state, {"step": step, "buffer": self.trainer.buffer.state()}

    def load(self, arrays: DrafterState, state: dict[str, Any], *, exact: bool) -> None:
        """Restore from a run checkpoint; unless `exact`, prefer a newer drafter checkpoint."""
        self.trainer.buffer.load_state(state["buffer"])
        step = int(state["step"])
        if not exact and self.trainer.checkpoints is not None:
            try:
                newest = self.trainer.checkpoints.restore(arrays)
            except NoWholeCheckpointError:
                pass
            else:
                if newest.step > step:
                    arrays = newest.arrays
                    step = newest.step
        self.trainer.load(arrays, step)


def open_run(
    config: TrainConfig,
    drafter: EagleWeights,
    folder: Path,
    stack: ExitStack,
    clock: Callable[[], float],
    heartbeat: Callable[[], object] = lambda: None,
    partition: Partition = WHOLE,
    trainer_engine: Engine | None = None,
) -> DrafterRun:
    """Set up drafter training; the last checkpoint is written when `stack` closes.

    `heartbeat` is called while a save is pending. Several processes with separate engines each
    train a drafter on the local responses, and only process 0 saves its drafter. Processes under
    one engine train one drafter together.
    """
    options = config.drafter
    deadline = Deadline(config.run.hang_limit_s, heartbeat)
    keeps = CheckpointConfig(keep=2, asynchronous=config.checkpoint.asynchronous)
    trainer = DrafterTrainer(
        options,
        config.drafter_training,
        LearnedDrafter(drafter, options.tree),
        DataBuffer(config.data_buffer),
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        checkpoints=_checkpoints(folder, keeps, deadline, stack, partition),
    )
    stack.enter_context(_kept(trainer))
    if trainer_engine is not None:
        trainer.move_to(trainer_engine)
    spot = None
    if idle_workers_train(config):
        contexts = None if trainer_engine is None else partial(_elsewhere, trainer_engine)
        spot = SpotTrainer(trainer, options.min_idle_workers, clock, contexts)
    return DrafterRun(config, trainer, spot, trainer_engine)


def idle_workers_train(config: TrainConfig) -> bool:
    """Return whether idle workers of the run train the drafter."""
    several = config.sched.workers > 1 or config.sched.beside_training
    return config.drafter.spot and several


def _elsewhere(trainer_engine: Engine, worker: Any, weights: Params) -> TrainContext:
    """Return the training context of a worker in another program."""
    return TrainContext(trainer_engine, None, partial(worker.gradients, weights))


def _checkpoints(
    folder: Path,
    keeps: CheckpointConfig,
    deadline: Deadline,
    stack: ExitStack,
    partition: Partition,
) -> Checkpointer | None:
    """Return the checkpointer of the drafter; None in a process that does not save its drafter."""
    if partition.splits and not partition.processes.is_first:
        return None
    together = ALONE if partition.splits else partition.processes
    own = Folder(folder).folder(DRAFTER)
    return stack.enter_context(Checkpointer(own, keeps, deadline, processes=together))


@contextmanager
def _kept(trainer: DrafterTrainer) -> Iterator[None]:
    """Save the last state when a run finishes without an error."""
    yield
    trainer.save_last()


def do_at(engine: RolloutEngine, worker: Engine, work: Callable[[Engine], object]) -> None:
    """Call `work(worker)` on the devices of `worker`, which is a worker of `engine`."""

    def there() -> None:
        with worker.mesh_context():
            work(worker)

    engine.do(there)


class DrafterStub:
    """A placeholder in processes other than 0, since process 0 has the workers and the drafter.

    All processes write and read a checkpoint together, so the stub has arrays of the same shapes,
    without values. `learned` has shapes instead of weights. Created by `open_stub`.
    """

    trained_this_step = False
    spot = None

    def __init__(
        self, learned: LearnedDrafter, template: DrafterState, *, waits_for_training: bool
    ) -> None:
        self.learned = learned
        self.template = template
        self.waits_for_training = waits_for_training

    def warm_up(self, engine: RolloutEngine, weights: Params) -> None:
        """Do nothing, since nothing needs compilation."""

    def mark(self) -> None:
        """Do nothing, since no entries are buffered."""

    def undo(self) -> None:
        """Do nothing, since no entries are buffered."""

    def saved(self) -> tuple[DrafterState, dict[str, Any]]:
        """Return zeros of the right shapes, and no state; only process 0 saves values."""
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.template)
        return jax.device_put(zeros), {}

    def load(self, arrays: DrafterState, state: dict[str, Any], *, exact: bool) -> None:
        """Do nothing, since only process 0 restores the drafter."""


AnyDrafter = DrafterRun | DrafterStub


def open_stub(config: TrainConfig, inputs: Inputs) -> DrafterStub:
    """Return a placeholder for the drafter of the run; only shapes are read from its folder."""
    options = config.drafter
    training = config.drafter_training

    def state() -> DrafterState:
        start = first_drafter(options, training, inputs.model, config.run.seed, ())
        return state_of(training, jax.tree.map(jnp.asarray, start.params))

    template: DrafterState = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(state)
    )
    shape = shape_of(options, training, inputs.model)
    learned = LearnedDrafter(EagleWeights(shape, template.params), options.tree)
    waits = not idle_workers_train(config)
    return DrafterStub(learned, template, waits_for_training=waits)
