"""Divided rollouts: requests run chunk by chunk, each chunk on a worker that has room for it.

Seer, section 4.2 and Algorithm 1. A request starts only where its tokens so far and its whole
next chunk fit, so that nothing is ever preempted. Unlike in the paper, it stays on its worker
while no other one has much more room: then nothing needs to be copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sched.ledger import Ledger
from sched.policies.orders import Order
from sched.protocol import Action, ChunkDone, Event, Finished, WorkerJoined
from sched.request import RequestState, Worker

PreferPool = Callable[[int], bool]  # tokens so far → whether a copy is cheaper than prefill


class WorkerHeap:
    """The workers, the one with the most free positions first; ties go by number."""

    def __init__(self, workers: dict[int, Worker]) -> None:
        self._workers = workers  # the ledger's own
        self._heap: list[tuple[int, int]] = []  # (−free tokens, worker), some of them outdated

    def update(self, worker_id: int) -> None:
        """Enter a worker that joined, or whose room has changed."""
        worker = self._workers.get(worker_id)
        if worker is not None and len(worker.running) < worker.max_requests:
            heapq.heappush(self._heap, (-worker.free_tokens, worker_id))

    def least_loaded(self, tokens: int) -> Worker | None:
        """Return the worker with the most room, or None if `tokens` do not fit there."""
        heap = self._heap
        while heap:
            free, worker_id = heap[0]
            worker = self._workers.get(worker_id)
            current = worker is not None and -free == worker.free_tokens
            if current and len(worker.running) < worker.max_requests:  # type: ignore[union-attr]
                return worker if tokens <= -free else None
            heapq.heappop(heap)
        return None


class Divided:
    """A scheduler that picks requests by `order` and reserves room for their whole next chunk."""

    def __init__(
        self, order: Order, *, chunk_tokens: int, prefer_pool: PreferPool = lambda tokens: True
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._order, self._chunk_tokens, self._prefer_pool = order, chunk_tokens, prefer_pool
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
        if isinstance(event, Finished | ChunkDone):
            reported = ledger.requests.get(event.request_id)
            if reported is not None:  # a lost worker may report what was dropped long ago
                self._order.group_changed(ledger.groups[reported.group_id])
        if isinstance(event, Finished | ChunkDone | WorkerJoined):
            self._heap.update(event.worker_id)
        return self._dispatch()

    def _dispatch(self) -> list[Action]:
        actions: list[Action] = []
        while True:
            request = self._next = self._next or self._order.pop()
            if request is None:
                return actions
            chunk_tokens = self._chunk_tokens + request.prefix_tokens
            max_tokens = min(chunk_tokens, request.remaining_tokens)
            needed_tokens = request.total_tokens + max_tokens
            worker = self._choose_worker(request, needed_tokens)
            if worker is None:
                self._refuse_what_never_fits(request, needed_tokens)
                return actions
            pool = request.pooled and self._prefer_pool(request.total_tokens)
            actions.append(self._ledger.start(request, worker, max_tokens, reserve=True, pool=pool))
            self._heap.update(worker.worker_id)
            self._next = None

    def _choose_worker(self, request: RequestState, tokens: int) -> Worker | None:
        """Return its last worker if that has at least half of the most free room, or the best."""
        best = self._heap.least_loaded(tokens)
        if best is None or request.worker_id is None:
            return best
        last = self._ledger.workers.get(request.worker_id)
        if last is None or not last.fits(tokens):
            return best
        return last if 2 * last.free_tokens >= best.free_tokens else best

    def _refuse_what_never_fits(self, request: RequestState, needed_tokens: int) -> None:
        workers = self._ledger.workers.values()
        if workers and all(not w.running for w in workers):
            raise ValueError(
                f"request {request.request_id} needs {needed_tokens} positions for its next chunk, "
                f"the largest worker holds {max(w.kv_tokens for w in workers)}; mend: give "
                "workers more memory, or lower the chunk or the limit of tokens"
            )
