"""Training steps in sequence, or with the next step started ahead of its weights.

    StepOrder   sync: rollouts of a step start after the previous update
                one_step_off: after the previous rollouts, with weights one update old
    Ahead       current step → a scheduler that handles only this step
                next step    → workers without requests of the current step, until recalled

Requests started ahead yield immediately: a worker releases them before it starts a request of the
current step. Once the weights of the next step are available, all requests started ahead are
returned with their tokens, and the next step is submitted like any other step.
"""

from __future__ import annotations

import collections
import heapq
import statistics
from collections.abc import Sequence

from reprise.sched.ledger import Ledger
from reprise.sched.policies.divided import LazyHeap
from reprise.sched.protocol import (
    OF_NO_WORKER,
    REPORTS,
    Action,
    ChunkDone,
    Copy,
    Drop,
    Event,
    Finished,
    Recall,
    Recalled,
    Return,
    Scheduler,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import Group, RequestState, Status, Worker

MODES = ("sync", "one_step_off")


class StepOrder:
    """A scheduler that submits a step to `scheduler` once the previous step has finished."""

    def __init__(self, scheduler: Scheduler, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"expected a mode of {', '.join(MODES)}, got {mode!r}")
        self._scheduler = scheduler
        self._behind = 1 + (mode == "one_step_off")
        self._waiting: collections.deque[Submitted] = collections.deque()
        self._next = 0
        self._trained = -1

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished + sum(len(s.requests) for s in self._waiting)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        if isinstance(event, Submitted):
            actions = self._submitted(event, now_s)
        else:
            actions = self._scheduler.handle(event, now_s)
        if isinstance(event, Trained):
            self._trained = max(self._trained, event.step)
        if self._waiting and isinstance(event, (Submitted, Trained, Finished)):
            actions = [*actions, *self._begin_steps(now_s)]
        return actions

    def _begin_steps(self, now_s: float) -> list[Action]:
        """Submit the waiting steps that may start."""
        actions: list[Action] = []
        while (
            self._waiting
            and not self._scheduler.num_unfinished
            and self._next - self._behind <= self._trained
        ):
            actions += self._scheduler.handle(self._waiting.popleft(), now_s)
            self._next += 1
        return actions

    def _submitted(self, event: Submitted, now_s: float) -> Sequence[Action]:
        step = event.step
        if step < self._next:
            return self._scheduler.handle(event, now_s)
        if step == self._next + len(self._waiting) - 1:  # more requests of the last waiting step
            event = Submitted((*self._waiting.pop().requests, *event.requests), step)
        self._waiting.append(event)
        return ()


class Ahead:
    """A scheduler that starts requests of the next step on workers that `scheduler` leaves idle.

    A request started ahead runs `chunk_tokens` at a time. Requests with the fewest chunks go first,
    since an early token is more likely to survive verification; ties go to the longest expected
    response. A step may be submitted ahead once all requests of the last such step are returned or
    finished. An event takes O(log requests), plus O(workers) if it may leave a worker idle.
    """

    def __init__(self, scheduler: Scheduler, *, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")
        self._scheduler = scheduler
        self._chunk_tokens = chunk_tokens
        self._present: dict[int, dict[int, None]] = {}  # starts of the current step, by worker
        self._begun = Ledger()
        self._waiting: list[tuple[int, float, int]] = []  # (chunks, −expected, request)
        self._leaving: set[int] = set()  # workers that were sent a Recall
        self._idle: LazyHeap[int] = LazyHeap()  # workers that may start a request, by −free tokens
        self._recalled = False

    @property
    def num_unfinished(self) -> int:
        """Return the number of unfinished requests of the current step only."""
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
            self._update_idle(event.worker_id)
        return [*actions, *self._begin()]

    # -- the current step ---------------------------------------------------------------

    def _of_present(self, event: Event, now_s: float) -> list[Action]:
        """Forward an event; recall requests from the workers that the current step needs."""
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
                recalls += self._release(self._begun.workers[start.worker_id])
                self._present[start.worker_id][start.request_id] = None
                self._update_idle(start.worker_id)
            elif isinstance(action, Drop):
                self._present[action.worker_id].pop(action.request_id, None)
                self._update_idle(action.worker_id)
        return [*returned, *recalls, *actions]

    def _release(self, worker: Worker) -> list[Action]:
        if not worker.running or worker.worker_id in self._leaving:
            return []
        self._leaving.add(worker.worker_id)
        return [Recall(worker.worker_id)]

    # -- the next step ------------------------------------------------------------------

    def _reported(self, event: Finished | ChunkDone) -> list[Action]:
        waiting = self._begun.apply(event)
        worker = self._begun.workers.get(event.worker_id)
        if event.worker_id in self._leaving:
            self._begun.nothing_held()  # the worker frees all rows
        if worker is not None and not worker.running:
            self._leaving.discard(event.worker_id)
        return self._set_waiting(waiting)

    def _set_waiting(self, requests: Sequence[RequestState]) -> list[Action]:
        """Queue requests that no longer run, or return them if they were recalled."""
        if self._recalled:
            return [self._give_back(request) for request in requests]
        for request in requests:
            self._push(request)
        return []

    def _recall(self) -> list[Action]:
        """Return waiting requests now, and running requests once their worker releases them."""
        self._recalled = True
        self._waiting.clear()
        states = list(self._begun.requests.values())
        waiting = [r for r in states if r.status is Status.WAITING]
        recalls = [a for worker in self._begun.workers.values() for a in self._release(worker)]
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
        """Start waiting requests on idle workers, the worker with the most room first."""
        actions: list[Action] = []
        while self._waiting and not self._recalled:
            worker_id = self._idle.first()
            if worker_id is None:
                break
            worker = self._begun.workers[worker_id]
            request = self._begun.requests[self._waiting[0][2]]
            max_tokens = request.next_tokens(self._chunk_tokens)
            if not worker.fits(request.total_tokens + max_tokens):
                self._idle.drop(worker_id)  # until a request finishes there
                continue
            heapq.heappop(self._waiting)
            actions.append(self._begun.start(request, worker, max_tokens, reserve=True))
            self._update_idle(worker_id)
        return actions

    def _update_idle(self, worker_id: int) -> None:
        """Record whether a worker may start a request, after its starts have changed."""
        worker = self._begun.workers.get(worker_id)
        if worker is None or self._present[worker_id] or worker_id in self._leaving:
            self._idle.drop(worker_id)
        else:
            self._idle.set(worker_id, worker.reserved_tokens - worker.kv_tokens)


def expected_tokens(request: RequestState, group: Group) -> float:
    """Return the expected response length, or the limit if no past or sibling length is known."""
    known = request.spec.past_tokens or (() if group.num_finished else (group.max_new_tokens,))
    past = statistics.median(known) if known else 0
    return max(past, group.longest_tokens)
