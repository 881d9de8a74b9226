"""Divided rollouts: requests run chunk by chunk, each chunk on a worker that has room for it.

Seer, section 4.2 and Algorithm 1. A request starts only where its tokens so far and its whole
next chunk fit, so that nothing is ever preempted. Unlike in the paper, it stays on its worker
while no other one has much more room: then nothing needs to be copied.
"""

from __future__ import annotations

from collections.abc import Callable

from sched.ledger import Ledger
from sched.policies.lazy_heap import LazyHeap
from sched.policies.orders import Order, UrgentFirst
from sched.protocol import OF_NO_WORKER, REPORTS, Action, Event, Finished
from sched.request import RequestState, Worker

PreferPool = Callable[[int], bool]  # tokens so far → whether a copy is cheaper than prefill


class WorkerHeap:
    """The workers that may take a request, the one with the most free positions first.

    Ties go by number. Both methods take O(log workers), amortized.
    """

    def __init__(self, workers: dict[int, Worker]) -> None:
        self._workers = workers  # the ledger's own
        self._by_room: LazyHeap[int] = LazyHeap()  # by −free tokens

    def update(self, worker_id: int) -> None:
        """Enter a worker that joined, whose room has changed, or that is lost."""
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

    It picks none while all workers have as many requests as they may.
    An event takes O(log workers + log groups), amortized, and as much for each request that it
    submits, starts or sets waiting.
    """

    def __init__(
        self, order: Order, *, chunk_tokens: int, prefer_pool: PreferPool = lambda tokens: True
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._order, self._chunk_tokens = UrgentFirst(order), chunk_tokens
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
            # what is known now may change the pick
            self._order.put_back(self._next, ledger.groups[self._next.group_id])
            self._next = None
        for request in waiting:
            self._order.push(request, ledger.groups[request.group_id])
        if isinstance(event, REPORTS):
            reported = ledger.requests.get(event.request_id)
            if reported is not None:  # a lost worker may report what was dropped long ago
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
            chunk_tokens = self._chunk_tokens + request.prefix_tokens
            max_tokens = min(chunk_tokens, request.remaining_tokens)
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
        """Return its last worker if that has at least half of the most free room, or the best."""
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
                f"the largest worker holds {max(w.kv_tokens for w in workers)}; mend: give "
                "workers more memory, or lower the chunk or the limit of tokens"
            )
