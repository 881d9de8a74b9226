"""Copies of straggling requests with other drafting methods (SpecActor, Algorithm 3).

    requests   → a scheduler that handles no copies
    copies     → idle workers, while no request waits

A copy has the same noise as the request, hence the same tokens. The first response to finish is
the answer, and the others are dropped. A worker drops its copies before it starts a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from reprise.sched.policies.specactor import assign_drafters
from reprise.sched.protocol import (
    REPORTS,
    Action,
    ChunkDone,
    Copy,
    Drop,
    Event,
    Finished,
    Profiled,
    Scheduler,
    Start,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import COPIES, MAX_COPIES, Kv, RequestSpec, copy_of

# (tokens of prompt and response, maximum tokens left) → whether to copy
Worth = Callable[[int, int], bool]


class FastestOfN:
    """A scheduler that copies requests of `scheduler` to workers that `scheduler` leaves idle.

    Each idle worker drafts with one of `num_methods`, for up to `max_copies` requests that `worth`
    accepts, the lowest acceptance first. An event takes O(workers + requests) once no request
    waits, else O(copies).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        num_methods: int,
        max_copies: int,
        worth: Worth = lambda held_tokens, left_tokens: True,
    ) -> None:
        if not 1 <= num_methods <= MAX_COPIES or max_copies < 1:
            raise ValueError(
                f"expected 1 … {MAX_COPIES} methods and at least one copy, got {num_methods} "
                f"and {max_copies}"
            )
        self._scheduler = scheduler
        self._worth = worth
        self._max_copies = max_copies
        self._methods = [str(k) for k in range(1, num_methods + 1)]
        self._specs: dict[int, RequestSpec] = {}  # of unfinished requests
        self._running: dict[int, Start] = {}  # starts that are not copies
        self._tokens: dict[int, int] = {}  # as last reported
        self._acceptance: dict[int, float] = {}
        self._workers: dict[int, WorkerJoined] = {}
        self._copies: dict[int, Start] = {}  # by copy number
        self._answered: set[int] = set()  # waiting requests that a copy has answered

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished - len(self._answered)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        if isinstance(event, Profiled):
            self._acceptance.update(event.acceptance)
            return self._copy()
        if isinstance(event, REPORTS) and copy_of(event.request_id)[1]:
            actions = self._copy_ended(event, now_s)
        else:
            actions = self._of_requests(event, now_s)
        return [*actions, *self._copy()]

    # -- requests ------------------------------------------------------------------------

    def _of_requests(self, event: Event, now_s: float) -> list[Action]:
        dropped: list[Action] = []
        if isinstance(event, Submitted):
            self._specs.update({spec.request_id: spec for spec in event.requests})
        elif isinstance(event, WorkerJoined):
            self._workers[event.worker_id] = event
        elif isinstance(event, WorkerLost):
            del self._workers[event.worker_id]
            for request_id, start in list(self._running.items()):
                if start.worker_id == event.worker_id:
                    del self._running[request_id]
            self._drop_copies(event.worker_id)
        elif isinstance(event, REPORTS) and _is_of(self._running.get(event.request_id), event):
            del self._running[event.request_id]
            self._tokens[event.request_id] = event.generated_tokens
            if isinstance(event, Finished):
                del self._tokens[event.request_id]
                dropped = self._forget(event.request_id)
        return [*dropped, *self._started(self._scheduler.handle(event, now_s), now_s)]

    def _started(self, actions: Iterable[Action], now_s: float) -> list[Action]:
        """Record started requests; report a request as finished if a copy already completed it."""
        result: list[Action] = []
        for action in actions:
            if not isinstance(action, Start):
                result.append(action)
            elif action.request_id in self._answered:
                self._answered.discard(action.request_id)
                result.append(Drop(action.request_id, action.worker_id))
                result += self._started(self._end(action, now_s), now_s)
            else:
                result += self._drop_copies(action.worker_id)
                self._running[action.request_id] = action
                result.append(action)
        return result

    def _end(self, start: Start, now_s: float) -> Sequence[Action]:
        """Report to the scheduler that the latest start of a request has finished."""
        tokens = self._tokens.pop(start.request_id)
        ended = Finished(start.request_id, start.worker_id, start.chunk, tokens)
        return self._scheduler.handle(ended, now_s)

    # -- copies --------------------------------------------------------------------------

    def _copy_ended(self, event: Finished | ChunkDone, now_s: float) -> list[Action]:
        """Accept the answer of a copy; stop the request and its other copies."""
        if isinstance(event, ChunkDone) or not _is_of(self._copies.get(event.request_id), event):
            return []  # a dropped copy
        del self._copies[event.request_id]
        request_id, _ = copy_of(event.request_id)
        self._tokens[request_id] = event.generated_tokens
        actions = self._forget(request_id)
        own = self._running.pop(request_id, None)
        if own is None:  # the request waits; it finishes when the scheduler starts it
            self._answered.add(request_id)
            return actions
        actions.append(Drop(request_id, own.worker_id))
        return [*actions, *self._started(self._end(own, now_s), now_s)]

    def _forget(self, request_id: int) -> list[Action]:
        """Drop the copies of a request that has ended."""
        self._specs.pop(request_id, None)
        self._acceptance.pop(request_id, None)
        numbers = (_number(request_id, method) for method in self._methods)
        return self._drop([number for number in numbers if number in self._copies])

    def _drop_copies(self, worker_id: int) -> list[Action]:
        return self._drop([n for n, start in self._copies.items() if start.worker_id == worker_id])

    def _drop(self, numbers: Iterable[int]) -> list[Action]:
        return [Drop(number, self._copies.pop(number).worker_id) for number in numbers]

    def _copy(self) -> list[Action]:
        """Start copies on idle workers if all remaining requests run (Algorithm 3)."""
        if not self._running or len(self._running) < self.num_unfinished:
            return []
        busy = {start.worker_id for start in self._running.values()}
        load = {worker_id: 0 for worker_id in self._workers if worker_id not in busy}
        if not load:
            return []
        serving: dict[str, set[int]] = {}
        for number, start in self._copies.items():
            load[start.worker_id] += 1
            serving.setdefault(str(copy_of(number)[1]), set()).add(start.worker_id)
        freed = [worker_id for worker_id, copies in load.items() if not copies]
        wanted = {r: self._acceptance.get(r, 0.0) for r in self._running if self._pays(r)}
        added = assign_drafters(
            wanted,
            self._methods,
            freed,
            serving,
            load,
            self._max_copies,
            lambda request_id, method, *_: _number(request_id, method) not in self._copies,
        )
        return [
            action
            for (request_id, method), worker_id in added.items()
            for action in self._begin(request_id, _number(request_id, method), worker_id)
        ]

    def _pays(self, request_id: int) -> bool:
        spec = self._specs[request_id]
        tokens = self._tokens.get(request_id, 0)
        return self._worth(spec.prompt_tokens + tokens, spec.max_new_tokens - tokens)

    def _begin(self, request_id: int, number: int, worker_id: int) -> list[Action]:
        """Start a copy if the worker has room for it."""
        spec = self._specs[request_id]
        worker = self._workers[worker_id]
        copies = [start for start in self._copies.values() if start.worker_id == worker_id]
        tokens = spec.prompt_tokens + spec.max_new_tokens
        needed = sum(start.reserved_tokens for start in copies) + tokens
        if needed > worker.kv_tokens or len(copies) >= min(self._max_copies, worker.max_requests):
            return []
        start = Start(number, worker_id, 1, spec.max_new_tokens, tokens, Kv.POOL)
        self._copies[number] = start
        return [Copy(request_id, self._running[request_id].worker_id, start)]


def _is_of(start: Start | None, event: Finished | ChunkDone) -> bool:
    return start is not None and start[1:3] == (event.worker_id, event.chunk)


def _number(request_id: int, method: str) -> int:
    """Return the number of the copy that drafts with a method."""
    return request_id + COPIES * int(method)
