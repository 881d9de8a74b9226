"""One engine per thread under a shared scheduler, until the group is closed.

Steps of requests are submitted while earlier ones may still run; a worker copies the weights of
a step when it begins it. Results come back as responses end.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from functools import partial

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats, joined
from rl.engine.worker_record import Kind, WorkerEvent, WorkerPart, fitted
from rl.runtime.waits import POLL_S, Hang, ProgramLost
from rl.trajectory import PartialRequest, Request, Trajectory
from rl.workers.coordinator import Coordinator
from rl.workers.drive import drive
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import Aborted, Deferred, Returned, WorkerError
from rl.workers.worker_source import IdleWork, WorkerLimits, WorkerSource
from sched.protocol import Scheduler, SchedulerDecision

MOST_RESTARTS = 3  # of one engine in a group: what fails more often will not heal
OWNER_PATIENCE = 2  # hang limits: who does not collect results is himself seen to hang after one
PROFILE_S = 0.25  # between two words to the scheduler about how drafts do
LEAVING_S = 5.0  # that workers have to end, once a rollout is aborted


@dataclasses.dataclass(eq=False)
class _Work:
    """A worker's part in a step: the rounds are in `stats`, once they are known."""

    name: str
    place: str
    version: int
    began_s: float
    stats: EngineStats = dataclasses.field(default_factory=EngineStats)
    ended_s: float | None = None

    def part(self, now_s: float) -> WorkerPart:
        """Return what is known by now; without rounds it is taken to have been busy throughout."""
        whole = self.began_s, max(self.began_s, now_s if self.ended_s is None else self.ended_s)
        rounds = [(r.began_s, r.ended_s) for r in self.stats.timeline]
        spans = fitted(rounds, *whole) or [whole]
        return WorkerPart(self.name, self.place, self.version, tuple(spans))


