"""Several engines under one scheduler: a rollout whose requests run where it decides.

Each worker is a thread with an engine on devices of its own. All talk to one coordinator,
which tells the scheduler what happens, under a lock and with the time, and hands its answers
out. Tokens do not depend on any of it: a request's are a function of its seed.

    scheduler ← events ← coordinator → starts → inbox of a worker → engine
                                     ↑                              │ chunk ended: go on here, or
                                     └─ finished, chunk done ───────┘ leave to the pool
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import jax

from models import transformer
from rl.engine import Engine
from rl.kv_pool import KvPool
from rl.trajectory import Begun, Request, Trajectory, longest_tokens
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
from spec.sampling import SamplingConfig

ON_ERROR = ("stop", "restart")


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


@dataclasses.dataclass(frozen=True)
class RolloutSpec:
    """What stays the same over one rollout."""

    sampling: SamplingConfig
    key: jax.Array
    stop_token_ids: tuple[int, ...]
    policy_version: int


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


class Workers:
    """Engines on devices of their own; `run` plays one rollout on all of them."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        kv_tokens: int,
        pool_bytes: int = 2**33,
        on_error: str = "stop",
        clock: Callable[[], float],
    ) -> None:
        if on_error not in ON_ERROR:
            raise ValueError(f"expected on_error of {', '.join(ON_ERROR)}, got {on_error!r}")
        self.engines = list(engines)
        self._kv_tokens, self._pool_bytes, self._on_error = kv_tokens, pool_bytes, on_error
        self._clock = clock
        self.decisions: list[Decision] = []

    def run(
        self,
        params: Sequence[transformer.Params],
        requests: Sequence[Request],
        rollout: RolloutSpec,
        scheduler: Scheduler,
        *,
        on_finish: Callable[[Trajectory], None] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list[Trajectory]:
        """Every request to its end; trajectories in the order of the requests.

        `params[i]` are the weights on the devices of engine i. `on_finish` is called here, in
        the caller's thread, as responses end; so is `watch`, now and then: what it raises ends
        the rollout. Raises WorkerError where a worker raised and is not restarted.
        """
        pool = KvPool(self._pool_bytes)
        coordinator = Coordinator(scheduler, self._clock, pool)
        longest = longest_tokens(requests, rollout.sampling.max_new_tokens)
        threads: dict[int, threading.Thread] = {}
        engine_of: dict[int, int] = {}

        def join(worker_id: int, engine: int) -> None:
            most = self.engines[engine].config.slots
            coordinator.join(worker_id, self._kv_tokens, most)
            feed = WorkerFeed(worker_id, coordinator, pool, most, longest)
            arguments = (
                *(worker_id, self.engines[engine], params[engine]),
                *(rollout, feed, coordinator),
            )
            thread = threading.Thread(target=_work, args=arguments, daemon=True)
            threads[worker_id], engine_of[worker_id] = thread, engine
            thread.start()

        done: dict[int, Trajectory] = {}
        whole = False
        try:
            for i in range(len(self.engines)):
                join(i, i)
            coordinator.submit(requests, rollout.sampling.max_new_tokens)
            while len(done) < len(requests):
                result = coordinator.next_result(timeout_s=0.05)
                if isinstance(result, WorkerError):
                    if self._on_error == "stop":
                        raise result
                    # its successor first, so that what it ran has somewhere to go
                    join(max(threads) + 1, engine_of[result.worker_id])
                    coordinator.lose(result.worker_id)
                elif result is not None:
                    done[result.request_id] = result
                    if on_finish is not None:
                        on_finish(result)
                if watch is not None:
                    watch()
            whole = True
        finally:
            coordinator.close(abort=not whole)
            self.decisions = coordinator.decisions
            for thread in threads.values():
                thread.join()
        return [done[r.request_id] for r in requests]


def _work(
    worker_id: int,
    engine: Engine,
    params: transformer.Params,
    rollout: RolloutSpec,
    feed: WorkerFeed,
    coordinator: Coordinator,
) -> None:
    """A worker's thread: one phase of its engine, fed by the coordinator."""
    try:
        engine.run(
            params,
            (),
            rollout.sampling,
            rollout.key,
            stop_token_ids=rollout.stop_token_ids,
            policy_version=rollout.policy_version,
            feed=feed,
            on_finish=lambda trajectory: coordinator.finished(worker_id, trajectory),
            on_round=coordinator.check,
        )
    except Aborted:
        pass
    except BaseException as error:
        coordinator.failed(worker_id, error)
