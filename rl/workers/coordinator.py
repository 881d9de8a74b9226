"""Where workers meet: the scheduler is told here, and obeyed.

scheduler ← events ← coordinator → starts → inbox of a worker → engine
                                 ↑                              │ chunk ended: go on here, or
                                 └─ finished, chunk done ───────┘ leave to the pool
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from rl.runtime.waits import Hang
from rl.trajectory import PartialRequest, Request, Trajectory
from rl.workers.host_kv_pool import KvPool
from sched.protocol import (
    Action,
    ChunkDone,
    Defer,
    Event,
    Finished,
    Scheduler,
    SchedulerDecision,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from sched.request import Kv, RequestSpec

SPARE_POLL_S = 0.005  # between two looks at whether there is spare work

Inbox = queue.SimpleQueue[tuple[int, Start] | None]  # (step, start); None: nothing more will come


class WorkerError(RuntimeError):
    """A worker's thread raised, or does not come back; names what ran there."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        shown = ", ".join(map(str, request_ids)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id, self.__cause__ = worker_id, error


class Aborted(Exception):
    """The rollout was given up while this worker ran, or this worker was."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A request has gone over into the next step, half done."""

    request_id: int


Result = Trajectory | Deferred | WorkerError


@dataclasses.dataclass(frozen=True)
class SpareTime:
    """What a worker does while it has no request.

    `unit` does a short piece of work and returns False where there is none now; `over` is called
    once there is a request, or nothing will come any more.
    """

    unit: Callable[[], bool]
    over: Callable[[], None]


@dataclasses.dataclass(eq=False)
class _Present:
    """A worker that is there: what it is to start, and its last sign of life."""

    inbox: Inbox
    alive_s: float
    doing: str | None = None  # None: it waits for something to start


