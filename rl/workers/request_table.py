"""The unfinished requests of a session: their states as they are known, pooled, or on their way.

A request that leaves a worker is promised under a ticket until its state comes; starts of it on
other workers wait for that. Beyond `pool_bytes` states are kept without keys and values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from reprise.rl.engine.stats import PoolCounts
from reprise.rl.records.trajectory import HostKv, PartialRequest, Prefix, Request
from reprise.sched.protocol import Return, Start
from reprise.sched.request import Kv

Waiting = Start | Return


@dataclasses.dataclass(eq=False, slots=True)
class LiveRequest:
    """A request that has not ended: its last known state, and the actions that wait for another.

    `generated_tokens` may be more than the prefix has: a lost worker reported them.
    """

    step: int
    request: Request
    prefix: Prefix | None = None
    kv: HostKv | None = None
    generated_tokens: int = 0
    ticket: int | None = None
    waiting: list[Waiting] = dataclasses.field(default_factory=list)

    def start(self, kv: HostKv | None, max_tokens: int) -> PartialRequest:
        """Return the request as a worker starts it; lost tokens add to its `max_tokens`."""
        known = 0 if self.prefix is None else len(self.prefix.response_ids)
        limit = max_tokens + self.generated_tokens - known
        return PartialRequest(self.request, self.prefix, kv, limit)


class RequestTable:
    """Live requests by number, and the tickets under which workers promised their states."""

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
        """Remove a request that has ended or was dropped."""
        live = self._live.pop(request_id)
        self.withdraw(live)
        self.take_kv(live)

    def promise(self, request_id: int, worker_id: int) -> int:
        """Return the ticket under which a worker will return a request's state."""
        self._live[request_id].ticket = ticket = next(self._numbers)
        self._tickets[ticket] = request_id, worker_id
        return ticket

    def withdraw(self, live: LiveRequest) -> None:
        """Withdraw a promise: the request stays with its worker, or is gone."""
        if live.ticket is not None:
            del self._tickets[live.ticket]
            live.ticket = None

    def redeem(self, ticket: int, state: PartialRequest | None) -> list[Waiting]:
        """Keep a promised state, if it came; return the actions that waited for it."""
        if ticket not in self._tickets:
            return []
        live = self._live[self._tickets[ticket][0]]
        self.withdraw(live)
        if state is not None:
            self.keep(live, state)
        waiting, live.waiting = live.waiting, []
        return waiting

    def lose(self, worker_id: int) -> Iterator[Waiting]:
        """Withdraw a lost worker's promises; yield the actions that waited for them."""
        for ticket, (_, owner) in list(self._tickets.items()):
            if owner == worker_id:
                yield from self.redeem(ticket, None)

    def keep(self, live: LiveRequest, state: PartialRequest) -> None:
        """Keep a state, with its keys and values if there is room."""
        live.prefix, kv = state.prefix, state.kv
        if kv is None:
            return
        self.counts += PoolCounts(moved_bytes=kv.num_bytes)
        if self.num_bytes + kv.num_bytes <= self._pool_bytes:
            self.num_bytes += kv.num_bytes
            live.kv = kv
        else:
            self._drop(kv)

    def start(self, live: LiveRequest, start: Start) -> PartialRequest:
        """Return a request as a worker starts it, with keys and values if it wants them."""
        kv = self.take_kv(live)
        if kv is not None and start.kv is not Kv.POOL:
            self._drop(kv)
            kv = None
        if kv is not None:
            self.counts += PoolCounts(moved_bytes=kv.num_bytes)
        return live.start(kv, start.max_tokens)

    def take_kv(self, live: LiveRequest) -> HostKv | None:
        kv, live.kv = live.kv, None
        if kv is not None:
            self.num_bytes -= kv.num_bytes
        return kv

    def _drop(self, kv: HostKv) -> None:
        self.counts += PoolCounts(dropped_bytes=kv.num_bytes, dropped_tokens=kv.num_tokens)
