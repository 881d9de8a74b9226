"""Divided rollouts: every chunk of a request runs on a worker with room for that chunk.

Source: Seer, section 4.2 and Algorithm 1. A request starts only if its tokens so far and its whole
next chunk fit, so no request is ever preempted. Unlike in the paper, a request stays on its worker
unless another worker has much more room.

group_fifo      whole groups bound to a worker, which admits and preempts: synchronous trainers
divided_fifo    chunks, first come, first served
seer            chunks, probes first, then the longest by the group estimate
oracle          chunks, the longest first by true length
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from reprise.sched.ledger import Ledger
from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.protocol import OF_NO_WORKER, REPORTS, Action, Event, Finished, Scheduler
from reprise.sched.request import Group, RequestState, Status, Worker

PreferPool = Callable[[int], bool]  # tokens so far → whether a copy is cheaper than prefill
Key = TypeVar("Key", int, float, tuple[int, ...])
SPARE = 16  # outdated entries that are always allowed


class LazyHeap(Generic[Key]):
    """A heap of numbers by key, the smallest key first; ties go to the smaller number.

    `set` and `first` take O(log n) and `drop` O(1), amortized, since the heap has at most
    2n + SPARE entries.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, number: int, key: Key) -> None:
        """Add a number, or change its key."""
        keys = self._keys
        heap = self._heap
        if keys.get(number) == key:
            return
        keys[number] = key
        if len(heap) < 2 * len(keys) + SPARE:
            heapq.heappush(heap, (key, number))
        else:
            heap[:] = [(key, number) for number, key in keys.items()]
            heapq.heapify(heap)

    def drop(self, number: int) -> None:
        """Remove a number if it is present."""
        self._keys.pop(number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> int | None:
        """Return the number with the smallest key without removing it; None if empty."""
        keys = self._keys
        heap = self._heap
        while heap:
            key, number = heap[0]
            if keys.get(number) == key:
                return number
            heapq.heappop(heap)
        return None


# --- orders -----------------------------------------------------------------------------


class Order(Protocol):
    """A queue of the waiting requests, in starting order."""

    def push(self, request: RequestState, group: Group) -> None:
        """Add a request that is new or has finished a chunk."""

    def put_back(self, request: RequestState, group: Group) -> None:
        """Put back the request from the last `pop`, if no worker had room."""

    def pop(self) -> RequestState | None:
        """Remove and return the next request, or None if no request waits."""

    def group_changed(self, group: Group) -> None:
        """Update after a request of the group has finished or reached the end of a chunk."""
        return None


class Fifo(Order):
    """First come, first served; a request rejoins at the end after each chunk."""

    def __init__(self) -> None:
        self._waiting: collections.deque[RequestState] = collections.deque()

    def push(self, request: RequestState, group: Group) -> None:
        self._waiting.append(request)

    def put_back(self, request: RequestState, group: Group) -> None:
        self._waiting.appendleft(request)

    def pop(self) -> RequestState | None:
        return self._waiting.popleft() if self._waiting else None


class UrgentFirst(Order):
    """Urgent requests first come, first served; then all other requests by `order`."""

    def __init__(self, order: Order) -> None:
        self._urgent = Fifo()
        self._order = order

    def _order_of(self, request: RequestState) -> Order:
        return self._urgent if request.spec.urgent else self._order

    def push(self, request: RequestState, group: Group) -> None:
        self._order_of(request).push(request, group)

    def put_back(self, request: RequestState, group: Group) -> None:
        self._order_of(request).put_back(request, group)

    def pop(self) -> RequestState | None:
        return self._urgent.pop() or self._order.pop()

    def group_changed(self, group: Group) -> None:
        self._order.group_changed(group)


class LongestKnown(Order):
    """The longest request first, by lengths known in advance (Seer's oracle)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestState]] = []

    def push(self, request: RequestState, group: Group) -> None:
        known = request.spec.expected_tokens
        if known is None:
            raise ValueError(
                f"request {request.request_id}: expected its length to be known, got none; "
                "fix: submit it with expected_tokens, or choose the order seer"
            )
        heapq.heappush(self._heap, (-known, request.request_id, request))

    put_back = push

    def pop(self) -> RequestState | None:
        return heapq.heappop(self._heap)[2] if self._heap else None


class ContextAware(Order):
    """Seer's order (Algorithm 1).

    The first request of each group is its probe. Probes go first, the fewest tokens first. Other
    requests follow, the longest first by the estimate of their group, L̂ = the longest response so
    far, or the limit until a response has finished. A share `explore` of the picks goes to the
    least-served group; the paper gives no number. Methods take O(log groups), amortized.
    """

    def __init__(self, *, seed: int, explore: float = 0.05) -> None:
        if not 0 <= explore <= 1:
            raise ValueError(f"expected explore in 0 … 1, got {explore}")
        self._explore = explore
        self._rng = np.random.default_rng(seed)
        self._probes: list[tuple[int, int, RequestState]] = []
        self._probe_of: dict[int, int] = {}  # group → request
        self._waiting: dict[int, collections.deque[RequestState]] = {}  # requests other than probes
        self._by_estimate: LazyHeap[int] = LazyHeap()  # groups with waiting requests, by −L̂
        self._by_service: LazyHeap[int] = LazyHeap()  # the same groups, by tokens served

    def push(self, request: RequestState, group: Group) -> None:
        # requests with tokens go first: their keys and values take room in the pool
        self._add(request, group, first=request.generated_tokens > 0)

    def put_back(self, request: RequestState, group: Group) -> None:
        self._add(request, group, first=True)

    def _add(self, request: RequestState, group: Group, *, first: bool) -> None:
        request_id = request.request_id
        group_id = group.group_id
        if self._probe_of.setdefault(group_id, request_id) == request_id:
            heapq.heappush(self._probes, (request.generated_tokens, request_id, request))
            return
        waiting = self._waiting.setdefault(group_id, collections.deque())
        (waiting.appendleft if first else waiting.append)(request)
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


# --- schedulers -------------------------------------------------------------------------


class WorkerHeap:
    """The workers that may take a request, the most free positions first; methods are O(log n)."""

    def __init__(self, workers: dict[int, Worker]) -> None:
        self._workers = workers  # shared with the ledger
        self._by_room: LazyHeap[int] = LazyHeap()  # by −free tokens

    def update(self, worker_id: int) -> None:
        """Update a worker that joined, is lost, or has other room than before."""
        worker = self._workers.get(worker_id)
        if worker is not None and len(worker.running) < worker.max_requests:
            self._by_room.set(worker_id, worker.reserved_tokens - worker.kv_tokens)
        else:
            self._by_room.drop(worker_id)

    def least_loaded(self) -> Worker | None:
        """Return the worker with the most room, or None if none may take a request."""
        worker_id = self._by_room.first()
        return None if worker_id is None else self._workers[worker_id]


class Divided:
    """A scheduler that picks requests by `order` and reserves room for their whole next chunk.

    An event takes O(log workers + log groups), amortized, plus the same for each request that it
    submits, starts or sets waiting.
    """

    def __init__(
        self, order: Order, *, chunk_tokens: int, prefer_pool: PreferPool = lambda tokens: True
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._order = UrgentFirst(order)
        self._chunk_tokens = chunk_tokens
        self._prefer_pool = prefer_pool
        self._ledger = Ledger()
        self._heap = WorkerHeap(self._ledger.workers)
        self._next: RequestState | None = None  # picked, but no worker has had room yet

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        ledger = self._ledger
        waiting = ledger.apply(event)
        if self._next is not None and (waiting or type(event) is Finished):
            # the event may change the pick
            self._order.put_back(self._next, ledger.groups[self._next.group_id])
            self._next = None
        for request in waiting:
            self._order.push(request, ledger.groups[request.group_id])
        if isinstance(event, REPORTS):
            reported = ledger.requests.get(event.request_id)
            if reported is not None:  # a lost worker may report a request dropped long ago
                self._order.group_changed(ledger.groups[reported.group_id])
        if not isinstance(event, OF_NO_WORKER):
            self._heap.update(event.worker_id)
        return self._dispatch()

    def _dispatch(self) -> list[Action]:
        actions: list[Action] = []
        while (best := self._heap.least_loaded()) is not None:
            request = self._next = self._next or self._order.pop()
            if request is None:
                break
            max_tokens = request.next_tokens(self._chunk_tokens)
            needed_tokens = request.total_tokens + max_tokens
            if needed_tokens > best.free_tokens:
                self._refuse_what_never_fits(request, needed_tokens)
                break
            worker = self._choose_worker(request, needed_tokens, best)
            pool = request.pooled and self._prefer_pool(request.total_tokens)
            actions.append(self._ledger.start(request, worker, max_tokens, reserve=True, pool=pool))
            self._heap.update(worker.worker_id)
            self._next = None
        return actions

    def _choose_worker(self, request: RequestState, tokens: int, best: Worker) -> Worker:
        """Return the last worker if it has at least half the free room of `best`, else `best`."""
        if request.worker_id is None:
            return best
        last = self._ledger.workers.get(request.worker_id)
        if last is None or not last.fits(tokens):
            return best
        return last if 2 * last.free_tokens >= best.free_tokens else best

    def _refuse_what_never_fits(self, request: RequestState, needed_tokens: int) -> None:
        workers = self._ledger.workers.values()
        if workers and not self._ledger.num_running:
            raise ValueError(
                f"request {request.request_id} needs {needed_tokens} positions for its next chunk, "
                f"the largest worker holds {max(w.kv_tokens for w in workers)}; fix: give "
                "workers more memory, or lower the chunk or the limit of tokens"
            )


ORDERS: dict[str, Callable[[int], Order]] = {  # by name, from a seed
    "divided_fifo": lambda seed: Fifo(),
    "seer": lambda seed: ContextAware(seed=seed),
    "oracle": lambda seed: LongestKnown(),
}
POLICIES = ("group_fifo", *ORDERS)


def make_scheduler(
    name: str,
    *,
    seed: int,
    chunk_tokens: int,
    prefer_pool: PreferPool = lambda tokens: True,
    ranks_per_instance: int = 1,
) -> Scheduler:
    """Return a new scheduler for one rollout. Raises ValueError for an unknown name."""
    if name == "group_fifo":
        return GroupFifo(seed=seed, ranks_per_instance=ranks_per_instance)
    if name in ORDERS:
        return Divided(ORDERS[name](seed), chunk_tokens=chunk_tokens, prefer_pool=prefer_pool)
    raise ValueError(f"expected a policy of {', '.join(POLICIES)}, got {name!r}")
