"""Versions of the policy on the host, for rollouts that run ahead and for their checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from models.sharding import put
from models.transformer import Params
from rl.learner import trainer
from rl.learner.gathering import from_shards, host_copy, on_host, own_shards
from rl.loop.generation import System


@dataclasses.dataclass(frozen=True, eq=False)
class HostWeights:
    """A version in the engine's dtype; the update that comes consumes the device's buffers.

    `whole` is what this process's workers are given. Where another process speaks with them it is
    a tree of None, and `shards` are what this process's devices had of it.
    """

    whole: Params
    shards: Any = None

    def put_as(self, params: Params) -> Params:
        """Return the weights laid out on devices as `params` are."""
        if self.shards is None:
            return jax.tree.map(lambda x, p: put(x, p.sharding), self.whole, params)
        return from_shards(self.shards, params)


def copied(system: System, params: Params) -> HostWeights:
    """Return a version on the host of every process; all of a run's call it together."""
    shares = system.shares
    if shares.processes.alone or not shares.by_first:
        return HostWeights(on_host(system.weights(params)))
    rounded, keep = trainer.cast_params(params, system.engine.dtype), shares.processes.is_first

    def one(x: jax.Array) -> np.ndarray | None:
        copy = host_copy(x, keep=keep)
        return None if copy is None else np.array(copy)

    return HostWeights(jax.tree.map(one, rounded), None if keep else own_shards(rounded))
