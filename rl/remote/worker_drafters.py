"""The drafters on the device of a worker's program, and its part in training one of them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import jax
import numpy as np

from models.transformer import Params
from rl.drafter_training.trainer import empty_batch
from rl.engine.engine import Engine
from rl.remote.drafter_messages import (
    Drafters,
    DrafterWeights,
    Gradient,
    Gradients,
    arrays_of,
    params_of,
)
from rl.remote.wire import WireError
from rl.speculation.config import DraftModelConfig
from rl.speculation.device_drafters import DeviceDrafterSource
from rl.speculation.draft_model import DraftModel
from rl.speculation.learned_drafter import LearnedDrafter
from spec.budget.config import LEARNED, MODEL
from spec.eagle import model as eagle
from spec.eagle import training as drafter_training
from spec.eagle.batch import DrafterBatch
from spec.eagle.model import EagleParams, EagleWeights


def folder_here(model: DraftModelConfig) -> Path:
    """Return a draft model's folder. Raises WireError where this host has none."""
    folder = Path(str(model.directory))
    if not folder.exists():
        raise WireError(
            f"expected the draft model {folder} on {socket.gethostname()}, where a worker drafts "
            "with it: put the same folder there"
        )
    return folder


class WorkerDrafters:
    """The drafters on a worker's devices, by the names of the sources.

    A draft model is read from its folder here, but for its weights where only drafting programs
    draft with it. A learned drafter has random weights until it is brought others.
    """

    def __init__(self, asked: Drafters) -> None:
        self.by_name: dict[str, DeviceDrafterSource] = {}
        self._told, self._asked = asked, asked.learned
        self._learned: LearnedDrafter | None = None
        self._lock = threading.Lock()
        self._training: tuple[int, EagleParams] | None = None  # before which step
        if asked.model is not None:
            read = DraftModel.load if self._has_model else DraftModel.elsewhere
            self.by_name[MODEL] = read(asked.model)
        if asked.learned is not None:
            config, ids_U = asked.learned.config, asked.learned.draft_ids_U
            first = EagleWeights(config, eagle.init(config, jax.random.key(0)), ids_U)
            self._learned = self.by_name[LEARNED] = LearnedDrafter(first, asked.learned.tree)

    @property
    def here(self) -> dict[str, DeviceDrafterSource]:
        """Return those that draft on these devices, and not only on those of drafting programs."""
        has_model = self._has_model
        return {n: drafter for n, drafter in self.by_name.items() if n != MODEL or has_model}

    @property
    def _has_model(self) -> bool:
        """Return whether a draft model drafts here: for all requests, or for copies."""
        return not self._told.apart or self._told.copies

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """The layers whose outputs the engine keeps; None where nobody reads hidden states."""
        return None if self._learned is None else self._learned.config.feature_layers

    @property
    def learned(self) -> LearnedDrafter:
        if self._learned is None:
            raise WireError("expected a learned drafter in Hello before its weights")
        return self._learned

    def take(self, told: DrafterWeights) -> None:
        """Take weights: a rollout drafts with them from its next round on."""
        params = params_of(self.learned.config, told.arrays)
        if told.use == "drafts":
            self.learned.swap(params)
            return
        with self._lock:
            self._training = told.version, params

    def gradients(self, asked: Gradient, engine: Engine, policy: Params) -> Gradients:
        """Return the gradient of a micro-batch; `policy` lies on the engine's devices."""
        with self._lock:
            at = self._training
        if at is None or at[0] != asked.step:
            have = "none" if at is None else f"those of step {at[0]}"
            raise WireError(f"expected the drafter's weights of step {asked.step}, got {have}")
        states, width = asked.hidden_BTW, self.learned.config.hidden_width
        if (states.shape[-1], states.dtype) != (width, engine.dtype):
            raise WireError(
                f"expected states of {width} values of {engine.dtype}, got {states.shape[-1]} of "
                f"{states.dtype}"
            )
        return self._gradients(at[1], asked.batch, engine, policy)

    def compile(self, shape: tuple[int, int], engine: Engine, policy: Params) -> None:
        """Compile the gradient of micro-batches of [rows, tokens]."""
        batch = empty_batch(shape, self.learned.config, engine.dtype)
        _, params = self.learned.newest
        self._gradients(params, batch, engine, policy)

    def _gradients(
        self,
        params: EagleParams,
        batch: DrafterBatch,
        engine: Engine,
        policy: Params,
    ) -> Gradients:
        asked, ids_U = self._asked, self.learned.draft_ids_U
        assert asked is not None, "there is a learned drafter"
        with engine.mesh_context():
            shared = eagle.frozen(policy, None if ids_U is None else engine.put(ids_U))
            grads, metrics = drafter_training.gradients(
                jax.tree.map(lambda x: engine.put(np.asarray(x)), params),
                shared,
                jax.tree.map(engine.argument, batch),
                np.float32(asked.temperature),
                config=asked.config,
                training=asked.training,
            )
            found = {name: float(x) for name, x in jax.device_get(metrics).items()}
            return Gradients(arrays_of(grads), found)
