"""A session of workers: the thread that runs their driver, its mailbox, and its results.

owner ──submit, trained, recall──→ mail ←──reports, errors── calls of workers
                                    │
                          `rl.sessions.driver.Driver`
                                    │
owner ←──trajectories, deferred and returned requests, errors
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.stats import EngineStats, PoolCounts
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.records.worker_record import WorkerEvent
from reprise.rl.runtime.waits import POLL_S, Hang, code_line
from reprise.rl.sessions.driver import LEAVING_S, SPARE_POLL_S, Driver
from reprise.rl.workers.messages import Deferred, Result, Returned, WorkerLimits
from reprise.rl.workers.pool import IdleWork, Place
from reprise.sched import protocol
from reprise.sched.request import RequestSpec
from reprise.spec.config import SamplingConfig


class Session:
    """A driver and its thread, which this context manager starts and stops.

    Any thread may call the methods. `deliver` receives results in the driver thread, in place of
    `next_result`. The driver counts as hung after `hang_limit_s` without a heartbeat.
    """

    def __init__(
        self,
        places: Sequence[Place],
        scheduler: protocol.Scheduler,
        limits: WorkerLimits,
        *,
        clock: Callable[[], float],
        hang_limit_s: float,
        pool_bytes: int,
        deliver: Callable[[Result], None] | None = None,
        can_restart: bool = False,
        idle_work: IdleWork | None = None,
        acceptance: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        self._mail: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._deliver = deliver or self._results.put
        self._driver = Driver(
            places,
            scheduler,
            limits,
            clock,
            deliver=self._deliver,
            later=self._mail.put,
            pool_bytes=pool_bytes,
            can_restart=can_restart,
            idle_work=idle_work,
            acceptance=acceptance,
        )
        self._clock = clock
        self._hang_limit_s = hang_limit_s
        self._heartbeat_s = clock()
        self._samplings: dict[int, SamplingConfig] = {}
        self._counted = PoolCounts()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._mail.put(partial(self._driver.close, abort=kind is not None))
        while self._thread.is_alive() and (kind is None or self._silent_s < LEAVING_S):
            self._thread.join(POLL_S)
            if kind is None:
                self.look_for_hang()
        if kind is None and self._driver.error is not None:
            raise self._driver.error

    @contextlib.contextmanager
    def aborted_at_end(self) -> Iterator[None]:
        """Enter the session, and abort requests that still run at the exit."""
        self.__enter__()
        try:
            yield
        finally:
            self.__exit__(KeyboardInterrupt)

    def submit(
        self,
        step: int,
        spec: RolloutSpec | None,
        requests: Sequence[Request],
        past_tokens: Mapping[int, tuple[int, ...]] | None = None,
        *,
        is_ahead: bool = False,
        oldest: int | None = None,
    ) -> None:
        """Submit requests of a step; without `spec`, more requests that an earlier step waits for.

        Ids must be unique among unfinished requests. `past_tokens` are the response lengths of the
        last epoch, by group. With `is_ahead`, the requests run on workers without other requests.
        Steps before `oldest`, by default `step` − 1, are forgotten.
        """
        past = past_tokens or {}
        is_urgent = spec is None
        oldest = step - 1 if oldest is None else oldest
        if spec is not None:
            self._samplings = {s: x for s, x in self._samplings.items() if s >= oldest}
            self._samplings[step] = spec.sampling
            for place in self._driver.places:
                place.announce(spec)
        specs = tuple(
            RequestSpec(
                r.request_id,
                r.group_id,
                len(r.prompt_ids),
                r.limit(self._samplings[step]),
                past_tokens=past.get(r.group_id, ()),
                step=step,
                prefix_tokens=_prefix_tokens(r),
                urgent=is_urgent,
                ahead=is_ahead,
            )
            for r in requests
        )
        event = protocol.Submitted(specs, step)
        self._mail.put(partial(self._driver.submit, event, spec, requests, oldest))

    def trained(self, step: int, train_s: float | None = None) -> None:
        """Report that the update of a step is done, and how long it took."""
        self._mail.put(partial(self._driver.handle, protocol.Trained(step, train_s)))

    def recall(self) -> None:
        """Recall requests that were started ahead; they become results, finished or `Returned`."""
        self._mail.put(partial(self._driver.handle, protocol.Recalled()))

    def next_result(self, timeout_s: float) -> Trajectory | Deferred | Returned | None:
        """Return the next result, or None after `timeout_s`.

        Raises WorkerError if a worker raised or hangs and is not replaced, and Hang if the driver
        hangs.
        """
        try:
            result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self.look_for_hang()
            return None
        if isinstance(result, BaseException):
            self._results.put(result)  # for the next call
            raise result
        return result

    def look_for_hang(self) -> None:
        """Raise Hang if the driver thread sends no heartbeat."""
        if (silent_s := self._silent_s) > self._hang_limit_s:
            where = code_line(self._thread.ident or 0)
            raise Hang(f"no sign of life for {silent_s:.1f} s from the driver's thread ({where})")

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._heartbeat_s

    def num_tokens(self, step: int) -> int:
        """Return the number of tokens that all workers emitted in a step so far."""
        return self._driver.counts.num_tokens(step)

    def stats(self, step: int) -> EngineStats:
        """Return the statistics of all workers in a step so far."""
        return self._driver.counts.stats(step)

    def new_events(self) -> list[WorkerEvent]:
        """Return the workers that joined or were lost since the last call."""
        events = self._driver.events
        return [events.popleft() for _ in range(len(events))]

    def new_pool_counts(self) -> PoolCounts:
        """Return the counts of keys and values moved or dropped since the last call."""
        now = self._driver.requests.counts
        before = self._counted
        self._counted = now
        return now.since(before)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        driver = self._driver
        while not driver.has_ended:
            try:
                self.run_once(SPARE_POLL_S if driver.has_idle_workers else POLL_S)
            except BaseException as error:
                self._deliver(error)
                if driver.ends_s is not None:
                    driver.error = driver.error or error
                    break
                driver.close(abort=True)
        driver.end()

    def run_once(self, timeout_s: float) -> None:
        """Handle mail that is waiting or arrives within `timeout_s`, then call the workers."""
        self._heartbeat_s = self._clock()
        self._driver.begin_turn()
        try:
            self._mail.get(timeout=timeout_s)()
            while True:
                self._mail.get_nowait()()
        except queue.Empty:
            pass
        self._driver.end_turn()


def _prefix_tokens(request: Request) -> int:
    """Return the number of tokens that the first start of a request may add in one round."""
    cached = 0 if request.cached is None else len(request.cached.tokens)
    known = max(cached, len(request.begun))
    return known + 1 if known else 0
