"""Where workers of one rollout meet: the scheduler is told here, and obeyed.

scheduler ← events ← coordinator → starts → inbox of a worker → engine
                                 ↑                              │ chunk ended: go on here, or
                                 └─ finished, chunk done ───────┘ leave to the pool
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

from rl.kv_pool import KvPool
from rl.trajectory import Begun, Request, Trajectory
from sched.protocol import (
    Action,
    ChunkDone,
    Event,
    Finished,
    Scheduler,
    Start,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from sched.replay import Decision
from sched.request import Ask, Kv


class WorkerError(RuntimeError):
    """A worker's thread raised; names what ran there."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        shown = ", ".join(map(str, request_ids)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id, self.__cause__ = worker_id, error


class Aborted(Exception):
    """The rollout was given up while this worker ran."""


class Coordinator:
    """The one place where the scheduler is told and obeyed; any thread may call it."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], pool: KvPool) -> None:
        self._scheduler, self._clock, self._pool = scheduler, clock, pool
        self._lock = threading.Lock()
        self._began_s = clock()
        self._requests: dict[int, Request] = {}
        self._chunk: dict[int, Start] = {}  # the start in force
        self._handed: dict[int, Begun] = {}  # what it began with, but for keys and values
        self._inboxes: dict[int, queue.SimpleQueue[Start | None]] = {}
        self._over: set[int] = set()
        self._results: queue.SimpleQueue[Trajectory | WorkerError] = queue.SimpleQueue()
        self.decisions: list[Decision] = []
        self._aborted = False

    def check(self, finished: int, tokens: int) -> None:
        """Raises Aborted in a worker's thread once the rollout is given up."""
        if self._aborted:
            raise Aborted

    def submit(self, requests: Sequence[Request], default_limit: int) -> None:
        """All requests of the rollout."""
        self._requests.update({r.request_id: r for r in requests})
        asks = tuple(
            Ask(r.request_id, r.group_id, len(r.prompt_ids), r.max_new_tokens or default_limit)
            for r in requests
        )
        self._tell(Submitted(asks))

    def join(self, worker_id: int, kv_tokens: int, max_requests: int) -> None:
        self._inboxes[worker_id] = queue.SimpleQueue()
        self._tell(WorkerJoined(worker_id, kv_tokens, max_requests))

    def lose(self, worker_id: int) -> None:
        """A worker is gone with what it ran, which goes on elsewhere from its last chunk."""
        for request_id, start in self._chunk.items():
            if start.worker_id == worker_id:
                self._pool.withdraw(request_id)
        self._inboxes.pop(worker_id)
        self._tell(WorkerLost(worker_id))

    def finished(self, worker_id: int, trajectory: Trajectory) -> None:
        request_id = trajectory.request_id
        chunk = self._chunk[request_id].chunk
        self._tell(Finished(request_id, worker_id, chunk, trajectory.num_tokens))
        self._over.add(request_id)
        self._results.put(trajectory)

    def chunk_ended(self, worker_id: int, request_id: int, response_tokens: int) -> int:
        """How many tokens more the request may have where it is; 0: it must leave."""
        self._pool.promise(request_id)
        chunk = self._chunk[request_id].chunk
        actions = self._tell(ChunkDone(request_id, worker_id, chunk, response_tokens, True))
        for action in actions:
            if isinstance(action, Start) and action.kv is Kv.HELD:
                self._pool.withdraw(request_id)
                return action.max_tokens
        return 0

    def next_result(self, timeout_s: float) -> Trajectory | WorkerError | None:
        """What a worker has to say to the caller; None where none has for so long."""
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def failed(self, worker_id: int, error: BaseException) -> None:
        """A worker's thread is about to end with `error`."""
        running = [r for r, s in self._chunk.items() if s.worker_id == worker_id]
        self._results.put(
            WorkerError(worker_id, [r for r in running if r not in self._over], error)
        )

    def inbox(self, worker_id: int) -> queue.SimpleQueue[Start | None]:
        return self._inboxes[worker_id]

    def begun(self, start: Start) -> Begun:
        """What a worker needs in order to obey a start."""
        request_id = start.request_id
        begun = self._pool.take(request_id)
        if begun is None:  # it has not begun, or its worker is lost
            begun = self._handed.get(request_id, Begun(self._requests[request_id], 0))
        elif start.kv is not Kv.POOL:
            begun = begun.without_kv()
        self._handed[request_id] = begun.without_kv()
        return dataclasses.replace(begun, max_tokens=start.max_tokens)

    def close(self, *, abort: bool = False) -> None:
        """Nothing will come any more; `abort`: what runs is to end as well."""
        self._aborted = abort
        for inbox in self._inboxes.values():
            inbox.put(None)

    def _tell(self, event: Event) -> Sequence[Action]:
        with self._lock:
            now_s = self._clock() - self._began_s
            actions = tuple(self._scheduler.handle(event, now_s))
            self.decisions.append(Decision(now_s, event, actions))
            for action in actions:
                assert isinstance(action, Start), "a rollout of one step defers nothing"
                self._chunk[action.request_id] = action
                if action.kv is not Kv.HELD:
                    self._inboxes[action.worker_id].put(action)
            return actions


class WorkerFeed:
    """A worker's `rl.feed.Feed`: its inbox, and its way to the coordinator and the pool."""

    def __init__(
        self,
        worker_id: int,
        coordinator: Coordinator,
        pool: KvPool,
        most_requests: int,
        longest_tokens: int,
    ) -> None:
        self.most_requests, self.longest_tokens = most_requests, longest_tokens
        self._worker_id, self._coordinator, self._pool = worker_id, coordinator, pool
        self._inbox = coordinator.inbox(worker_id)
        self._closed = False

    def take(self, *, wait: bool) -> Sequence[Begun] | None:
        if self._closed:
            return None
        starts: list[Start] = []
        try:
            while True:
                start = self._inbox.get(block=wait and not starts)
                if start is None:
                    self._closed = True
                    break
                starts.append(start)
        except queue.Empty:
            pass
        if self._closed and not starts:
            return None
        return [self._coordinator.begun(start) for start in starts]

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        return self._coordinator.chunk_ended(self._worker_id, request_id, response_tokens)

    def park(self, begun: Begun) -> None:
        self._pool.put(begun)
