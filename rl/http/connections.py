"""Connections with a limit on their number, and on the time for a header or a body."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 4096  # a Tinker client opens up to 1,000
FILES = 256  # of the process besides its connections
HEADER_S = 10.0
BODY_S = 120.0
SEND_S = 120.0  # for a client to take the next part of an answer


class Connection(H11Protocol):
    """A connection that is closed if its client takes too long.

    At the limit, the connection that has waited longest for a header is closed, so that half-sent
    requests keep no client out. `without_header` has the waiting connections, oldest first.
    """

    def __init__(
        self,
        *given: Any,
        without_header: dict[Connection, None],
        max_connections: int,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self._without_header = without_header
        self._max_connections = max_connections
        self._phase: object = None
        self._deadline: asyncio.TimerHandle | None = None
        self._slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_connections and self._without_header:
            next(iter(self._without_header)).close()
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._wait(None)
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow = self._slow or self.loop.call_later(SEND_S, self.close)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def close(self) -> None:
        """Abort the connection; a running request then sees that the client has disconnected."""
        self.connections.discard(self)
        self._without_header.pop(self, None)
        self.transport.abort()

    def _watch(self) -> None:
        """Start the deadline for the next header or body, if the deadline has changed."""
        state = self.conn.their_state
        is_idle = self.timeout_keep_alive_task is not None
        if state is h11.IDLE and not is_idle:  # uvicorn closes connections idle after an answer
            self._wait(HEADER_S)
        elif state is h11.SEND_BODY:
            self._wait(BODY_S)
        else:
            self._wait(None)
            if state is h11.DONE and self.conn.trailing_data[0]:
                self.close()  # the client sent a request before the last answer

    def _wait(self, limit_s: float | None) -> None:
        if limit_s == self._phase:
            return
        self._phase = limit_s
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._without_header.pop(self, None)
        if limit_s is not None:
            self._deadline = self.loop.call_later(limit_s, self.close)
        if limit_s == HEADER_S:
            self._without_header[self] = None


def configured(app: Any, **network: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of a server for `app`."""
    protocol: Any = partial(
        Connection, without_header=dict[Connection, None](), max_connections=_room()
    )
    return uvicorn.Config(
        app, http=protocol, ws="none", timeout_graceful_shutdown=1, log_level="error", **network
    )


def _room() -> int:
    """Raise the limit of open files, and return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - FILES))
