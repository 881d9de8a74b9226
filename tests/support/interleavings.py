"""Every two events of the coordinator, one inside the other, wherever no lock is held.

A rollout of two workers, and a third without work, is half done. Then one event happens, and at
each moment when a thread switch could let another event in, that event happens as a whole. The
rollout then runs to its end. Counts: lost and repeated results, endless waits, errors in innocent
threads, leftover entries, deferred requests, starts that wait for a copy. No threads, no clock.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fake_workers import begun, trajectory

from rl.trajectory import Request, Trajectory
from rl.workers.coordinator import Coordinator
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import Aborted, Deferred, WorkerError
from sched.policies.divided import make_scheduler
from sched.policies.histopipe import HistoPipe, HistoPipeConfig
from sched.policies.steps import StepOrder
from sched.protocol import Scheduler, Start
from spec.config import SamplingConfig

LENGTHS = (2, 9, 12, 5, 12, 3)  # of the responses, by request
LIMIT, CHUNK, STEPS = 12, 4, 2
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "group_fifo": lambda: make_scheduler("group_fifo", seed=0, chunk_tokens=CHUNK),
    "divided_fifo": lambda: make_scheduler("divided_fifo", seed=0, chunk_tokens=CHUNK),
    "seer": lambda: make_scheduler("seer", seed=0, chunk_tokens=CHUNK),
    "seer, one step off": lambda: StepOrder(
        make_scheduler("seer", seed=0, chunk_tokens=CHUNK), "one_step_off"
    ),
    "histopipe": lambda: HistoPipe(
        HistoPipeConfig(STEPS, num_ranking_groups=2, last_share=1.0, check_tokens=CHUNK)
    ),
}
MOST_ERRORS = 10
EVENTS = (
    *("take 0", "take 1", "take 2", "finish 0", "finish 1", "chunk 0", "chunk 1"),
    *("give up 0", "give up 1", "raise 0", "raise 1", "join", "submit", "trained", "abort"),
)
WRONG = ("results_lost", "results_twice", "waits", "errors", "left_in_books")


def thread_of(event: str) -> str:
    """Who does it: events of one thread come one after the other only."""
    name, _, number = event.rpartition(" ")
    if event == "join" or name == "give up":
        return "receiver"
    return f"worker {number}" if number.isdigit() else "caller"


class WouldWait(Exception):
    """An entry of the pool is promised, and has not come."""


class Switch:
    """Counts the moments when a thread switch may come; at one of them another event happens."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.event: Callable[[], None] = lambda: None
        self.count, self.held, self.active = 0, 0, False

    def point(self) -> None:
        if self.held or not self.active:
            return
        self.count += 1
        if self.count - 1 == self.at:
            self.active = False
            self.event()
            self.active = True


class SwitchingLock:
    """A lock before and behind which a switch may come."""

    def __init__(self, switch: Switch) -> None:
        self._switch, self._lock = switch, threading.Lock()
        self.looked = False

    def __enter__(self) -> None:
        self._switch.point()
        assert self._lock.acquire(blocking=False), "one thread: nobody else can hold it"
        self._switch.held += 1

    def __exit__(self, *_: object) -> None:
        self._switch.held -= 1
        self._lock.release()
        self._switch.point()

    def wait(self, timeout_s: float) -> None:
        """Time is up at once; by the second time nothing has come, and nothing ended it."""
        if self.looked:
            raise WouldWait
        self.looked = True

    def notify_all(self) -> None:
        """Nobody waits here."""


@dataclasses.dataclass
class Row:
    """A request on a worker: its tokens so far, and up to how many it may go there."""

    request: Request
    tokens: int
    until: int


