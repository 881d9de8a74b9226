"""Weights from one part of a program to another: laid out anew, on the devices.

The same interface as between programs, without bytes, checksums and deltas: both ends see the
arrays.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rl.weights.ages import AgedPublisher
from rl.weights.config import WeightsConfig
from rl.weights.interface import Staged
from rl.weights.offers import VersionId

_FINGERPRINT = "0" * 64  # nothing is compared: there is one publisher


@partial(jax.jit, static_argnames=("shardings",))
def _relaid(leaves: tuple[Any, ...], *, shardings: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies, so that what is donated on one side stays whole on the other."""
    return tuple(
        jax.lax.with_sharding_constraint(jnp.copy(x), s)
        for x, s in zip(leaves, shardings, strict=True)
    )


class InProgramPublisher(AgedPublisher):
    """Publishes weights to subscribers of the same program.

    `publish` keeps the arrays themselves, not a copy: what is published has to stay whole until
    subscribers have staged it, or the next version is published.
    """

    def __init__(self, config: WeightsConfig) -> None:
        super().__init__(config.most_versions_behind)
        self._newest: tuple[int, Any] | None = None

    @property
    def newest(self) -> int | None:
        """The newest version."""
        with self._lock:
            return self._newest[0] if self._newest else None

    def publish(self, version: int, params: Any, now_s: float) -> None:
        """Make `params` the newest version. Versions grow."""
        with self._lock:
            if self._newest and version <= self._newest[0]:
                raise ValueError(
                    f"expected a version above {self._newest[0]}, the newest, got {version}"
                )
            self._newest = version, params
            self._ages.published(version, now_s)

    def weights(self) -> tuple[int, Any]:
        """Return the newest version; ValueError where there is none."""
        with self._lock:
            if self._newest is None:
                raise ValueError("expected weights to be published before they are asked for")
            return self._newest

    def close(self) -> None:
        with self._lock:
            self._newest = None


class InProgramSubscriber:
    """Lays a publisher's weights out as `shardings`, a tree of shardings, says."""

    def __init__(self, publisher: InProgramPublisher, shardings: Any) -> None:
        self._publisher = publisher
        self._shardings = tuple(jax.tree.leaves(shardings))
        self._in_use: Staged | None = None

    @property
    def version(self) -> int | None:
        """The version in use."""
        return self._in_use.version if self._in_use else None

    def have(self) -> VersionId | None:
        return self._in_use.ids[0] if self._in_use else None

    def fetch(self) -> Staged | None:
        """Stage the newest version; None where it is in use."""
        version, params = self._publisher.weights()
        if version == self.version:
            return None
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, self._shardings, strict=True)
        if any(x.sharding.device_set != s.device_set for x, s in pairs):
            placed = jax.device_put(leaves, list(self._shardings), may_alias=False)
        else:
            placed = _relaid(tuple(leaves), shardings=self._shardings)
        params = jax.block_until_ready(jax.tree.unflatten(tree, placed))
        return Staged(version, params, {}, (VersionId(version, _FINGERPRINT),))

    def swap(self, staged: Staged) -> Any:
        """Make staged weights those in use and return them: call it between two rounds."""
        self._in_use = staged
        return staged.params
