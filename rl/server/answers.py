"""The results of requests, which clients fetch later, perhaps more than once."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from typing import Any

MAX_BYTES = 2**28  # of results that have been fetched, or wait to be


@dataclasses.dataclass(eq=False)
class Answer:
    """A result to come: a message's bytes, or a JSON object; an error is one with `error`."""

    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    message: bytes | None = None
    content: dict[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.message or b"") + len(json.dumps(self.content))

    def set(self, result: bytes | dict[str, Any]) -> None:
        if isinstance(result, bytes):
            self.message = result
        else:
            self.content = result
        self.ready.set()


class Answers:
    """Answers by request id; the oldest ready ones go once all have more than `max_bytes`.

    All calls are made in the event loop.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._answers: dict[str, Answer] = {}
        self._ready = collections.deque[str]()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_waiting(self) -> int:
        return len(self._answers) - len(self._ready)

    def open(self, request_id: str) -> None:
        self._answers[request_id] = Answer()

    def set(self, request_id: str, result: bytes | dict[str, Any]) -> None:
        answer = self._answers[request_id]
        answer.set(result)
        self._ready.append(request_id)
        self._bytes += answer.num_bytes
        while self._bytes > self._max_bytes and len(self._ready) > 1:
            self._bytes -= self._answers.pop(self._ready.popleft()).num_bytes

    async def fetch(self, request_id: str, limit_s: float) -> Answer | None:
        """Return an answer once it is ready, or None after `limit_s`. Raises KeyError."""
        answer = self._answers[request_id]
        try:
            await asyncio.wait_for(answer.ready.wait(), limit_s)
        except TimeoutError:
            return None
        return answer
