"""A record of engine launches, to compare between the processes of one mesh.

Different programs hang in a collective; different inputs corrupt all tokens. B = slots.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple, Protocol

import numpy as np

from reprise.rl.slots.slot_table import SlotTable


class Launch(NamedTuple):
    """A program about to be launched, or tokens that were fetched."""

    program: str
    sizes: tuple[int, ...]
    request_ids_B: np.ndarray
    tokens_B: np.ndarray  # of prompt and response
    busy_B: np.ndarray  # other rows have no meaning

    def __str__(self) -> str:
        sizes = " × ".join(map(str, self.sizes))
        busy_2A = np.stack([self.request_ids_B, self.tokens_B])[:, self.busy_B]
        pairs = zip(*busy_2A.tolist(), strict=True)
        requests = ", ".join(f"{request} ({tokens})" for request, tokens in pairs)
        return f"{self.program} of {sizes}, requests (tokens): {requests}"


class Lockstep(Protocol):
    """An observer of every engine launch, called in the thread of the engine."""

    def launched(self, digest: int, what: object) -> None:
        """Record a launch: a 32-bit digest of all launches so far, and `what`, for messages."""
        ...


class LaunchRecord:
    """The digest of the launches of one engine."""

    def __init__(self, observer: Lockstep) -> None:
        self._observer = observer
        self._digest = 0

    def note(
        self, program: str, sizes: tuple[int, ...], table: SlotTable, *inputs: np.ndarray | None
    ) -> None:
        """Record a launch or a fetch of these sizes for the requests of a table."""
        rows = table.request_ids_B, table.total_tokens_B, table.busy_B
        digest = zlib.crc32(repr((program, sizes)).encode(), self._digest)
        for x in (*rows, *inputs):
            if x is not None:
                digest = zlib.crc32(np.ascontiguousarray(x).data, digest)
        self._digest = digest
        self._observer.launched(digest, Launch(program, sizes, *(x.copy() for x in rows)))
