"""Orders of the waiting requests of divided rollouts."""

from __future__ import annotations

import collections
import heapq
from typing import Protocol

import numpy as np

from sched.request import Group, RequestState, Status


class Order(Protocol):
    """The waiting requests, and only these, in the order in which they are to start."""

    def push(self, request: RequestState, group: Group) -> None:
        """Add a request, new or after a chunk."""

    def put_back(self, request: RequestState, group: Group) -> None:
        """Return the request that `pop` gave, and that no worker had room for."""

    def pop(self) -> RequestState | None:
        """Take out the next request; None: nothing waits."""

    def group_changed(self, group: Group) -> None:
        """Take note that a request of the group has ended, or reached the end of a chunk."""
        return None


class Fifo(Order):
    """First come, first served: after a chunk, a request goes behind all that wait."""

    def __init__(self) -> None:
        self._waiting: collections.deque[RequestState] = collections.deque()

    def push(self, request: RequestState, group: Group) -> None:
        self._waiting.append(request)

    def put_back(self, request: RequestState, group: Group) -> None:
        self._waiting.appendleft(request)

    def pop(self) -> RequestState | None:
        return self._waiting.popleft() if self._waiting else None


class LongestKnown(Order):
    """The longest first, by lengths known beforehand (Seer's oracle)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestState]] = []

    def push(self, request: RequestState, group: Group) -> None:
        known = request.spec.expected_tokens
        if known is None:
            raise ValueError(
                f"request {request.request_id}: expected its length to be known, got none; "
                "mend: submit it with expected_tokens, or choose the order seer"
            )
        heapq.heappush(self._heap, (-known, request.request_id, request))

    put_back = push

    def pop(self) -> RequestState | None:
        return heapq.heappop(self._heap)[2] if self._heap else None


class ContextAware(Order):
    """Seer's order (Algorithm 1).

    The first request of each group is its probe. Probes go first, those with the fewest tokens
    before the others, so that short ones finish early and long ones are recognized. The other
    requests follow by the estimate of their group, L̂ = the longest so far, or the limit while
    none has finished. As a guard against wrong estimates, a share of `explore` of the picks goes
    to the group that has been served least; the paper gives no figure for it.
    """

    def __init__(self, *, seed: int, explore: float = 0.05) -> None:
        if not 0 <= explore <= 1:
            raise ValueError(f"expected explore in 0 … 1, got {explore}")
        self._explore, self._rng = explore, np.random.default_rng(seed)
        self._probes: list[tuple[int, int, RequestState]] = []
        self._probe_of: dict[int, int] = {}  # group → request
        self._waiting: dict[int, collections.deque[RequestState]] = {}
        self._groups: dict[int, Group] = {}
        self._by_estimate: list[tuple[int, int]] = []  # (−L̂, group), some outdated
        self._by_service: list[tuple[int, int]] = []  # (tokens served, group), so too

    def push(self, request: RequestState, group: Group) -> None:
        request_id, group_id = request.request_id, group.group_id
        if self._probe_of.setdefault(group_id, request_id) == request_id:
            heapq.heappush(self._probes, (request.generated_tokens, request_id, request))
            return
        waiting = self._waiting.setdefault(group_id, collections.deque())
        # requests with tokens go first: their keys and values take room in the pool
        (waiting.appendleft if request.generated_tokens else waiting.append)(request)
        self._groups[group_id] = group
        if len(waiting) == 1:
            self.group_changed(group)

    def put_back(self, request: RequestState, group: Group) -> None:
        if self._probe_of[group.group_id] == request.request_id:
            self.push(request, group)
            return
        waiting = self._waiting[group.group_id]
        waiting.appendleft(request)
        if len(waiting) == 1:
            self.group_changed(group)

    def group_changed(self, group: Group) -> None:
        if not group.num_unfinished:
            self._forget(group.group_id)
        if not self._waiting.get(group.group_id):
            return
        heapq.heappush(self._by_estimate, (-group.estimated_tokens, group.group_id))
        if self._explore:
            heapq.heappush(self._by_service, (group.served_tokens, group.group_id))

    def _forget(self, group_id: int) -> None:
        """Drop a finished group; its entries in the heaps go with the last group."""
        for table in (self._probe_of, self._waiting, self._groups):
            table.pop(group_id, None)
        if not self._probe_of:
            self._by_estimate.clear()
            self._by_service.clear()

    def pop(self) -> RequestState | None:
        if self._probes:
            return heapq.heappop(self._probes)[2]
        group_id = None
        if self._explore and self._rng.random() < self._explore:
            group_id = self._least_served()
        if group_id is None:
            group_id = self._longest()
        if group_id is None:
            return None
        request = self._waiting[group_id].popleft()
        assert request.status is Status.WAITING
        return request

    def _longest(self) -> int | None:
        heap = self._by_estimate
        while heap:
            key, group_id = heap[0]
            waits = self._waiting.get(group_id)
            if waits and -key == self._groups[group_id].estimated_tokens:
                return group_id
            heapq.heappop(heap)
        return None

    def _least_served(self) -> int | None:
        heap = self._by_service
        while heap:
            key, group_id = heap[0]
            if not self._waiting.get(group_id):
                heapq.heappop(heap)
            elif key != (served := self._groups[group_id].served_tokens):
                heapq.heapreplace(heap, (served, group_id))
            else:
                return group_id
        return None
