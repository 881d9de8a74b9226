"""The interface of a carrier, which moves payloads from a publisher to its subscribers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Payload = Sequence[np.ndarray]  # uint8, one read-only buffer a piece


class Carrier(Protocol):
    """Moves payloads. The publisher calls `hold`, `offer` and `drop`, the subscriber `receive`."""

    def hold(self, payload: Payload) -> Any:
        """Store a payload for any number of offers; return its handle."""
        ...

    def offer(self, held: Any) -> Any:
        """Return plain data with which one subscriber can receive the payload."""
        ...

    def drop(self, held: Any) -> None:
        """Delete a payload."""
        ...

    def receive(self, where: Any, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return a payload of buffers of these sizes.

        Raises CarrierError if the payload is gone, DamagedWeights if `where` or the payload is
        invalid.
        """
        ...
