"""Requests of the next step, begun on workers that have run dry (docs/architecture.md).

    present step → a scheduler that knows of no other
    next step    → workers on which nothing of the present one runs, until it is wanted back

What is begun yields at once: a worker that is to start a request of the present step lets go of all
that it has begun. Once the next step's weights are there everything is returned, as far as it has
come, and that step is submitted like any other.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

from sched.ledger import Ledger
from sched.policies.lazy_heap import LazyHeap
from sched.protocol import (
    OF_NO_WORKER,
    REPORTS,
    Action,
    Copy,
    Drop,
    Event,
    Recall,
    Recalled,
    Return,
    Scheduler,
    Start,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from sched.request import Group, RequestState, Status, Worker


class Ahead:
    """A scheduler that begins requests of the next step where `scheduler` has left a worker dry.

    A begun request has `chunk_tokens` at a time. Those with the fewest chunks go first, since an
    early token is likelier to stand than a late one; among these the longest expected, by the
    lengths of the last epoch and of siblings that have ended (Seer, section 4.3). Requests of both
    steps have numbers of their own; one more step may be submitted ahead once all of the last
    one is returned or has ended. An event takes O(log requests), and O(workers) where it may
    leave a worker dry.
    """

    def __init__(self, scheduler: Scheduler, *, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._scheduler, self._chunk_tokens = scheduler, chunk_tokens
        self._present: dict[int, dict[int, None]] = {}  # the present step's starts, by worker
        self._begun = Ledger()
        self._waiting: list[tuple[int, float, int]] = []  # (chunks, −expected, request)
        self._leaving: set[int] = set()  # workers that have been told to let go
        self._dry: LazyHeap[int] = LazyHeap()  # workers that may begin something, by −free tokens
        self._recalled = False

    @property
    def num_unfinished(self) -> int:
        """The present step's; what is begun may end whenever it is wanted back."""
        return self._scheduler.num_unfinished

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        if isinstance(event, Recalled):
            return self._recall()
        if isinstance(event, Submitted) and event.requests and event.requests[0].ahead:
            assert not self._begun.num_unfinished, "the last step's are returned first"
            self._recalled = False
            for request in self._begun.apply(event):
                self._push(request)
            return self._begin()
        if isinstance(event, REPORTS) and event.request_id in self._begun.requests:
            actions = self._reported(event)
        else:
            actions = self._of_present(event, now_s)
        if not isinstance(event, OF_NO_WORKER):
            self._look_at(event.worker_id)
        return [*actions, *self._begin()]

    # -- the present step ---------------------------------------------------------------

    def _of_present(self, event: Event, now_s: float) -> list[Action]:
        """Pass on an event; what is begun lets go of the workers that the present step needs."""
        returned: list[Action] = []
        self._begun.nothing_held()
        if isinstance(event, REPORTS):
            self._present.get(event.worker_id, {}).pop(event.request_id, None)
        elif isinstance(event, WorkerJoined):
            self._present[event.worker_id] = {}
            self._begun.apply(event)
        elif isinstance(event, WorkerLost):
            del self._present[event.worker_id]
            self._leaving.discard(event.worker_id)
            returned = self._set_waiting(self._begun.apply(event))
        recalls: list[Action] = []
        actions = self._scheduler.handle(event, now_s)
        for action in actions:
            start = action.start if isinstance(action, Copy) else action
            if isinstance(start, Start):
                recalls += self._let_go(self._begun.workers[start.worker_id])
                self._present[start.worker_id][start.request_id] = None
                self._look_at(start.worker_id)
            elif isinstance(action, Drop):
                self._present[action.worker_id].pop(action.request_id, None)
                self._look_at(action.worker_id)
        return [*returned, *recalls, *actions]

    def _let_go(self, worker: Worker) -> list[Action]:
        if not worker.running or worker.worker_id in self._leaving:
            return []
        self._leaving.add(worker.worker_id)
        return [Recall(worker.worker_id)]

    # -- what is begun ------------------------------------------------------------------

    def _reported(self, event: Event) -> list[Action]:
        waiting = self._begun.apply(event)
        assert isinstance(event, REPORTS)
        worker = self._begun.workers.get(event.worker_id)
        if worker is not None and not worker.running:
            self._leaving.discard(event.worker_id)
        return self._set_waiting(waiting)

    def _set_waiting(self, requests: Sequence[RequestState]) -> list[Action]:
        """Take requests that run no more: they may go on elsewhere, or are given back."""
        if self._recalled:
            return [self._give_back(request) for request in requests]
        for request in requests:
            self._push(request)
        return []

    def _recall(self) -> list[Action]:
        """Have all that is begun returned: at once, or once its worker has let go of it."""
        self._recalled = True
        self._waiting.clear()
        states = list(self._begun.requests.values())
        waiting = [r for r in states if r.status is Status.WAITING]
        recalls = [a for worker in self._begun.workers.values() for a in self._let_go(worker)]
        return [*recalls, *map(self._give_back, waiting)]

    def _give_back(self, request: RequestState) -> Action:
        self._begun.drop(request)
        return Return(request.request_id)

    def _push(self, request: RequestState) -> None:
        group = self._begun.groups[request.group_id]
        chunks = request.generated_tokens // self._chunk_tokens
        expected = expected_tokens(request, group)
        heapq.heappush(self._waiting, (chunks, -expected, request.request_id))

    def _begin(self) -> list[Action]:
        """Start what waits on the workers that are dry, where there is most room first."""
        actions: list[Action] = []
        while self._waiting and not self._recalled:
            worker_id = self._dry.first()
            if worker_id is None:
                break
            worker, request = self._begun.workers[worker_id], self._first_waiting()
            most = min(self._chunk_tokens + request.prefix_tokens, request.remaining_tokens)
            if not worker.fits(request.total_tokens + most):
                self._dry.drop(worker_id)  # until something ends there
                continue
            heapq.heappop(self._waiting)
            actions.append(self._begun.start(request, worker, most, reserve=True))
            self._look_at(worker_id)
        return actions

    def _first_waiting(self) -> RequestState:
        return self._begun.requests[self._waiting[0][2]]

    def _look_at(self, worker_id: int) -> None:
        """Note whether a worker may begin something, after its starts have changed."""
        worker = self._begun.workers.get(worker_id)
        if worker is None or self._present[worker_id] or worker_id in self._leaving:
            self._dry.drop(worker_id)
        else:
            self._dry.set(worker_id, worker.reserved_tokens - worker.kv_tokens)


def expected_tokens(request: RequestState, group: Group) -> float:
    """Return the length that a response is expected to have: its limit where nothing is known."""
    known = request.spec.past_tokens or (() if group.num_finished else (group.max_new_tokens,))
    past = statistics.median(known) if known else 0
    return max(past, group.longest_tokens)
