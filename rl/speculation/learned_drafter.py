"""The learned drafter of a run: its weights, which change, and the drafters that workers use."""

from __future__ import annotations

import threading

import jax
import numpy as np

from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext
from rl.speculation.device_drafters import PerRunner
from spec.eagle import model as eagle
from spec.eagle.config import TreeConfig
from spec.eagle.drafter import EagleDrafter
from spec.eagle.model import DeviceWeights, EagleParams, EagleWeights


class LearnedDrafter:
    """The drafter that all workers of a run share. Any thread may call it.

    `swap` replaces the weights; workers use the new ones from their next round on. These have the
    same shapes, so that nothing is compiled.
    """

    def __init__(self, drafter: EagleWeights, tree: TreeConfig) -> None:
        self.config, self.draft_ids_U = drafter.config, drafter.draft_ids_U
        self.tree = tree
        self._lock = threading.Lock()
        self._params, self._version = drafter.params, 0
        self._on_devices = PerRunner[EagleParams]()

    @property
    def version(self) -> int:
        """The number of times that weights have been swapped."""
        return self._version

    @property
    def newest(self) -> tuple[int, EagleParams]:
        """The version and the weights that belong together."""
        with self._lock:
            return self._version, self._params

    @property
    def made_for(self) -> str:
        """A text that changes with its programs and their times."""
        return repr((self.config, self.tree))

    @property
    def max_depth(self) -> int:
        """The most draft tokens on a path."""
        return self.tree.max_depth

    @property
    def drafter(self) -> EagleWeights:
        """The drafter with its newest weights."""
        return EagleWeights(self.config, self._params, self.draft_ids_U)

    def swap(self, params: EagleParams) -> None:
        """Replace the weights by arrays that nobody donates."""
        with self._lock:
            self._params, self._version = params, self._version + 1

    def drafter_for(self, context: DrafterContext) -> EagleDrafter:
        """Return the drafter of one worker for one rollout."""
        runner, spec = context.runner, context.spec
        ids_U = None if self.draft_ids_U is None else runner.put(self.draft_ids_U)
        shared = eagle.frozen(spec.params, ids_U, runner.made)
        return EagleDrafter(
            self.config,
            lambda: DeviceWeights(self._params_on(runner), shared),
            self.tree,
            spec.sampling,
            runner.put(spec.key),
            states=context.states,
            runner=runner,
            num_draft_tokens=runner.config.max_nodes - 1,
        )

    def _params_on(self, runner: ModelRunner) -> EagleParams:
        version, params = self.newest

        def placed() -> EagleParams:
            if runner.makes_shapes:
                return jax.tree.map(lambda x: runner.put(runner.cast(x)), params)
            return jax.tree.map(lambda x: runner.put(runner.cast(np.asarray(x))), params)

        return self._on_devices.get(runner, placed, version)