class Coordinator:
    """The one place where the scheduler is told and obeyed; any thread may call it.

    An event, what the scheduler answers, and the books here change under one lock: whoever
    comes next finds all three or none of them. Reports of a worker that is lost raise Aborted
    in its thread and change nothing; what it ran is with others by then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        pool: KvPool,
        keeps_decisions: bool = True,
    ) -> None:
        self._keeps_decisions = keeps_decisions
        self._scheduler, self._clock, self._pool = scheduler, clock, pool
        self._lock = threading.Lock()
        self._began_s = clock()
        self._step_of: dict[int, int] = {}
        self._starts: dict[int, Start] = {}  # in force, of requests that run
        self._begun: dict[
            int, PartialRequest
        ] = {}  # with what they began it, but for keys and values
        self._generated: collections.Counter[int] = collections.Counter()  # as last reported
        self._workers: dict[int, _Present] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.decisions: list[SchedulerDecision] = []
        self._closed = self._aborted = False

    # -- what the caller says ---------------------------------------------------------

    def submit(
        self,
        step: int,
        requests: Sequence[Request],
        default_limit: int,
        past_tokens: Mapping[int, tuple[int, ...]],
    ) -> None:
        """All requests of a step; `past_tokens` are lengths of last epoch's, by group."""
        asks = tuple(
            RequestSpec(
                r.request_id,
                r.group_id,
                len(r.prompt_ids),
                r.max_new_tokens or default_limit,
                past_tokens=past_tokens.get(r.group_id, ()),
                step=step,
                prefix_tokens=len(r.cached.tokens) + 1 if r.cached is not None else 0,
            )
            for r in requests
        )
        with self._lock:
            self._begun.update({r.request_id: PartialRequest(r) for r in requests})
            self._step_of.update({r.request_id: step for r in requests})
            self._tell(Submitted(asks))

    def trained(self, step: int) -> None:
        with self._lock:
            self._tell(Trained(step))

    def join(self, worker_id: int, kv_tokens: int, max_requests: int) -> Inbox:
        """A worker is there; what it is to start comes into its inbox."""
        with self._lock:
            inbox: Inbox = queue.SimpleQueue()
            self._workers[worker_id] = _Present(inbox, self._clock())
            if self._closed:
                inbox.put(None)
            self._tell(WorkerJoined(worker_id, kv_tokens, max_requests))
        return inbox

    def lose(self, worker_id: int) -> None:
        """A worker is gone with what it ran, which goes on elsewhere from its last chunk."""
        with self._lock:
            del self._workers[worker_id]
            self._starts = {r: s for r, s in self._starts.items() if s.worker_id != worker_id}
            self._pool.withdraw_all(worker_id)
            self._tell(WorkerLost(worker_id))

    def is_present(self, worker_id: int) -> bool:
        """Whether a worker has joined and is not lost."""
        return worker_id in self._workers

    def next_result(self, timeout_s: float) -> Result | None:
        """What a worker has to say to the caller; None where none has for so long."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def hung(self, limit_s: float, among: Collection[int] | None = None) -> WorkerError | None:
        """A worker that has shown no sign of life for `limit_s` while it had something to do.

        Once all is closed that is whoever has not ended; `among` are those that have not.
        """
        with self._lock:
            now_s = self._clock()
            for worker_id, worker in self._workers.items():
                if among is not None and worker_id not in among:
                    continue
                silent_s, doing = now_s - worker.alive_s, worker.doing
                if silent_s > limit_s and (self._closed or doing is not None):
                    what = f"no sign of life for {silent_s:.1f} s, while {doing or 'ending'}"
                    return WorkerError(worker_id, self._running(worker_id), Hang(what))
        return None

    def close(self, *, abort: bool = False) -> None:
        """Nothing will come any more; `abort`: what runs is to end as well."""
        with self._lock:
            self._closed, self._aborted = True, abort
            for worker in self._workers.values():
                worker.inbox.put(None)
                worker.alive_s = self._clock()  # time to end begins now

    def forget(self, worker_id: int) -> None:
        """Once all is closed: a worker does not end, and is not listened to any more."""
        with self._lock:
            del self._workers[worker_id]
            self._pool.withdraw_all(worker_id)

    # -- what workers say -------------------------------------------------------------

    def alive(self, worker_id: int, doing: str | None = "generating") -> None:
        """A sign of life; `doing` None: the worker waits for something to start.

        Raises Aborted in a worker's thread once all is given up, or this worker is.
        """
        with self._lock:
            self._alive(worker_id, doing)

    def chunk(self, worker_id: int, start: Start) -> PartialRequest:
        """Return the request that a worker is to start."""
        request_id = start.request_id
        pooled = self._pool.take(request_id, lambda owner: self._waits_for(worker_id, owner))
        with self._lock:
            self._alive(worker_id, "generating")
            begun = pooled or self._begun[request_id]
            if start.kv is not Kv.POOL:
                begun = begun.without_kv()
            self._begun[request_id] = begun.without_kv()
            # what a lost worker had reported and not handed over is generated again
            again = self._generated[request_id] - begun.num_tokens
        return dataclasses.replace(begun, max_tokens=start.max_tokens + again)

    def finished(self, worker_id: int, trajectory: Trajectory) -> None:
        request_id = trajectory.request_id
        with self._lock:
            self._alive(worker_id, "generating")
            chunk = self._starts.pop(request_id).chunk
            del self._begun[request_id], self._generated[request_id], self._step_of[request_id]
            # first: whatever becomes of the others, this one is done
            self._results.put(trajectory)
            self._tell(Finished(request_id, worker_id, chunk, trajectory.num_tokens))

    def chunk_ended(self, worker_id: int, request_id: int, response_tokens: int) -> int:
        """How many tokens more the request may have where it is; 0: it must leave."""
        with self._lock:
            self._alive(worker_id, "generating")
            # before others can be told to take it
            self._pool.promise(request_id, worker_id)
            chunk = self._starts.pop(request_id).chunk
            self._generated[request_id] = response_tokens
            for action in self._tell(
                ChunkDone(request_id, worker_id, chunk, response_tokens, pooled=True)
            ):
                if isinstance(action, Start) and action.kv is Kv.HELD:
                    self._pool.withdraw(request_id, worker_id)
                    return action.max_tokens
        return 0

    def park(self, worker_id: int, leaving: Sequence[PartialRequest]) -> None:
        """Requests that leave a worker, with their keys and values."""
        self.alive(worker_id, "handing over requests")
        for begun in leaving:
            self._pool.put(begun, worker_id)

    def failed(self, worker_id: int, error: BaseException) -> None:
        """A worker's thread is about to end with `error`."""
        with self._lock:
            if worker_id in self._workers:
                self._pool.withdraw_all(worker_id)
                self._results.put(WorkerError(worker_id, self._running(worker_id), error))

    # -- under the lock ---------------------------------------------------------------

    def _alive(self, worker_id: int, doing: str | None) -> None:
        worker = self._workers.get(worker_id)
        if self._aborted or worker is None:
            raise Aborted
        worker.alive_s, worker.doing = self._clock(), doing

    def _waits_for(self, worker_id: int, owner: int) -> None:
        """A worker waits for what another copies: it is as alive as that one is."""
        with self._lock:
            if self._aborted or worker_id not in self._workers:
                raise Aborted
            if (other := self._workers.get(owner)) is not None:
                worker = self._workers[worker_id]
                worker.alive_s = max(worker.alive_s, other.alive_s)
                worker.doing = f"waiting for keys and values from worker {owner}"

    def _running(self, worker_id: int) -> list[int]:
        return [r for r, start in self._starts.items() if start.worker_id == worker_id]

    def _tell(self, event: Event) -> Sequence[Action]:
        now_s = self._clock() - self._began_s
        actions = tuple(self._scheduler.handle(event, now_s))
        if self._keeps_decisions:
            self.decisions.append(SchedulerDecision(now_s, event, actions))
        for action in actions:
            if isinstance(action, Defer):
                self._step_of[action.request_id] += 1
                self._results.put(Deferred(action.request_id))
                continue
            self._starts[action.request_id] = action
            if action.kv is not Kv.HELD:
                step = self._step_of[action.request_id]
                self._workers[action.worker_id].inbox.put((step, action))
        return actions


