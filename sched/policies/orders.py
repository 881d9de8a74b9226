"""Orders of the waiting requests of divided rollouts."""

from __future__ import annotations

import collections
import heapq
from typing import Protocol

import numpy as np

from sched.policies.lazy_heap import LazyHeap
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


class UrgentFirst(Order):
    """Urgent requests, first come, first served; then the others in an order of their own."""

    def __init__(self, order: Order) -> None:
        self._urgent, self._order = Fifo(), order

    def push(self, request: RequestState, group: Group) -> None:
        (self._urgent if request.spec.urgent else self._order).push(request, group)

    def put_back(self, request: RequestState, group: Group) -> None:
        (self._urgent if request.spec.urgent else self._order).put_back(request, group)

    def pop(self) -> RequestState | None:
        return self._urgent.pop() or self._order.pop()

    def group_changed(self, group: Group) -> None:
        self._order.group_changed(group)


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
    to the group that has been served least; the paper gives no figure for it. Every method takes
    O(log groups), amortized.
    """

    def __init__(self, *, seed: int, explore: float = 0.05) -> None:
        if not 0 <= explore <= 1:
            raise ValueError(f"expected explore in 0 … 1, got {explore}")
        self._explore, self._rng = explore, np.random.default_rng(seed)
        self._probes: list[tuple[int, int, RequestState]] = []
        self._probe_of: dict[int, int] = {}  # group → request
        self._waiting: dict[int, collections.deque[RequestState]] = {}
        # of groups with such requests
        self._by_estimate: LazyHeap[int] = LazyHeap()  # by −L̂
        self._by_service: LazyHeap[int] = LazyHeap()  # by tokens served

    def push(self, request: RequestState, group: Group) -> None:
        request_id, group_id = request.request_id, group.group_id
        if self._probe_of.setdefault(group_id, request_id) == request_id:
            heapq.heappush(self._probes, (request.generated_tokens, request_id, request))
            return
        waiting = self._waiting.setdefault(group_id, collections.deque())
        # requests with tokens go first: their keys and values take room in the pool
        (waiting.appendleft if request.generated_tokens else waiting.append)(request)
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
        group_id = group.group_id
        if not group.num_unfinished:
            self._probe_of.pop(group_id, None)
            self._waiting.pop(group_id, None)
        elif self._waiting.get(group_id):
            self._by_estimate.set(group_id, -group.estimated_tokens)
            if self._explore:
                self._by_service.set(group_id, group.served_tokens)

    def pop(self) -> RequestState | None:
        if self._probes:
            return heapq.heappop(self._probes)[2]
        group_id = None
        if self._explore and self._rng.random() < self._explore:
            group_id = self._by_service.first()
        if group_id is None:
            group_id = self._by_estimate.first()
        if group_id is None:
            return None
        waiting = self._waiting[group_id]
        request = waiting.popleft()
        if not waiting:
            self._by_estimate.drop(group_id)
            self._by_service.drop(group_id)
        assert request.status is Status.WAITING
        return request