class WorkerGroup:
    """Worker threads and their engines; a context manager that ends all workers on exit.

    A thread that hangs cannot be ended. It is abandoned together with its engine, which a new
    engine of the same settings replaces in `engines`. An engine in another program may be lost and
    come back, and others may be appended to `engines`: workers join with them as they are ready.
    """

    make_coordinator = Coordinator  # workers on a virtual clock have another

    def __init__(
        self,
        engines: MutableSequence[Engine],
        scheduler: Scheduler,
        size: WorkerLimits,
        clock: Callable[[], float],
        spot: IdleWork | None = None,
        acceptance: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        self._engines, self._size, self._spot = engines, size, spot
        self._acceptance, self._profiled_s = acceptance, clock()
        self._clock = clock
        pool = KvPool(size.pool_bytes)
        self._coordinator = self.make_coordinator(
            scheduler,
            clock,
            pool,
            size.keeps_decisions,
            owner_limit_s=OWNER_PATIENCE * size.hang_limit_s,
        )
        self._threads: dict[int, threading.Thread] = {}
        self._engine_of: dict[int, int] = {}
        self._seated: set[int] = set()  # engines of workers that are present
        # workers that are lost, once another one is present
        self._leaving: dict[int, WorkerError] = {}
        self._specs: dict[int, RolloutSpec] = {}
        self._works: collections.defaultdict[int, list[_Work]] = collections.defaultdict(list)
        self._place_of: dict[int, str] = {}
        self._events: list[WorkerEvent] = []  # that nobody has asked for

    def __enter__(self) -> WorkerGroup:
        self._seat_newcomers()
        while not self._seated:  # engines of other programs are given up after a while
            time.sleep(POLL_S)
            self._seat_newcomers()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._spot is not None:
            self._spot.rollout_ended()
        self._coordinator.close(abort=kind is not None)
        limit_s = self._size.hang_limit_s
        hung = self._end_threads(limit_s if kind is None else min(limit_s, LEAVING_S))
        if self._spot is not None:
            self._spot.dismiss()
        if hung is not None and kind is None and not self._size.restart:
            raise hung

    @property
    def decisions(self) -> list[SchedulerDecision]:
        return self._coordinator.decisions

    def submit(
        self,
        step: int,
        spec: RolloutSpec,
        requests: Sequence[Request],
        past_tokens: Mapping[int, tuple[int, ...]] | None = None,
        *,
        ahead: bool = False,
        oldest: int | None = None,
    ) -> None:
        """Submit all requests of a step; ids are unique among those that have not ended.

        `spec.params` are copied to the devices of each worker. `past_tokens` are the lengths of
        last epoch's responses, by group. Those `ahead` of their step run where nothing else does.
        Of steps before `oldest`, by default the one before, nothing is kept.
        """
        self._specs[step] = spec
        for table in (self._specs, self._works):
            for old in [s for s in table if s < (step - 1 if oldest is None else oldest)]:
                del table[old]  # a worker that begins with a step now has a newer one
        past = past_tokens or {}
        self._coordinator.submit(step, requests, spec.sampling, past, ahead=ahead)
        if self._spot is not None:
            self._spot.rollout_began()

    def add(
        self,
        step: int,
        requests: Sequence[Request],
        past_tokens: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Submit further requests of a submitted step, for which an earlier one waits."""
        sampling = self._specs[step].sampling
        self._coordinator.submit(step, requests, sampling, past_tokens or {}, urgent=True)
        if self._spot is not None:
            self._spot.rollout_began()

    def trained(self, step: int, train_s: float | None = None) -> None:
        """Tell the scheduler that the update of a step is done, and how long it took."""
        self._coordinator.trained(step, train_s)

    def recall(self) -> None:
        """Have what runs ahead of its step returned, each request as a result of its own."""
        self._coordinator.recall()

    def returned(self, request_id: int) -> PartialRequest:
        """Remove and return a request that is `Returned`, as far as it has come."""
        return self._coordinator.returned(request_id)

    def next_result(self, timeout_s: float) -> Trajectory | Deferred | Returned | None:
        """Return the next response, or request that was deferred or returned; None after
        `timeout_s`.

        Raises WorkerError where a worker raised, or hangs, and is not replaced. What a worker in
        another program does not answer any more goes on elsewhere.
        """
        self._seat_newcomers()
        self._profile()
        hung = self._coordinator.hung(self._size.hang_limit_s)  # also while others answer
        result = hung or self._coordinator.next_result(timeout_s)
        if not isinstance(result, WorkerError):
            return result
        worker_id = result.worker_id
        if not self._coordinator.is_present(worker_id) or worker_id in self._leaving:
            return None  # it was lost, and raised after that
        engine = self._engine_of[worker_id]
        failures = sum(e == engine for e in self._engine_of.values())
        cause = result.__cause__
        elsewhere = isinstance(cause, Hang) and self._engines[engine].may_return
        if not elsewhere and not isinstance(cause, ProgramLost):
            if not self._size.restart or failures > MOST_RESTARTS:
                raise result
        self._note(worker_id, _how_lost(cause), str(cause), result.num_requests)
        if not isinstance(cause, Hang):
            self._threads[worker_id].join(LEAVING_S)  # it has raised, and is about to end
        hangs = self._abandon(worker_id)
        self._seated.discard(engine)
        self._leaving[worker_id] = result
        # its successor first, so that what it ran has somewhere to go
        self._seat_newcomers()
        if self._spot is not None:
            self._spot.lost(worker_id, hangs=hangs)
        return None

    def _profile(self) -> None:
        """Tell the scheduler how drafts do, where it asks for that, every `PROFILE_S`."""
        if self._acceptance is None or (now_s := self._clock()) - self._profiled_s < PROFILE_S:
            return
        self._profiled_s = now_s
        self._coordinator.profiled(self._acceptance())

    def _seat_newcomers(self) -> None:
        """Join with the engines that are ready and have no worker; then lose who is leaving."""
        for i, engine in enumerate(self._engines):
            if i not in self._seated and engine.is_ready:
                self._join(i)
        if self._seated:
            for worker_id in self._leaving:
                self._coordinator.lose(worker_id)
            self._leaving.clear()
        elif not any(engine.may_return for engine in self._engines):
            raise next(iter(self._leaving.values()))  # nobody is there, or to come

    def num_tokens(self, step: int) -> int:
        """Return the tokens that all workers emitted in a step so far."""
        return sum(work.stats.tokens for work in self._works[step])

    def stats(self, step: int) -> EngineStats:
        """Return the counts of all workers in a step so far."""
        works, now_s = list(self._works[step]), self._clock()
        if not works:
            return EngineStats()
        stats = joined([EngineStats(), *(work.stats for work in works)])
        stats.parts = [work.part(now_s) for work in works]
        return stats

    def new_events(self) -> list[WorkerEvent]:
        """Return which workers joined and were lost since the last call."""
        events, self._events = self._events, []
        return events

    def _note(self, worker_id: int, kind: Kind, why: str = "", requests: int = 0) -> None:
        name = _name(self._engines[self._engine_of[worker_id]])
        place = self._place_of[worker_id]
        event = WorkerEvent(name, place, kind, self._clock(), why, requests)
        self._events.append(event)

    def _end_threads(self, limit_s: float) -> WorkerError | None:
        """Wait until the workers' threads have ended; abandon those without a sign of life.

        Returns the error of the first of these.
        """
        first = None
        while alive := [w for w in self._threads if self._runs(w)]:
            self._threads[alive[0]].join(POLL_S)
            if (hung := self._coordinator.hung(limit_s, alive)) is not None:
                first = first or hung
                self._abandon(hung.worker_id)
                self._coordinator.forget(hung.worker_id)
        return first

    def _runs(self, worker_id: int) -> bool:
        return self._coordinator.is_present(worker_id) and self._threads[worker_id].is_alive()

    def _abandon(self, worker_id: int) -> bool:
        """Replace a worker's engine if its thread may still use it, which is returned."""
        i, hangs = self._engine_of[worker_id], self._threads[worker_id].is_alive()
        if hangs:
            self._engines[i] = self._engines[i].abandoned()
        return hangs

    def _join(self, engine: int) -> None:
        worker_id, size, runner = len(self._threads), self._size, self._engines[engine]
        self._seated.add(engine)
        if self._spot is not None:
            self._spot.joined(worker_id)
        inbox = self._coordinator.join(worker_id, size.kv_tokens, size.max_requests)
        source = WorkerSource(worker_id, inbox, self._coordinator, size, runner, self._spot)
        thread = threading.Thread(
            target=self._work,
            args=(worker_id, runner, source),
            name=f"worker-{worker_id}",
            daemon=True,
        )
        self._threads[worker_id], self._engine_of[worker_id] = thread, engine
        self._place_of[worker_id] = runner.where
        self._note(worker_id, "joined")
        thread.start()

    def _work(self, worker_id: int, engine: Engine, source: WorkerSource) -> None:
        """A worker's thread: one rollout of its engine for each step."""
        coordinator = self._coordinator
        try:
            while (step := source.next_step()) is not None:
                spec = self._specs[step]
                work = _Work(
                    _name(engine), self._place_of[worker_id], spec.policy_version, self._clock()
                )
                self._works[step].append(work)
                coordinator.alive(worker_id, "receiving weights")
                try:
                    # an engine in another program has a loop there
                    getattr(engine, "drive", partial(drive, engine))(
                        dataclasses.replace(spec, params=engine.place(spec.params)),
                        source,
                        stats=work.stats,
                        on_finish=lambda trajectory: coordinator.finished(worker_id, trajectory),
                        on_round=lambda finished, tokens: coordinator.alive(worker_id),
                    )
                finally:
                    work.ended_s = self._clock()
        except Aborted:
            pass
        except BaseException as error:
            coordinator.failed(worker_id, error)


def _name(engine: Engine) -> str:
    return f"worker {engine.number}"


def _how_lost(cause: BaseException | None) -> Kind:
    if isinstance(cause, ProgramLost):
        return "hung" if cause.silent else "killed"
    return "hung" if isinstance(cause, Hang) else "raised"
