"""Real engines and drafters on a virtual clock: what they decide is real, their seconds are priced.

A worker runs in a thread of its own, one at a time: whoever has the earliest time. A round's tokens
are there once its price has passed, so that who drafts, verifies or answers what, and in which
order, is what it would be on devices of these prices; and it repeats exactly.
"""

from __future__ import annotations

import collections
import heapq
import math
import threading
from collections.abc import Callable, Sequence

from rl.engine.engine import Engine
from rl.engine.stats import RoundRecord
from rl.trajectory import Trajectory
from spec.decoupled.ahead import DraftingAhead
from spec.decoupled.messages import Block, Commit
from spec.drafter import Source

Price = Callable[[RoundRecord, int], float]  # of a round, and its draft tokens


class VirtualTime:
    """The clock that threads share; `sleep` lets all others go on that are earlier."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turn = threading.Condition()
        self._waking: list[tuple[float, int]] = []  # (time, thread), of all but the one that runs
        self._running: int | None = None
        self._error: BaseException | None = None

    def __call__(self) -> float:
        return self.now_s

    def run(self, jobs: Sequence[Callable[[], object]]) -> float:
        """Run all jobs from now on; return the time at which the last one ends."""
        self._waking = [(self.now_s, i) for i in range(len(jobs))]
        threads = [
            threading.Thread(target=self._job, args=(i, job)) for i, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        with self._turn:
            self._next()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let this thread's work take so long."""
        with self._turn:
            me = self._running
            assert me is not None and seconds >= 0, seconds
            heapq.heappush(self._waking, (self.now_s + seconds, me))
            self._next()
            self._turn.wait_for(lambda: self._running == me)

    def _next(self) -> None:
        self._running = None
        if self._waking:
            self.now_s, self._running = heapq.heappop(self._waking)
        self._turn.notify_all()

    def _job(self, me: int, job: Callable[[], object]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running == me)
        try:
            job()
        except BaseException as error:
            self._error = self._error or error
        with self._turn:
            self._next()


class PricedEngine(Engine):
    """An engine whose rounds take their price; `set_prices` comes before its first rollout."""

    def set_prices(self, time: VirtualTime, price: Price) -> None:
        self._time, self._price, self._drafted = time, price, 0
        self.clock = time

    def _retire_ended(self) -> list[Trajectory]:
        if (drafted := self.stats.drafted_nodes) < self._drafted:
            self._drafted = 0  # another rollout's
        self._time.sleep(self._price(self.stats.timeline[-1], drafted - self._drafted))
        self._drafted = drafted
        return super()._retire_ended()


class PricedDrafting:
    """A drafting worker: what it does between two looks of its links is done at the second one.

    `price` are the seconds of a step for a number of requests. What is said while it drafts is
    heard after that; its blocks are there once their price has passed.
    """

    def __init__(
        self, ahead: DraftingAhead, price: Callable[[int], float], time: VirtualTime
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
                taken_s = self._price(len(blocks))
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
            self._ahead.hear(commits, closed)


class PricedLink:
    """A verifying worker's link to a drafting worker on the same virtual clock."""

    source, generation = Source.MODEL, 0

    def __init__(self, worker: PricedDrafting) -> None:
        self._worker = worker
        self.blocks: list[Block] = []

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
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
