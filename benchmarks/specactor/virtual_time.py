"""Real engines and drafters on a virtual clock: what they decide is real, their seconds are priced.

A worker runs in a thread of its own, one at a time: whoever has the earliest time. A round's tokens
are there once its price has passed, so that who drafts, verifies or answers what, and in which
order, is what it would be on devices of these prices; and it repeats exactly.
"""

from __future__ import annotations

import collections
import heapq
import math
import queue
import threading
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from typing import Any

from rl.workers.coordinator import Coordinator
from rl.workers.worker_group import WorkerGroup
from rl.workers.worker_source import WorkerLimits, WorkerSource

from rl.engine.engine import Engine
from rl.engine.stats import RoundRecord
from rl.trajectory import PartialRequest, Trajectory
from sched.protocol import Scheduler
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.messages import Block, Commit

WAITING_S = 1e-3  # between two looks for what another worker is to hand over
Price = Callable[[RoundRecord, int], float]  # of a round, and its draft tokens


class VirtualTime:
    """The clock that `num_threads` threads share; whoever has the earliest time has the turn.

    A thread takes part from its first `get` of an inbox on, or through `run`. Nobody goes on before
    all have come.
    """

    def __init__(self, num_threads: int = 0) -> None:
        self.now_s = 0.0
        self._expected = num_threads
        self._turn = threading.Condition()
        self._come: set[int] = set()
        self._waking: list[tuple[float, int]] = []  # (time, thread), of those that only wait
        self._running: int | None = None
        self._error: BaseException | None = None

    def __call__(self) -> float:
        return self.now_s

    def run(self, jobs: Sequence[Callable[[], object]]) -> float:
        """Run all jobs from now on; return the time at which the last one ends."""
        self._expected += len(jobs)
        threads = [threading.Thread(target=self._job, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self.now_s

    def _job(self, job: Callable[[], object]) -> None:
        try:
            self.wait_for(lambda: True)
            job()
        except BaseException as error:
            self._error = self._error or error
        self.leave()

    def sleep(self, seconds: float) -> None:
        """Let this thread's work take so long."""
        with self._turn:
            assert self._running == threading.get_ident() and seconds >= 0, seconds
            self._wake(self._running, self.now_s + seconds)
            self._pass_on()
            self._await_turn()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Have the turn once something is there: whoever brings it calls `wake` for this thread."""
        with self._turn:
            me = threading.get_ident()
            if self._running != me:
                self._come.add(me)
                if is_there():
                    self._wake(me, self.now_s)
                if self._running is None:
                    self._pass_on()
            elif not is_there():
                self._pass_on()
            self._await_turn()

    def wake(self, thread: int | None) -> None:
        """Let a thread that waits for something go on now."""
        with self._turn:
            waits = thread != self._running and thread not in [t for _, t in self._waking]
            if thread in self._come and waits:
                self._wake(thread, self.now_s)
                if self._running is None:
                    self._pass_on()

    def leave(self) -> None:
        """Take part no more."""
        with self._turn:
            if self._running == threading.get_ident():
                self._pass_on()

    def _wake(self, thread: int | None, at_s: float) -> None:
        assert thread is not None
        heapq.heappush(self._waking, (at_s, thread))

    def _pass_on(self) -> None:
        self._running = None
        if self._waking and len(self._come) >= self._expected:
            self.now_s, self._running = heapq.heappop(self._waking)
        self._turn.notify_all()

    def _await_turn(self) -> None:
        self._turn.wait_for(lambda: self._running == threading.get_ident())


class VirtualInbox:
    """A worker's inbox: who waits for it lets the others go on."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._reader = time, None
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._time.wake(self._reader)

    def get(self, timeout: float | None = None) -> Any:
        self._reader = threading.get_ident()
        self._time.wait_for(lambda: bool(self._items))
        item = self._items.popleft()
        if item is None:  # nothing more will come
            self._time.leave()
        return item

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class PricedEngine(Engine):
    """An engine whose rounds take their price; `set_prices` comes before its first rollout.

    `price_entry` are the seconds of taking up requests with keys and values from elsewhere.
    """

    def set_prices(
        self,
        time: VirtualTime,
        price: Price,
        price_entry: Callable[[PartialRequest], float] = lambda partial: 0.0,
        after_round: Callable[[], object] = lambda: None,
    ) -> None:
        self._time, self._price, self._drafted = time, price, 0
        self._price_entry, self._after_round = price_entry, after_round
        self.clock = time

    def add(self, requests: Sequence[PartialRequest]) -> None:
        super().add(requests)
        for new in requests:
            if new.kv is not None:
                self._time.sleep(self._price_entry(new))

    def _retire_ended(self) -> list[Trajectory]:
        if (drafted := self.stats.drafted_nodes) < self._drafted:
            self._drafted = 0  # another rollout's
        self._time.sleep(self._price(self.stats.timeline[-1], drafted - self._drafted))
        self._drafted = drafted
        self._after_round()
        return super()._retire_ended()


class PricedDrafting:
    """A drafting worker: what it does between two looks of its links is done at the second one.

    `price` are the seconds of a step by its requests and its window. What is said while it drafts
    is heard after that; its blocks are there once their price has passed.
    """

    def __init__(
        self, ahead: DraftingAhead, price: Callable[[int, int], float], time: VirtualTime
    ) -> None:
        self._ahead, self._price, self.time = ahead, price, time
        self._said: collections.deque[tuple[float, Sequence[Commit], Sequence[int]]] = (
            collections.deque()
        )
        self._free_s = self.busy_s = 0.0
        self._done: list[tuple[float, list[Block]]] = []
        self.links: dict[int, PricedLink] = {}  # by request

    def say(self, link: PricedLink, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        self.links.update({commit.request_id: link for commit in commits})
        self._said.append((self.time.now_s, commits, closed))

    def work(self) -> None:
        """Do all that has begun by now, and bring what has ended by now."""
        now_s = self.time.now_s
        while self._free_s <= now_s:
            self._hear(self._free_s)
            blocks = self._ahead.step()
            if blocks:
                taken_s = self._price(len(blocks), self._ahead.depth)
                self._free_s, self.busy_s = self._free_s + taken_s, self.busy_s + taken_s
                self._done.append((self._free_s, blocks))
            elif self._said and self._said[0][0] <= now_s:
                self._free_s = self._said[0][0]
            else:
                break
        # idle until something is said, which cannot be before now
        there = [blocks for at_s, blocks in self._done if at_s <= now_s]
        self._done = [(at_s, blocks) for at_s, blocks in self._done if at_s > now_s]
        for block in (block for blocks in there for block in blocks):
            self.links[block.request_id].blocks.append(block)

    @property
    def next_s(self) -> float:
        """When the next blocks are there that are being drafted now."""
        return min((at_s for at_s, _ in self._done), default=math.inf)

    def _hear(self, until_s: float) -> None:
        while self._said and self._said[0][0] <= until_s:
            _, commits, closed = self._said.popleft()
            self._ahead.update(commits, closed)


class PricedLink:
    """A verifying worker's link to a drafting worker on the same virtual clock."""

    generation = 0

    def __init__(self, worker: PricedDrafting) -> None:
        self._worker = worker
        self.blocks: list[Block] = []

    def send(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        self._worker.work()  # what began before now does not know of it
        self._worker.say(self, commits, closed)

    def take(self) -> Sequence[Block]:
        self._worker.work()
        blocks, self.blocks = self.blocks, []
        return blocks

    def wait(self, timeout_s: float) -> None:
        time = self._worker.time
        time.sleep(max(0.0, min(timeout_s, self._worker.next_s - time.now_s)))
        self._worker.work()


class VirtualGroup(WorkerGroup):
    """Workers of a run on a virtual clock: coordinator, scheduler and inboxes are those of runs."""

    def __init__(
        self,
        engines: MutableSequence[Engine],
        scheduler: Scheduler,
        limits: WorkerLimits,
        time: VirtualTime,
    ) -> None:
        self.make_coordinator = partial(_VirtualCoordinator, time)  # type: ignore[assignment]
        super().__init__(engines, scheduler, limits, time)

    def _work(self, worker_id: int, engine: Engine, source: WorkerSource) -> None:
        try:
            super()._work(worker_id, engine, source)
        finally:
            self._clock.leave()  # type: ignore[attr-defined]  # it is a `VirtualTime`

    @property
    def coordinator(self) -> Coordinator:
        return self._coordinator


class _VirtualCoordinator(Coordinator):
    def __init__(self, time: VirtualTime, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._time = time
        self.make_inbox = lambda: VirtualInbox(time)  # type: ignore[assignment,return-value]

    def _waits_for(self, worker_id: int, owner: int) -> None:
        super()._waits_for(worker_id, owner)
        self._time.sleep(WAITING_S)
