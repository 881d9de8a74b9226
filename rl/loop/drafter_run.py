"""A run's learned drafter: opened, checked, given to rollouts, trained and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.config import ModelConfig
from models.folder import Folder
from models.transformer import Params
from rl.checkpoint.checkpointer import Checkpointer
from rl.checkpoint.config import CheckpointConfig
from rl.checkpoint.reader import NoWholeCheckpointError
from rl.drafter_training.config import DrafterConfig, shape_of
from rl.drafter_training.spot_trainer import SpotTrainer
from rl.drafter_training.trainer import BufferSink, DrafterTrainer
from rl.engine.engine import Engine, RolloutEngine
from rl.loop.experiment import Inputs, TrainConfig
from rl.runtime.waits import Patience
from rl.speculation.learned_drafter import LearnedDrafter
from spec.eagle import files as eagle_files
from spec.eagle import model as eagle
from spec.eagle.config import DrafterTrainingConfig
from spec.eagle.data_buffer import DataBuffer
from spec.eagle.model import EagleWeights
from spec.eagle.training import DrafterState

FOLDER = "drafter"  # in the run folder


def open_drafter(config: TrainConfig, inputs: Inputs) -> EagleWeights:
    """The drafter that a run starts from; of a reduced vocabulary by the tokens of its prompts."""
    prompts = (inputs.encode(inputs.task[i], config.task) for i in range(len(inputs.task)))
    training, seed = config.drafter_training, config.run.seed
    return first_drafter(config.drafter, training, inputs.model, seed, prompts)


def first_drafter(
    options: DrafterConfig,
    training: DrafterTrainingConfig,
    model: ModelConfig,
    seed: int,
    texts: Iterable[Sequence[int] | np.ndarray],
) -> EagleWeights:
    """The drafter to start from: of a folder, or of random weights.

    A reduced vocabulary is that of `texts`, which are not looked at otherwise.
    """
    if options.directory is not None:
        return eagle_files.load(options.directory, model)
    shape, ids_U = shape_of(options, training, model), None
    if shape.draft_vocab_size:
        ids_U = frequent_tokens(texts, model, shape.draft_vocab_size)
    return EagleWeights(shape, eagle.init(shape, jax.random.key(seed)), ids_U)


def frequent_tokens(
    texts: Iterable[Sequence[int] | np.ndarray], model: ModelConfig, size: int
) -> np.ndarray:
    """The tokens that texts have most often, end tokens before all; ascending int32 [size]."""
    counts_V = np.zeros(model.vocab_size, np.int64)
    for tokens in texts:
        np.add.at(counts_V, np.asarray(tokens), 1)
    counts_V[list(model.eos_token_ids)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts_V, kind="stable")[:size]).astype(np.int32)


class DrafterRun:
    """What a run does about its drafter, step by step. Made by `open_run`."""

    def __init__(
        self, config: TrainConfig, trainer: DrafterTrainer, spot: SpotTrainer | None
    ) -> None:
        self.trainer, self.spot = trainer, spot
        self._config, self._rl_step, self._first_step = config, 0, 0

    def sink(self, step: int) -> BufferSink:
        """Who takes the responses of a step."""
        return BufferSink(self.trainer.buffer, step)

    def began(self, params: Params, step: int) -> None:
        """Rollouts of a step begin, by these weights: once, or in each of its phases."""
        if step != self._rl_step:
            self._rl_step, self._first_step = step, self.trainer.step
        if self.spot is None:
            self.trainer.begin(step)
        else:
            self.spot.prepare(params, step)

    @property
    def trained_this_step(self) -> bool:
        """Whether it has learnt since the rollouts began; in spare time that is nobody's step."""
        return self.spot is None and self.trainer.step != self._first_step

    def after_rollout(self, engine: RolloutEngine, weights: Params) -> None:
        """Train for as many steps as are due; the next rollout draft tokens with what was
        learnt.
        """
        steps, trainer = self._config.drafter.steps_after_rollout, self.trainer
        if steps:
            do_at(
                engine,
                engine.engines[0],
                lambda e: trainer.run_steps(steps, trainer.context(e, e.place(weights))),
            )
        trainer.publish()

    def metrics(self) -> dict[str, float]:
        """Of the steps since the last call, on average; and what there is to learn from."""
        rows, buffer = self.trainer.take_history(), self.trainer.buffer
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

    def saved(self) -> tuple[DrafterState, dict[str, Any]]:
        """What a run's checkpoint holds of it among its arrays, and besides."""
        state, step = self.trainer.snapshot()
        return state, {"step": step, "buffer": self.trainer.buffer.state()}

    def load(self, arrays: DrafterState, state: dict[str, Any], *, exact: bool) -> None:
        """Go on from a run's checkpoint, or where that is not to be `exact`, from a newer one."""
        self.trainer.buffer.load_state(state["buffer"])
        step = int(state["step"])
        if not exact and self.trainer.checkpoints is not None:
            try:
                newest = self.trainer.checkpoints.restore(arrays)
            except NoWholeCheckpointError:
                pass
            else:
                if newest.step > step:
                    arrays, step = newest.arrays, newest.step
        self.trainer.load(arrays, step)


def open_run(
    config: TrainConfig,
    drafter: EagleWeights,
    folder: Path,
    stack: ExitStack,
    clock: Callable[[], float],
    alive: Callable[[], object] = lambda: None,
) -> DrafterRun:
    """A drafter's training, whose checkpoints go into the run folder: the last as `stack` ends.

    `alive` is called while a save that is waited for goes on.
    """
    options, patience = config.drafter, Patience(config.run.hang_limit_s, alive)
    keeps = CheckpointConfig(keep=2, asynchronous=config.checkpoint.asynchronous)
    trainer = DrafterTrainer(
        options,
        config.drafter_training,
        LearnedDrafter(drafter, options.tree),
        DataBuffer(config.data_buffer),
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        checkpoints=stack.enter_context(
            Checkpointer(Folder(folder).folder(FOLDER), keeps, patience)
        ),
    )
    stack.enter_context(_kept(trainer))
    spot = None
    if options.spot and (config.sched.workers > 1 or config.sched.mode == "pipeline"):
        spot = SpotTrainer(trainer, options.min_idle_workers, clock)
    return DrafterRun(config, trainer, spot)


@contextmanager
def _kept(trainer: DrafterTrainer) -> Iterator[None]:
    """What was learnt last is on the disk when a run is done; errors end it as they are."""
    yield
    trainer.save_last()


def warm_up(run: DrafterRun, engine: RolloutEngine, weights: Params) -> None:
    """Compile what training needs on every worker that may train."""
    trainer = run.trainer
    for worker in engine.engines if run.spot is not None else engine.engines[:1]:
        do_at(engine, worker, lambda e: trainer.warm_up(trainer.context(e, e.place(weights))))


def do_at(engine: RolloutEngine, worker: Engine, work: Callable[[Engine], object]) -> None:
    """Call `work` with one of the engine's workers, on its devices."""

    def there() -> None:
        with worker.mesh_context():
            work(worker)

    engine.do(there)
