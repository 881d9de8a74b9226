"""The learned drafter in a process that neither drafts with it nor trains it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import Params
from rl.config import Inputs, TrainConfig
from rl.drafter_run import DrafterRun, first_drafter, idle_workers_train
from rl.drafter_training.config import shape_of
from rl.engine.engine import RolloutEngine
from rl.speculation.learned_drafter import LearnedDrafter
from spec.eagle import training as drafter_training
from spec.eagle.model import EagleWeights
from spec.eagle.training import DrafterState


class DrafterElsewhere:
    """Stands for the drafter of process 0, which speaks with the workers. Made by `open_elsewhere`.

    All processes write and read a checkpoint together: here are arrays of the same shapes, of which
    nothing is kept. `learned` has shapes in the place of weights.
    """

    trained_this_step, spot = False, None

    def __init__(
        self, learned: LearnedDrafter, template: DrafterState, *, waits_for_training: bool
    ) -> None:
        self.learned, self.template = learned, template
        self.waits_for_training = waits_for_training

    def sink(self, step: int) -> None:
        """No response is generated here."""

    def began(self, params: Params, step: int) -> None:
        """Nothing drafts here."""

    def after_rollout(self, engine: RolloutEngine, weights: Params) -> None:
        """Process 0 trains."""

    def warm_up(self, engine: RolloutEngine, weights: Params) -> None:
        """Nothing is compiled."""

    def mark(self) -> None:
        """Nothing was caught."""

    def undo(self) -> None:
        """Nothing was caught."""

    def metrics(self) -> dict[str, float]:
        return {}

    def saved(self) -> tuple[DrafterState, dict[str, Any]]:
        """Return arrays that only process 0's have a value of, and no state."""
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.template)
        return jax.device_put(zeros), {}

    def load(self, arrays: DrafterState, state: dict[str, Any], *, exact: bool) -> None:
        """Process 0 continues from a checkpoint."""


AnyDrafter = DrafterRun | DrafterElsewhere


def open_elsewhere(config: TrainConfig, inputs: Inputs) -> DrafterElsewhere:
    """Return what stands for the run's drafter; of a folder's the shapes are read alone."""
    options, training = config.drafter, config.drafter_training

    def state() -> DrafterState:
        start = first_drafter(options, training, inputs.model, config.run.seed, ())
        return drafter_training.state_of(training, jax.tree.map(jnp.asarray, start.params))

    template: DrafterState = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(state)
    )
    shape = shape_of(options, training, inputs.model)
    learned = LearnedDrafter(EagleWeights(shape, template.params), options.tree)
    waits = not idle_workers_train(config)
    return DrafterElsewhere(learned, template, waits_for_training=waits)
