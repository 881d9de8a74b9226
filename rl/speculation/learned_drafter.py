"""The learned drafter of a run: its weights, how rollouts guess with them, and how they change."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from rl.engine.model_runner import Replica
from rl.engine.speculate import Site
from spec.eagle import model as eagle
from spec.eagle.drafter import EagleDrafter, TreeConfig, Weights
from spec.eagle.model import Drafter, Eagle


class LearnedDrafter:
    """One drafter for all workers of a run. Any thread may call it.

    `swap` puts new weights in the place of the old: workers take them up between two rounds.
    They have the same shapes, so that nothing is compiled.
    """

    def __init__(self, drafter: Drafter, tree: TreeConfig) -> None:
        self.config, self.draft_ids_U = drafter.config, drafter.draft_ids_U
        self.tree = tree
        self._lock = threading.Lock()
        self._params, self._version = drafter.params, 0
        self._placed: dict[int, tuple[int, Eagle]] = {}  # by replica

    @property
    def version(self) -> int:
        """How often weights have been swapped."""
        return self._version

    @property
    def made_for(self) -> str:
        """What its programs and their seconds depend on."""
        return repr((self.config, self.tree))

    @property
    def drafter(self) -> Drafter:
        """As it is now."""
        return Drafter(self.config, self._params, self.draft_ids_U)

    def swap(self, params: Eagle) -> None:
        """New weights; arrays that nobody donates."""
        with self._lock:
            self._params, self._version = params, self._version + 1

    def drafter_at(self, site: Site) -> EagleDrafter:
        """The drafter of one worker for one phase."""
        replica = site.replica
        ids = None if self.draft_ids_U is None else replica.put(self.draft_ids_U)
        shared = eagle.frozen(site.params, ids)

        def weights() -> Weights:
            return Weights(self._params_on(replica), shared)

        tree = self.tree
        if replica.context_tokens:  # such noise depends on the tokens themselves
            tree = dataclasses.replace(tree, guess="likeliest")
        return EagleDrafter(
            self.config,
            weights,
            tree,
            site.sampling,
            site.key,
            features=site.features,
            put=replica.argument,
            zero_rows=replica.zero_rows,
            dtype=replica.dtype,
            num_guesses=replica.config.max_nodes - 1,
        )

    def _params_on(self, replica: Replica) -> Eagle:
        with self._lock:
            version, params = self._version, self._params
            held = self._placed.get(id(replica))
        if held is None or held[0] != version:
            held = version, jax.tree.map(lambda x: _on(replica, x), params)
            with self._lock:
                self._placed[id(replica)] = held
        return held[1]


def _on(replica: Replica, x: Any) -> jax.Array:
    return replica.put(np.asarray(x).astype(replica.dtype))
