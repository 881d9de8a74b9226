"""Where a phase's requests come from while it runs, and where those go that leave half done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl.trajectory import PartialRequest, RequestChunk


class RequestSource(Protocol):
    """One worker's side of a rollout that others decide on.

    `most_requests` run at once at most, none of more than `longest_tokens` of prompt and
    response together; all that run hold `kv_tokens` positions at most.
    """

    most_requests: int
    longest_tokens: int
    kv_tokens: int

    def take(self, *, wait: bool) -> Sequence[RequestChunk] | None:
        """What is to start now; None once nothing will come any more.

        `wait`: nothing runs, so come back only with something, or None.
        """
        ...

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        """How many more tokens a request may have in its row; 0: it leaves the worker."""
        ...

    def park(self, leaving: Sequence[PartialRequest]) -> None:
        """Take requests that leave, with their keys and values."""
        ...
