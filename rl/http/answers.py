"""Results of requests, which clients fetch later and possibly more than once."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from typing import Any

from reprise.rl.http import wire
from reprise.rl.http.account import Account, Hold

MAX_BYTES = 2**28  # of ready results, fetched or not
OVERHEAD_BYTES = 1024  # of an answer besides its result, for objects, names and table entries


@dataclasses.dataclass(eq=False, slots=True)
class Answer:
    """A pending or ready result: bytes of a message or JSON object; an error has `error`."""

    held_bytes: int = 0  # of the account, until the result is ready
    keeps_body: bool = False
    ready: asyncio.Event | None = None  # while a client waits
    body: bytes | None = None
    media_type: str = wire.CONTENT_TYPE

    @property
    def num_bytes(self) -> int:
        """The memory of a result."""
        return len(self.body or b"") + OVERHEAD_BYTES

    def set(self, result: bytes | dict[str, Any]) -> None:
        if isinstance(result, bytes):
            self.body = result
        else:
            self.body = json.dumps(result).encode()
            self.media_type = "application/json"
        if self.ready is not None:
            self.ready.set()
            self.ready = None


class Answers:
    """Answers by request id; the oldest ready answers are dropped above `max_bytes` in total.

    A pending answer holds bytes of the account. All calls must come from the event loop.
    """

    def __init__(self, account: Account, max_bytes: int = MAX_BYTES) -> None:
        self._account = account
        self._max_bytes = max_bytes
        self._bytes = 0
        self._answers: dict[str, Answer] = {}
        self._ready = collections.deque[str]()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_waiting(self) -> int:
        return len(self._answers) - len(self._ready)

    def open(self, request_id: str, num_bytes: int = 0) -> None:
        """Open the answer of an operation that takes `num_bytes`. Raises Busy."""
        num_bytes += OVERHEAD_BYTES
        self._account.take(num_bytes)
        self._answers[request_id] = Answer(num_bytes)

    def close(self, request_id: str) -> None:
        """Remove the answer of an operation that does not run."""
        self._account.give(self._answers.pop(request_id).held_bytes)

    def keep(self, request_id: str | None, hold: Hold) -> None:
        """Hold the bytes of a request body until the operation has a result.

        The bytes of a repeated request are not kept, since it starts no operation.
        """
        answer = self._answers.get(request_id or "")
        if answer is not None and answer.body is None and not answer.keeps_body:
            answer.held_bytes += hold.hand_over()
            answer.keeps_body = True

    def set(self, request_id: str, result: bytes | dict[str, Any]) -> None:
        answer = self._answers[request_id]
        if answer.body is not None:  # the operation was answered when its model was dropped
            return
        answer.set(result)
        self._account.give(answer.held_bytes)
        self._ready.append(request_id)
        self._bytes += answer.num_bytes
        while self._bytes > self._max_bytes and len(self._ready) > 1:
            self._bytes -= self._answers.pop(self._ready.popleft()).num_bytes

    async def fetch(self, request_id: str, limit_s: float) -> Answer | None:
        """Return an answer once it is ready, or None after `limit_s`. Raises KeyError."""
        answer = self._answers[request_id]
        if answer.body is None:
            answer.ready = answer.ready or asyncio.Event()
            try:
                await asyncio.wait_for(answer.ready.wait(), limit_s)
            except TimeoutError:
                return None
        return answer
