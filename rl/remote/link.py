"""One program's end of a link to another, over a channel of bytes with deadlines.

Nothing is tried twice: a lost answer does not say whether the work was done, so that a link that
has failed once is closed, and the other program ended.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

from rl.remote.messages import CODEC, Failed
from rl.remote.wire import Codec, WireError
from rl.runtime.waits import ProgramLost

T = TypeVar("T")


class Channel(Protocol):
    """Takes messages to another program, and brings an answer to each."""

    def submit(self, message: bytes) -> Future[bytes]:
        """Send a message; return at once. The future fails where the other program has ended."""
        ...

    def end(self) -> None:
        """End the other program, if it is there; return at once."""
        ...


class RemoteError(RuntimeError):
    """The other program could not do what it was asked; the message is its own."""


class Link:
    """Asks another program; any thread may. Closed once and for all where it fails."""

    def __init__(
        self, name: str, channel: Channel, deadline_s: float, codec: Codec = CODEC
    ) -> None:
        self.name, self.deadline_s, self._codec = name, deadline_s, codec
        self._channel, self._lock = channel, threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self.lost: ProgramLost | None = None

    def submit(self, message: Any) -> Future[Any]:
        """Send a message, or the bytes of one; the future has RemoteError or ProgramLost, or the
        answer.
        """
        answer: Future[Any] = Future()
        data = message if isinstance(message, bytes) else self._codec.encode(message)
        with self._lock:
            if self.lost is not None:
                raise self.lost
            self._waiting.add(answer)
        try:
            self._channel.submit(data).add_done_callback(lambda came: self._settle(answer, came))
        except RuntimeError as error:
            self.lose(str(error))
        return answer

    def ask(self, message: Any, kind: type[T], timeout_s: float | None = None) -> T:
        """Return the answer to a message. Raises RemoteError, or ProgramLost after the deadline."""
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        asked = self.submit(message)
        try:
            answer = asked.result(limit_s)
        except FutureTimeoutError:
            what = type(message).__name__
            self.lose(f"no answer to {what} for {limit_s:.1f} s", silent=True)
            answer = asked.result(0)  # what it was lost by
        return self.expect(answer, kind)

    def expect(self, answer: Any, kind: type[T]) -> T:
        """Return an answer if it is of this kind; else the link is lost."""
        if not isinstance(answer, kind):
            self.lose(f"expected {kind.__name__}, got {type(answer).__name__}")
            raise self.lost or AssertionError
        return answer

    def lose(self, why: str, *, silent: bool = False) -> None:
        """Close the link and end the other program; what waits for answers fails."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = ProgramLost(f"{self.name}: {why}")
            self.lost.silent = silent
            waiting, self._waiting = self._waiting, set()
        for answer in waiting:
            _fail(answer, self.lost)
        self._channel.end()

    def _settle(self, answer: Future[Any], came: Future[bytes]) -> None:
        error = came.exception()
        if error is not None:
            self.lose(f"{type(error).__name__}: {str(error).strip()[:300] or 'it has ended'}")
            return
        try:
            record = self._codec.decode(came.result())
        except WireError as bad:
            self.lose(f"it does not speak as it should: {bad}")
            return
        with self._lock:
            self._waiting.discard(answer)
        try:
            if isinstance(record, Failed):
                answer.set_exception(RemoteError(f"{record.kind}: {record.message}"))
            else:
                answer.set_result(record)
        except InvalidStateError:  # it was lost meanwhile
            assert self.lost is not None


def _fail(answer: Future[Any], error: Exception) -> None:
    try:
        answer.set_exception(error)
    except InvalidStateError:  # it came this very moment
        assert answer.done()
