"""Divided rollouts: requests run chunk by chunk, each chunk where there is room.

Seer, section 4.2 and Algorithm 1. A request starts only where its tokens so far and its
whole next chunk fit, so that nothing is ever pre-empted. Unlike in the paper, it stays where
it is while no other worker has much more room: then nothing needs to be copied.
"""

from __future__ import annotations

from collections.abc import Callable

from sched.ledger import Ledger
from sched.policies.fleet import WorkerHeap
from sched.policies.orders import Order
from sched.protocol import Action, ChunkDone, Event, Finished, WorkerJoined
from sched.request import RequestState, Worker

PreferPool = Callable[[int], bool]  # tokens so far → whether a copy is cheaper than prefill


class Divided:
    """Picks by `order`; reserves all that the next chunk may come to."""

    def __init__(
        self, order: Order, *, chunk_tokens: int, prefer_pool: PreferPool = lambda tokens: True
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._order, self._chunk_tokens, self._prefer_pool = order, chunk_tokens, prefer_pool
        self._ledger = Ledger()
        self._fleet = WorkerHeap(self._ledger.workers)
        self._next: RequestState | None = None  # was picked, and found no room yet

    @property
    def num_unfinished(self) -> int:
        return self._ledger.num_unfinished

    def handle(self, event: Event, now_s: float) -> list[Action]:
        ledger = self._ledger
        waiting = ledger.apply(event)
        if waiting or type(event) is Finished:
            self._put_back()  # what is known now may change the pick
        for request in waiting:
            self._order.push(request, ledger.groups[request.ask.group_id])
        if isinstance(event, Finished | ChunkDone):
            reported = ledger.requests.get(event.request_id)
            if reported is not None:  # a lost worker may tell of what is long forgotten
                self._order.learnt(ledger.groups[reported.ask.group_id])
        if isinstance(event, Finished | ChunkDone | WorkerJoined):
            self._fleet.changed(event.worker_id)
        return self._dispatch()

    def _put_back(self) -> None:
        if self._next is not None:
            self._order.unpop(self._next, self._ledger.groups[self._next.ask.group_id])
            self._next = None

    def _dispatch(self) -> list[Action]:
        actions: list[Action] = []
        ledger = self._ledger
        while True:
            request = self._next or self._order.pop()
            self._next = request
            if request is None:
                return actions
            chunk_tokens = self._chunk_tokens + request.prefix_tokens
            max_tokens = min(chunk_tokens, request.remaining_tokens)
            worker = self._place(request, request.total_tokens + max_tokens)
            if worker is None:
                self._refuse_what_never_fits(request, max_tokens)
                return actions
            pool = request.pooled and self._prefer_pool(request.total_tokens)
            actions.append(ledger.start(request, worker, max_tokens, reserve=True, pool=pool))
            self._fleet.changed(worker.worker_id)
            self._next = None

    def _place(self, request: RequestState, tokens: int) -> Worker | None:
        """Where most is free; where it was before, as long as at least half of that is free."""
        best = self._fleet.least_loaded(tokens)
        if best is None or request.worker_id is None:
            return best
        home = self._ledger.workers.get(request.worker_id)
        if home is None or not home.fits(tokens):
            return best
        return home if 2 * home.free_tokens >= best.free_tokens else best

    def _refuse_what_never_fits(self, request: RequestState, max_tokens: int) -> None:
        workers = self._ledger.workers.values()
        needed = request.total_tokens + max_tokens
        if workers and all(not w.running for w in workers):
            raise ValueError(
                f"request {request.ask.request_id} needs {needed} positions for its next chunk, "
                f"the largest worker holds {max(w.kv_tokens for w in workers)}; mend: give "
                "workers more memory, or lower the chunk or the limit of tokens"
            )
