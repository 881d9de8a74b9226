"""The coordinator of workers: tells the scheduler what happens, and carries out its actions.

scheduler ← events ← coordinator → starts → inbox of a worker → engine
                                 ↑                              │ chunk ended: resume here, or
                                 └─ finished, chunk done ───────┘ leave to the pool
"""

from __future__ import annotations

import collections
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
from spec.config import SamplingConfig

Inbox = queue.SimpleQueue[tuple[int, Start] | None]  # (step, start); None: nothing more will come


class WorkerError(RuntimeError):
    """A worker's thread raised, or hangs; the message names the requests that ran there."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        shown = ", ".join(map(str, request_ids)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id, self.__cause__ = worker_id, error


class Aborted(Exception):
    """The rollout was aborted while this worker ran, or this worker was declared lost."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A request was deferred into the next step, unfinished."""

    request_id: int


Result = Trajectory | Deferred | WorkerError


@dataclasses.dataclass(eq=False)
class _Present:
    """A worker that has joined: its inbox, and its last sign of life."""

    inbox: Inbox
    alive_s: float
    doing: str | None = None  # None: it waits for a request


class Coordinator:
    """Passes events to the scheduler and its actions to workers; any thread may call it.

    An event, the scheduler's answer and the state here change under one lock: other threads see
    all three or none of them. Reports of a worker that is lost raise Aborted in its thread and
    change nothing; its requests are with other workers by then.
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
        self._partial: dict[int, PartialRequest] = {}  # as last started, without keys and values
        self._generated: collections.Counter[int] = collections.Counter()  # as last reported
        self._workers: dict[int, _Present] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.decisions: list[SchedulerDecision] = []
        self._closed = self._aborted = False

    # -- called by the owner -----------------------------------------------------------

    def submit(
        self,
        step: int,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        past_tokens: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Submit all requests of a step; `past_tokens`: lengths of last epoch's, by group."""
        asks = tuple(
            RequestSpec(
                r.request_id,
                r.group_id,
                len(r.prompt_ids),
                r.limit(sampling),
                past_tokens=past_tokens.get(r.group_id, ()),
                step=step,
                prefix_tokens=len(r.cached.tokens) + 1 if r.cached is not None else 0,
            )
            for r in requests
        )
        with self._lock:
            self._partial.update({r.request_id: PartialRequest(r) for r in requests})
            self._step_of.update({r.request_id: step for r in requests})
            self._tell(Submitted(asks))

    def trained(self, step: int) -> None:
        """Tell the scheduler that the update of a step is done."""
        with self._lock:
            self._tell(Trained(step))

    def join(self, worker_id: int, kv_tokens: int, max_requests: int) -> Inbox:
        """Add a worker; return the inbox that its starts come into."""
        with self._lock:
            inbox: Inbox = queue.SimpleQueue()
            self._workers[worker_id] = _Present(inbox, self._clock())
            if self._closed:
                inbox.put(None)
            self._tell(WorkerJoined(worker_id, kv_tokens, max_requests))
        return inbox

    def lose(self, worker_id: int) -> None:
        """Remove a worker; its requests resume elsewhere from their last chunks."""
        with self._lock:
            del self._workers[worker_id]
            self._starts = {r: s for r, s in self._starts.items() if s.worker_id != worker_id}
            self._pool.withdraw_all(worker_id)
            self._tell(WorkerLost(worker_id))

    def is_present(self, worker_id: int) -> bool:
        """Return True if a worker has joined and is not lost."""
        return worker_id in self._workers

    def next_result(self, timeout_s: float) -> Result | None:
        """Return the next result of a worker; None if there is none for `timeout_s`."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def hung(self, limit_s: float, among: Collection[int] | None = None) -> WorkerError | None:
        """Return an error for a worker without a sign of life for `limit_s` while it had work.

        After `close` any worker of `among` counts, those whose threads have not ended.
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
        """No more requests will come; with `abort` running ones end too."""
        with self._lock:
            self._closed, self._aborted = True, abort
            for worker in self._workers.values():
                worker.inbox.put(None)
                worker.alive_s = self._clock()  # time to end begins now

    def forget(self, worker_id: int) -> None:
        """After `close`: ignore a worker that does not end."""
        with self._lock:
            del self._workers[worker_id]
            self._pool.withdraw_all(worker_id)

    # -- called by workers -------------------------------------------------------------

    def alive(self, worker_id: int, doing: str | None = "generating") -> None:
        """Note a sign of life; with `doing` None the worker waits for a request.

        Raises Aborted in a worker's thread once the rollout is aborted, or this worker is lost.
        """
        with self._lock:
            self._alive(worker_id, doing)

    def chunk(self, worker_id: int, start: Start) -> PartialRequest:
        """Return the request that a worker is to start."""
        request_id = start.request_id
        pooled = self._pool.take(request_id, lambda owner: self._waits_for(worker_id, owner))
        with self._lock:
            self._alive(worker_id, "generating")
            partial = pooled or self._partial[request_id]
            self._partial[request_id] = partial.without_kv()
            # what a lost worker had reported and not handed over is generated again
            again = self._generated[request_id] - partial.num_tokens
        kv = partial.kv if start.kv is Kv.POOL else None
        return dataclasses.replace(partial, kv=kv, max_tokens=start.max_tokens + again)

    def finished(self, worker_id: int, trajectory: Trajectory) -> None:
        """Report a request's whole trajectory."""
        request_id = trajectory.request_id
        with self._lock:
            self._alive(worker_id, "generating")
            chunk = self._starts.pop(request_id).chunk
            del self._partial[request_id], self._generated[request_id], self._step_of[request_id]
            # first: whatever becomes of the others, this one is done
            self._results.put(trajectory)
            self._tell(Finished(request_id, worker_id, chunk, trajectory.num_tokens))

    def chunk_ended(self, worker_id: int, request_id: int, response_tokens: int) -> int:
        """Return how many more tokens the request may have where it is; at 0 it must leave."""
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
        """Put requests that leave a worker, with their keys and values, into the pool."""
        self.alive(worker_id, "handing over requests")
        for partial in leaving:
            self._pool.put(partial, worker_id)

    def failed(self, worker_id: int, error: BaseException) -> None:
        """Report that a worker's thread is about to end with `error`."""
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
        """A worker that waits for another's copy is as alive as that one."""
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