class WorkerSource:
    """A worker's `rl.engine.rollout_spec.RequestSource`: its inbox, the coordinator and the pool.

    Its requests are of the step that `next_step` returned last, or of earlier ones: a request of
    a later step waits until that step is begun.
    """

    def __init__(
        self,
        worker_id: int,
        inbox: Inbox,
        coordinator: Coordinator,
        most_requests: int,
        longest_tokens: int,
        kv_tokens: int,
        spare: SpareTime | None = None,
    ) -> None:
        self._spare = spare
        self.most_requests, self.longest_tokens = most_requests, longest_tokens
        self.kv_tokens = kv_tokens
        self._worker_id, self._coordinator = worker_id, coordinator
        self._inbox, self._step = inbox, 0
        self._starts: collections.deque[tuple[int, Start]] = collections.deque()
        self._closed = False

    def next_step(self) -> int | None:
        """The step of the first start that waits here, waiting for one; None: none will come."""
        self._receive(wait=True)
        if not self._starts:
            return None
        self._step = self._starts[0][0]
        return self._step

    def take(self, *, wait: bool) -> Sequence[PartialRequest] | None:
        self._receive(wait=wait)
        starts = []
        while self._starts and self._starts[0][0] <= self._step:
            starts.append(self._starts.popleft()[1])
        if not starts and (self._starts or self._closed):
            return None
        return [self._coordinator.chunk(self._worker_id, start) for start in starts]

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        return self._coordinator.chunk_ended(self._worker_id, request_id, response_tokens)

    def park(self, leaving: Sequence[PartialRequest]) -> None:
        self._coordinator.park(self._worker_id, leaving)

    def _receive(self, *, wait: bool) -> None:
        """Everything that is in the inbox; with `wait`, something at least."""
        try:
            while not self._closed:
                start = self._next(wait=wait and not self._starts)
                if start is None:
                    self._closed = True
                else:
                    self._starts.append(start)
        except queue.Empty:
            pass

    def _next(self, *, wait: bool) -> tuple[int, Start] | None:
        """What is next in the inbox; while nothing is, the worker's spare time is made use of."""
        if not wait:
            return self._inbox.get_nowait()
        alive = self._coordinator.alive
        if self._spare is None:
            alive(self._worker_id, None)
            start = self._inbox.get()  # ended by `close`
            alive(self._worker_id)
            return start
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._inbox.get_nowait()
                alive(self._worker_id, "training the drafter")
                if not self._spare.unit():
                    alive(self._worker_id, None)
                    with contextlib.suppress(queue.Empty):
                        return self._inbox.get(timeout=SPARE_POLL_S)
        finally:
            self._spare.over()
