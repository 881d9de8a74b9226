"""The unfinished requests of a session, with states that are known, pooled, or in transit.

A worker promises the state of a leaving request under a ticket; starts on other workers wait until
the state arrives. Beyond `pool_bytes`, states are kept without keys and values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from reprise.rl.records.stats import PoolCounts
from reprise.rl.records.trajectory import HostKv, PartialRequest, Prefix, Request
from reprise.sched.protocol import Return, Start
from reprise.sched.request import Kv

Waiting = Start | Return


@dataclasses.dataclass(eq=False, slots=True)
class LiveRequest:
    """An unfinished request: its last known state, and the actions that wait for a newer state.

    `generated_tokens` exceeds the prefix length if a lost worker had reported more tokens.
    """

    step: int
    request: Request
    prefix: Prefix | None = None
    kv: HostKv | None = None
    generated_tokens: int = 0
    ticket: int | None = None
    waiting: list[Waiting] = dataclasses.field(default_factory=list)

    def start(self, kv: HostKv | None, max_tokens: int) -> PartialRequest:
        """Return the request to send to a worker; lost tokens are added to `max_tokens`."""
        known = 0 if self.prefix is None else len(self.prefix.response_ids)
        limit = max_tokens + self.generated_tokens - known
        return PartialRequest(self.request, self.prefix, kv, limit)


class RequestTable:
    """Live requests by id, and the tickets of the states that workers promised."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool_bytes = pool_bytes
        self._live: dict[int, LiveRequest] = {}
        self._tickets: dict[int, tuple[int, int]] = {}  # → (request, worker)
        self._numbers = itertools.count()
        self.num_bytes = 0  # of keys and values
        self.counts = PoolCounts()

    def __getitem__(self, request_id: int) -> LiveRequest:
        return self._live[request_id]

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, step: int, request: Request) -> None:
        self._live[request.request_id] = LiveRequest(step, request)

    def remove(self, request_id: int) -> None:
        """Remove a finished or dropped request."""
        live = self._live.pop(request_id)
        self.withdraw(live)
        self.take_kv(live)

    def promise(self, request_id: int, worker_id: int) -> int:
        """Return a new ticket for the request state that a worker will send."""
        self._live[request_id].ticket = ticket = next(self._numbers)
        self._tickets[ticket] = request_id, worker_id
        return ticket

    def withdraw(self, live: LiveRequest) -> None:
        """Cancel the ticket of a request, if it has one."""
        if live.ticket is not None:
            del self._tickets[live.ticket]
            live.ticket = None

    def redeem(self, ticket: int, state: PartialRequest | None) -> list[Waiting]:
        """Store a promised state, if it arrived; return the actions that waited for the ticket."""
        if ticket not in self._tickets:
            return []
        live = self._live[self._tickets[ticket][0]]
        self.withdraw(live)
        if state is not None:
            self.keep(live, state)
        waiting = live.waiting
        live.waiting = []
        return waiting

    def lose(self, worker_id: int) -> Iterator[Waiting]:
        """Cancel the tickets of a lost worker; yield the actions that waited for them."""
        for ticket, (_, owner) in list(self._tickets.items()):
            if owner == worker_id:
                yield from self.redeem(ticket, None)

    def keep(self, live: LiveRequest, state: PartialRequest) -> None:
        """Store a state, with its keys and values if the pool has room."""
        live.prefix = state.prefix
        kv = state.kv
        if kv is None:
            return
        self.counts += PoolCounts(moved_bytes=kv.num_bytes)
        if self.num_bytes + kv.num_bytes <= self._pool_bytes:
            self.num_bytes += kv.num_bytes
            live.kv = kv
        else:
            self._drop(kv)

    def start(self, live: LiveRequest, start: Start) -> PartialRequest:
        """Return a request to send to a worker, with keys and values if `start` uses the pool."""
        kv = self.take_kv(live)
        if kv is not None and start.kv is not Kv.POOL:
            self._drop(kv)
            kv = None
        if kv is not None:
            self.counts += PoolCounts(moved_bytes=kv.num_bytes)
        return live.start(kv, start.max_tokens)

    def take_kv(self, live: LiveRequest) -> HostKv | None:
        kv = live.kv
        live.kv = None
        if kv is not None:
            self.num_bytes -= kv.num_bytes
        return kv

    def _drop(self, kv: HostKv) -> None:
        self.counts += PoolCounts(dropped_bytes=kv.num_bytes, dropped_tokens=kv.num_tokens)
