"""One engine per thread under a shared scheduler, until the group is closed.

Steps of requests are submitted while earlier ones may still run; a worker copies the weights of
a step when it begins it. Results come back as responses end.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, MutableSequence, Sequence

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats, joined
from rl.runtime.waits import POLL_S, Hang
from rl.trajectory import Request, Trajectory
from rl.workers.coordinator import Aborted, Coordinator, Deferred, WorkerError
from rl.workers.host_kv_pool import KvPool
from rl.workers.worker_source import IdleWork, WorkerLimits, WorkerSource
from sched.protocol import Scheduler, SchedulerDecision

MOST_RESTARTS = 3  # of one engine in a group: what fails more often will not heal
LEAVING_S = 5.0  # that workers have to end, once a rollout is aborted


class WorkerGroup:
    """Worker threads and their engines; a context manager that ends all workers on exit.

    A thread that hangs cannot be ended. It is abandoned together with its engine, which a new
    engine of the same settings replaces in `engines`.
    """

    def __init__(
        self,
        engines: MutableSequence[Engine],
        scheduler: Scheduler,
        size: WorkerLimits,
        clock: Callable[[], float],
        spot: IdleWork | None = None,
    ) -> None:
        self._engines, self._size, self._spot = engines, size, spot
        pool = KvPool(size.pool_bytes)
        self._coordinator = Coordinator(scheduler, clock, pool, size.keeps_decisions)
        self._threads: dict[int, threading.Thread] = {}
        self._engine_of: dict[int, int] = {}
        self._specs: dict[int, RolloutSpec] = {}
        self._stats: collections.defaultdict[int, list[EngineStats]] = collections.defaultdict(list)

    def __enter__(self) -> WorkerGroup:
        for i in range(len(self._engines)):
            self._join(i)
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
    ) -> None:
        """Submit all requests of a step; ids are unique in a group's life.

        `spec.params` are copied to the devices of each worker. `past_tokens` are the lengths of
        last epoch's responses, by group.
        """
        self._specs[step] = spec
        for table in (self._specs, self._stats):
            for old in [s for s in table if s < step - 1]:
                del table[old]  # a worker that begins with a step now has a newer one
        self._coordinator.submit(step, requests, spec.sampling, past_tokens or {})
        if self._spot is not None:
            self._spot.rollout_began()

    def trained(self, step: int) -> None:
        """Tell the scheduler that the update of a step is done."""
        self._coordinator.trained(step)

    def next_result(self, timeout_s: float) -> Trajectory | Deferred | None:
        """Return the next response, or the next request that was deferred; None after `timeout_s`.

        Raises WorkerError where a worker raised, or hangs, and is not replaced.
        """
        result = self._coordinator.next_result(timeout_s)
        if result is None:
            result = self._coordinator.hung(self._size.hang_limit_s)
        if not isinstance(result, WorkerError):
            return result
        worker_id = result.worker_id
        if not self._coordinator.is_present(worker_id):
            return None  # it was lost, and raised after that
        engine = self._engine_of[worker_id]
        failures = sum(e == engine for e in self._engine_of.values())
        if not self._size.restart or failures > MOST_RESTARTS:
            raise result
        if not isinstance(result.__cause__, Hang):
            self._threads[worker_id].join(LEAVING_S)  # it has raised, and is about to end
        hangs = self._abandon(worker_id)
        # its successor first, so that what it ran has somewhere to go
        self._join(engine)
        self._coordinator.lose(worker_id)
        if self._spot is not None:
            self._spot.lost(worker_id, hangs=hangs)
        return None

    def num_tokens(self, step: int) -> int:
        """Return the tokens that all workers emitted in a step so far."""
        return sum(stats.tokens for stats in self._stats[step])

    def stats(self, step: int) -> EngineStats:
        """Return the counts of all workers in a step so far."""
        return joined(self._stats[step]) if self._stats[step] else EngineStats()

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
            self._engines[i] = dataclasses.replace(self._engines[i])
        return hangs

    def _join(self, engine: int) -> None:
        worker_id, size, runner = len(self._threads), self._size, self._engines[engine]
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
        thread.start()

    def _work(self, worker_id: int, engine: Engine, source: WorkerSource) -> None:
        """A worker's thread: one rollout of its engine for each step."""
        coordinator = self._coordinator
        try:
            while (step := source.next_step()) is not None:
                spec, stats = self._specs[step], EngineStats()
                self._stats[step].append(stats)
                coordinator.alive(worker_id, "receiving weights")
                engine.run(
                    dataclasses.replace(spec, params=engine.place(spec.params)),
                    (),
                    source=source,
                    stats=stats,
                    on_finish=lambda trajectory: coordinator.finished(worker_id, trajectory),
                    on_round=lambda finished, tokens: coordinator.alive(worker_id),
                )
        except Aborted:
            pass
        except BaseException as error:
            coordinator.failed(worker_id, error)
