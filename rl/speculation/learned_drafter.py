"""The learned drafter of a run: its weights, which change, and the drafters that workers use."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np

from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext
from rl.speculation.device_drafters import PerRunner
from spec.config import SamplingConfig
from spec.draft_cache.drafting import StateSource
from spec.eagle import model as eagle
from spec.eagle.config import TreeConfig
from spec.eagle.drafter import EagleDrafter
from spec.eagle.model import DeviceWeights, EagleParams, EagleWeights, SharedParams


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
        given = runner, self.shared(context), spec.sampling, spec.key, context.states
        most_tokens = runner.config.max_nodes - 1
        return self.made(*given, max_depth=self.max_depth, num_draft_tokens=most_tokens)

    def shared(self, context: DrafterContext) -> SharedParams:
        """Return what a rollout's policy gives to its drafters, on the policy's devices."""
        ids_U = self.draft_ids_U
        ids = None if ids_U is None else context.runner.put(ids_U)
        return eagle.frozen(context.spec.params, ids, context.runner.made)

    def made(
        self,
        runner: ModelRunner,
        shared: SharedParams,
        sampling: SamplingConfig,
        key: jax.Array,
        states: StateSource,
        *,
        max_depth: int,
        num_draft_tokens: int,
    ) -> EagleDrafter:
        """Return a drafter on these devices, where `shared` and the `states` are."""
        return EagleDrafter(
            self.config,
            lambda: DeviceWeights(self._params_on(runner), shared),
            dataclasses.replace(self.tree, max_depth=max_depth),
            sampling,
            runner.put(key),
            states=states,
            runner=runner,
            num_draft_tokens=num_draft_tokens,
        )

    def _params_on(self, runner: ModelRunner) -> EagleParams:
        version, params = self.newest

        def placed() -> EagleParams:
            if runner.makes_shapes:
                return jax.tree.map(lambda x: runner.put(runner.cast(x)), params)
            return jax.tree.map(lambda x: runner.put(runner.cast(np.asarray(x))), params)

        return self._on_devices.get(runner, placed, version)
