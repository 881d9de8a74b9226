"""The ledger of a scheduler, which records every event and makes every start.

Assertions check that a request runs on one worker at a time, and that reservations never exceed the
room of a worker. Reports of starts on lost workers are ignored. An event takes O(1), plus O(1) for
each request that it submits, drops or sets waiting.
"""

from __future__ import annotations

from reprise.sched.protocol import (
    ChunkDone,
    Event,
    Finished,
    Start,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import Group, Kv, RequestState, Status, Worker


class Ledger:
    """The requests, groups and workers of a scheduler."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestState] = {}
        self.groups: dict[int, Group] = {}
        self.workers: dict[int, Worker] = {}
        self.num_unfinished = self.num_running = 0
        self._finished_groups: list[int] = []  # dropped at the next submission
        self._held: RequestState | None = None  # with a chunk that ended in the latest event

    def apply(self, event: Event) -> list[RequestState]:
        """Record an event; return the requests that it set waiting.

        Raises ValueError for a request or a worker that exists already.
        """
        self._held = None
        if type(event) is Finished or type(event) is ChunkDone:
            request = self.report(event)
            return [] if request is None or type(event) is Finished else [request]
        if type(event) is Submitted:
            return self._submitted(event)
        if type(event) is WorkerJoined:
            if event.worker_id in self.workers:
                raise ValueError(f"worker {event.worker_id} exists already")
            self.workers[event.worker_id] = Worker(
                event.worker_id, event.kv_tokens, event.max_requests
            )
            return []
        if type(event) is WorkerLost:
            return self._lost(self.workers.pop(event.worker_id))
        return []

    def _submitted(self, event: Submitted) -> list[RequestState]:
        self._forget_finished()
        new = []
        for spec in event.requests:
            if spec.request_id in self.requests:
                raise ValueError(f"request {spec.request_id} exists already")
            request = self.requests[spec.request_id] = RequestState(spec)
            group = self.groups.get(spec.group_id)
            if group is None:
                group = self.groups[spec.group_id] = Group(spec.group_id, spec.max_new_tokens)
            group.num_unfinished += 1
            group.request_ids.append(spec.request_id)
            new.append(request)
        self.num_unfinished += len(new)
        return new

    def _forget_finished(self) -> None:
        """Drop finished groups, so that many steps do not fill the memory."""
        for group_id in self._finished_groups:
            for request_id in self.groups.pop(group_id).request_ids:
                del self.requests[request_id]
        self._finished_groups.clear()

    def report(self, event: Finished | ChunkDone) -> RequestState | None:
        """Record a report; return its request, or None if its start is outdated."""
        request = self.requests.get(event.request_id)
        tokens = event.generated_tokens
        self._held = None
        if request is None or request.chunk != event.chunk or request.status is not Status.RUNNING:
            return None
        assert request.worker_id == event.worker_id, (request, event)
        assert tokens >= request.generated_tokens, (request, event)
        group = self.groups[request.group_id]
        worker = self.workers[event.worker_id]
        group.served_tokens += tokens - request.generated_tokens
        group.longest_tokens = max(group.longest_tokens, tokens)
        request.generated_tokens = tokens
        worker.reserved_tokens -= worker.running.pop(event.request_id)
        self.num_running -= 1
        if type(event) is ChunkDone:
            request.status = Status.WAITING
            request.pooled = event.pooled
            self._held = request
            return request
        request.status = Status.FINISHED
        request.pooled = False
        group.num_unfinished -= 1
        group.num_finished += 1
        if not group.num_unfinished:
            self._finished_groups.append(group.group_id)
        self.num_unfinished -= 1
        return request

    def nothing_held(self) -> None:
        """Record that no row is held any more, because other events have happened since."""
        self._held = None

    def drop(self, request: RequestState) -> None:
        """Remove a waiting request, as if it had never been submitted."""
        assert request.status is Status.WAITING, request
        group = self.groups[request.group_id]
        group.request_ids.remove(request.request_id)
        del self.requests[request.request_id]
        group.num_unfinished -= 1
        self.num_unfinished -= 1
        if not group.num_unfinished:
            self._finished_groups.append(group.group_id)

    def _lost(self, worker: Worker) -> list[RequestState]:
        """Set the requests of a lost worker waiting, with the tokens of their finished chunks."""
        lost = [self.requests[request_id] for request_id in worker.running]
        for request in lost:
            request.status = Status.WAITING
        self.num_running -= len(lost)
        return lost

    def start(
        self,
        request: RequestState,
        worker: Worker,
        max_tokens: int,
        *,
        reserve: bool,
        pool: bool = True,
    ) -> Start:
        """Start a waiting request on `worker`; `reserve` room for it and `max_tokens` more.

        With `pool`, keys and values are copied from the pool if present instead of recomputed.
        """
        assert request.status is Status.WAITING and max_tokens > 0, request
        request_id = request.request_id
        worker_id = worker.worker_id
        reserved = 0
        if reserve:
            reserved = request.total_tokens + max_tokens
            assert reserved <= worker.free_tokens, (request, worker)
            worker.reserved_tokens += reserved
        kv = Kv.POOL if request.pooled and pool else Kv.PREFILL
        if request is self._held and request.worker_id == worker_id:
            kv = Kv.HELD
        worker.running[request_id] = reserved
        self.num_running += 1
        request.status = Status.RUNNING
        request.worker_id = worker_id
        request.chunk = chunk = request.chunk + 1
        return Start(request_id, worker_id, chunk, max_tokens, reserved, kv)
