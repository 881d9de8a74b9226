"""The learned drafter of a run: its weights, how rollouts draft with them, and how they
change.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np

from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext
from spec.eagle import model as eagle
from spec.eagle.config import TreeConfig
from spec.eagle.drafter import EagleDrafter, Weights
from spec.eagle.model import EagleParams, EagleWeights


class LearnedDrafter:
    """One drafter for all workers of a run. Any thread may call it.

    `swap` puts new weights in the place of the old: workers take them up between two rounds.
    They have the same shapes, so that nothing is compiled.
    """

    def __init__(self, drafter: EagleWeights, tree: TreeConfig) -> None:
        self.config, self.draft_ids_U = drafter.config, drafter.draft_ids_U
        self.tree = tree
        self._lock = threading.Lock()
        self._params, self._version = drafter.params, 0
        self._placed: dict[int, tuple[int, EagleParams]] = {}  # by replica

    @property
    def version(self) -> int:
        """How often weights have been swapped."""
        return self._version

    @property
    def made_for(self) -> str:
        """What its programs and their seconds depend on."""
        return repr((self.config, self.tree))

    @property
    def drafter(self) -> EagleWeights:
        """As it is now."""
        return EagleWeights(self.config, self._params, self.draft_ids_U)

    def swap(self, params: EagleParams) -> None:
        """New weights; arrays that nobody donates."""
        with self._lock:
            self._params, self._version = params, self._version + 1

    def drafter_for(self, context: DrafterContext) -> EagleDrafter:
        """The drafter of one worker for one phase."""
        runner = context.runner
        ids = None if self.draft_ids_U is None else runner.put(self.draft_ids_U)
        shared = eagle.frozen(context.spec.params, ids)

        def weights() -> Weights:
            return Weights(self._params_on(runner), shared)

        return EagleDrafter(
            self.config,
            weights,
            self.tree,
            context.spec.sampling,
            context.spec.key,
            features=context.features,
            put=runner.argument,
            zero_rows=runner.zero_rows,
            dtype=runner.dtype,
            num_draft_tokens=runner.config.max_nodes - 1,
        )

    def _params_on(self, runner: ModelRunner) -> EagleParams:
        with self._lock:
            version, params = self._version, self._params
            held = self._placed.get(id(runner))
        if held is None or held[0] != version:
            held = version, jax.tree.map(lambda x: _on(runner, x), params)
            with self._lock:
                self._placed[id(runner)] = held
        return held[1]


def _on(runner: ModelRunner, x: Any) -> jax.Array:
    return runner.put(np.asarray(x).astype(runner.dtype))
