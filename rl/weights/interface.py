"""The interfaces of a publisher, a subscriber, and of what moves payloads between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl.weights.ages import Age
from rl.weights.offers import VersionId

Payload = Sequence[np.ndarray]  # uint8, one buffer a piece; nobody writes to them


class Carrier(Protocol):
    """Moves payloads. `hold`, `offer` and `drop` are the publisher's end, `receive` the other."""

    def hold(self, payload: Payload, part_bytes: int) -> Any:
        """Make a payload ready for any number of offers; the result is for `offer` and `drop`."""
        ...

    def offer(self, held: Any, lease_s: float) -> Any:
        """Return plain data with which one subscriber can receive, within the lease."""
        ...

    def drop(self, held: Any) -> None:
        """Forget a payload: nobody needs it any more."""
        ...

    def receive(
        self, where: Any, sizes: Sequence[int], part_bytes: int, deadline_s: float
    ) -> list[np.ndarray]:
        """Return a payload of buffers of these sizes.

        Raises CarrierError after `deadline_s` without progress or where the other end is gone,
        DamagedWeights for a `where` that is none.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Staged:
    """Checked weights that are not in use yet: on the devices, and in host memory.

    `host` is empty where both ends see the arrays.
    """

    version: int
    params: Any
    host: Mapping[str, np.ndarray]
    ids: tuple[VersionId, ...]  # by source


class WeightsPublisher(Protocol):
    """The trainer's end. Time is an argument, in seconds of a clock that never goes back."""

    @property
    def newest(self) -> int | None: ...

    def publish(self, version: int, params: Any, now_s: float) -> None:
        """Make `params` the newest version; waits for no subscriber."""
        ...

    def taken(self, subscriber: str, have: VersionId) -> None:
        """Note what a subscriber runs now."""
        ...

    def forget(self, subscriber: str) -> None:
        """Note that a subscriber is gone."""
        ...

    def ages(self, now_s: float) -> dict[str, Age]:
        """Return how old the weights of each subscriber are."""
        ...

    def must_fetch(self, subscriber: str, now_s: float) -> bool:
        """Return whether a subscriber is too far behind to start anything."""
        ...

    def close(self) -> None: ...


class WeightsSubscriber(Protocol):
    """The worker's end."""

    @property
    def version(self) -> int | None: ...

    def fetch(self) -> Staged | None:
        """Stage the newest version beside the one in use; None where that is the newest."""
        ...

    def swap(self, staged: Staged) -> Any:
        """Make staged weights those in use and return them: call it between two rounds."""
        ...