class Rollout:
    """A coordinator, and by hand what sessions and workers do about it."""

    def __init__(self, scheduler: str, coordinator: type[Coordinator] = Coordinator) -> None:
        self.switch, self.pool = Switch(), KvPool(0)
        self.coordinator = coordinator(SCHEDULERS[scheduler](), lambda: 0.0, self.pool)
        self.coordinator._lock = SwitchingLock(self.switch)  # type: ignore[assignment]
        self.pool._lock = self.pool._changed = SwitchingLock(self.switch)  # type: ignore[assignment]
        self.numbers = itertools.count()
        self.inboxes: dict[int, Any] = {}
        self.taken: dict[int, list[Start]] = collections.defaultdict(list)
        self.begun: dict[int, int] = collections.defaultdict(int)  # the latest step, by worker
        self.rows: dict[int, dict[int, Row]] = collections.defaultdict(dict)
        self.ended: set[int] = set()  # workers whose threads are no more
        self.requests: dict[int, Request] = {}
        self.results: list[int] = []
        self.errors: list[str] = []
        self.steps = self.trained = self.deferred = self.waited = 0
        self.aborted = False
        for _ in range(2):
            self.do("join")
        self.do("submit")
        self.do("join")  # with so much room that requests move there
        for worker in (0, 1):  # one start stays in each inbox
            for _ in range(self.inboxes[worker].qsize() - 1):
                self.take(worker)

    def do(self, event: str) -> bool:
        """Let an event happen; False where it cannot."""
        name, _, number = event.rpartition(" ")
        if number.isdigit():
            worker = int(number)
            if worker in self.ended:
                return False
            return self._guarded(worker, name)
        if event == "join":
            worker = next(self.numbers)
            self.inboxes[worker] = self.coordinator.join(worker, 64 if worker == 2 else 28, 3)
        elif event == "submit":
            if self.steps == STEPS:
                return False
            first, step = self.steps * len(LENGTHS), self.steps
            self.steps += 1
            new = [Request(first + i, (1, 2), (first + i) // 2, i % 2) for i in range(len(LENGTHS))]
            self.requests |= {r.request_id: r for r in new}
            past = {r.group_id: (4, 4) for r in new}
            self.coordinator.submit(step, new, SamplingConfig(max_new_tokens=LIMIT), past)
        elif event == "trained":
            self.trained += 1
            self.coordinator.trained(self.trained - 1)
        else:
            assert event == "abort"
            self.aborted = True
            self.coordinator.close(abort=True)
        return True

    def _guarded(self, worker: int, name: str) -> bool:
        """What a worker's thread does, and what becomes of it where it raises."""
        try:
            if name == "take":
                return self.take(worker)
            if name in ("finish", "chunk"):
                return self.end(worker, whole=name == "finish")
            if name == "give up":
                return self._lose(worker)
            assert name == "raise"
            self.ended.add(worker)
            self.coordinator.failed(worker, RuntimeError("planted"))
        except Aborted:
            self.ended.add(worker)
        except WouldWait:
            raise
        except Exception as error:
            self.errors.append(f"worker {worker} at {name}: {type(error).__name__}: {error}")
            self.ended.add(worker)
            self.coordinator.failed(worker, error)
        return True

    def take(self, worker: int) -> bool:
        """Begin with a start of the inbox."""
        if not self.taken[worker]:
            if not self.inboxes[worker].qsize():
                return False
            item = self.inboxes[worker].get_nowait()
            if item is None:
                self.ended.add(worker)
                return True
            step, start = item
            self.begun[worker] = max(step, self.begun[worker])
            self.coordinator.begin_step(worker, self.begun[worker])
            self.taken[worker].append(start)
        self.pool._changed.looked = False  # type: ignore[attr-defined]
        try:
            chunk = self.coordinator.chunk(worker, self.taken[worker][0])
        except WouldWait:
            self.waited += 1
            raise
        self.taken[worker].pop()
        tokens = chunk.num_tokens
        assert chunk.max_tokens is not None
        row = Row(chunk.request, tokens, tokens + chunk.max_tokens)
        self.rows[worker][row.request.request_id] = row
        return True

    def end(self, worker: int, *, whole: bool) -> bool:
        """Report of a request that ends with its start (`whole`), or only its chunk does."""
        for request_id, row in self.rows[worker].items():
            length = LENGTHS[request_id % len(LENGTHS)]
            if (length <= row.until) != whole:
                continue
            if whole:
                del self.rows[worker][request_id]
                self.coordinator.finished(worker, trajectory(row.request, length))
                return True
            row.tokens = row.until
            more = self.coordinator.chunk_ended(worker, request_id, row.tokens)
            row.until += more
            if not more:
                del self.rows[worker][request_id]
                self.coordinator.park(worker, [begun(row.request, row.tokens)])
            return True
        return False

    def _lose(self, worker: int) -> bool:
        """As `rl.workers.worker_group` does about a worker that raised or hangs."""
        if not self.coordinator.is_present(worker):
            return False
        self.do("join")
        self.coordinator.lose(worker)
        return True

    def collect(self) -> bool:
        """What the caller does about results; whether there were any."""
        some = False
        while (result := self.coordinator.next_result(0.0)) is not None:
            some = True
            if isinstance(result, WorkerError):
                try:
                    self._lose(result.worker_id)
                except Exception as error:
                    self.errors.append(f"caller: {type(error).__name__}: {error}")
            elif isinstance(result, Deferred):
                self.deferred += 1
            elif isinstance(result, Trajectory):
                assert result.num_tokens == LENGTHS[result.request_id % len(LENGTHS)]
                self.results.append(result.request_id)
        return some

    def finish(self) -> int:
        """Play the rollout to its end; how many workers wait for ever."""
        while True:
            waiting, moved = set(), self.collect()
            for worker in [w for w in self.inboxes if w not in self.ended]:
                for name in ("take", "finish", "chunk"):
                    try:
                        moved |= worker not in self.ended and self._guarded(worker, name)
                    except WouldWait:
                        waiting.add(worker)
            stuck = len(self.errors) > MOST_ERRORS  # each successor may fail in its turn
            if stuck or (not moved and (self.aborted or not self._next_step())):
                return len(waiting)

    def _next_step(self) -> bool:
        """Whether there is a step to be trained, or to be asked for, that others wait for."""
        if self.trained < STEPS:
            return self.do("trained")
        return self.do("submit")

    def counts(self) -> collections.Counter[str]:
        """What has gone wrong, once it is over."""
        waits = self.finish()
        books = self.coordinator
        left = 0
        if not self.aborted:
            starts = sum(len(worker.starts) for worker in books._workers.values())
            left = len(books._asked) + starts + len(self.pool)
        wanted = set() if self.aborted else set(self.requests)
        return collections.Counter(
            results_lost=len(wanted - set(self.results)),
            results_twice=len(self.results) - len(set(self.results)),
            waits=waits,
            errors=len(self.errors),
            left_in_books=left,
            deferred=self.deferred,
            waited=self.waited,
        )


def interleaved(
    scheduler: str, first: str, second: str, at: int, coordinator: type[Coordinator]
) -> tuple[Rollout | None, int]:
    """`second` happens at switch point `at` of `first`; also how many such points there are.

    Behind it, where one thread does both. None where one of them cannot happen.
    """
    rollout, possible = Rollout(scheduler, coordinator), [True]
    late = []

    def inner() -> None:
        try:
            possible.append(rollout.do(second))
        except WouldWait:  # for the first one, which has to go on
            late.append(second)

    switch = rollout.switch
    if thread_of(first) == thread_of(second):
        possible += [rollout.do(first), rollout.do(second)]
        switch.count = 1
    else:
        switch.at, switch.event, switch.active = at, inner, True
        possible.append(rollout.do(first))
        switch.active = False
        for event in late:
            rollout.do(event)
    return rollout if all(possible) else None, switch.count


def all_of(
    scheduler: str, coordinator: type[Coordinator] = Coordinator
) -> Iterator[tuple[str, str, int, collections.Counter[str]]]:
    """(first event, second, switch point, what went wrong) of all interleavings there are."""
    for first in EVENTS:
        for second in EVENTS:
            at, points = 0, 1
            while at < points:
                rollout, points = interleaved(scheduler, first, second, at, coordinator)
                if rollout is not None:
                    yield first, second, at, rollout.counts()
                at += 1
