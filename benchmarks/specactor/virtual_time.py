"""Real engines and drafters on a virtual clock: their decisions are real, their seconds priced.

A worker runs in a thread of its own, one at a time: the one with the earliest time. A round's
tokens arrive once its price has passed, so that drafts, verifications and answers come in the order
that devices of these prices would give; and it repeats exactly.
"""

from __future__ import annotations

import collections
import heapq
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from reprise.rl.engine.engine import Engine
from reprise.rl.records.stats import RoundRecord
from reprise.rl.records.trajectory import Trajectory
from reprise.spec.decoupled.ahead import DraftingAhead
from reprise.spec.decoupled.messages import Block, Commit

Price = Callable[[RoundRecord, int], float]  # of a round, and its draft tokens


class VirtualTime:
    """The clock that jobs in threads share."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turn = threading.Condition()
        self._waking: list[tuple[float, int]] = []  # (time, job)
        self._running = -1

    def __call__(self) -> float:
        return self.now_s

    def run(self, jobs: Sequence[Callable[[], object]]) -> float:
        """Run all jobs from now on; return the time at which the last one ends."""
        self._waking = [(self.now_s, i) for i in range(len(jobs))]
        self._pass_on()
        with ThreadPoolExecutor(len(jobs)) as pool:
            for _ in pool.map(self._job, range(len(jobs)), jobs):
                pass
        return self.now_s

    def _job(self, number: int, job: Callable[[], object]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running == number)
        try:
            job()
        finally:
            with self._turn:
                self._pass_on()

    def sleep(self, seconds: float) -> None:
        """Let the work of the running job take so long."""
        assert seconds >= 0, seconds
        with self._turn:
            me = self._running
            heapq.heappush(self._waking, (self.now_s + seconds, me))
            self._pass_on()
            self._turn.wait_for(lambda: self._running == me)

    def _pass_on(self) -> None:
        if self._waking:
            self.now_s, self._running = heapq.heappop(self._waking)
        with self._turn:
            self._turn.notify_all()


class PricedEngine(Engine):
    """An engine whose rounds take their price; `set_price` comes before its first rollout."""

    def set_price(self, time: VirtualTime, price: Price) -> None:
        self._time, self._price, self._drafted = time, price, 0
        self.clock = time

    def _retire_ended(self) -> list[Trajectory]:
        if (drafted := self.stats.drafted_nodes) < self._drafted:
            self._drafted = 0  # another rollout's
        self._time.sleep(self._price(self.stats.timeline[-1], drafted - self._drafted))
        self._drafted = drafted
        return super()._retire_ended()


class PricedDrafting:
    """A drafting worker: its work between two looks of its links is done at the second one.

    `price` are the seconds of a step by its requests and its window. Messages that come while it
    drafts are read afterwards; its blocks arrive once their price has passed.
    """

    def __init__(
        self, ahead: DraftingAhead, price: Callable[[int, int], float], time: VirtualTime
    ) -> None:
        self._ahead, self._price, self.time = ahead, price, time
        self._sent = collections.deque[tuple[float, Sequence[Commit], Sequence[int]]]()
        self._free_s = self.busy_s = 0.0
        self._done: list[tuple[float, list[Block]]] = []
        self.links: dict[int, PricedLink] = {}  # by request

    def send(self, link: PricedLink, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        self.links.update({commit.request_id: link for commit in commits})
        self._sent.append((self.time.now_s, commits, closed))

    def work(self) -> None:
        """Do all work that starts by now, and deliver all that ends by now."""
        now_s = self.time.now_s
        while self._free_s <= now_s:
            while self._sent and self._sent[0][0] <= self._free_s:
                _, commits, closed = self._sent.popleft()
                self._ahead.update(commits, closed)
            if blocks := self._ahead.step():
                taken_s = self._price(len(blocks), self._ahead.depth)
                self._free_s, self.busy_s = self._free_s + taken_s, self.busy_s + taken_s
                self._done.append((self._free_s, blocks))
            elif self._sent and self._sent[0][0] <= now_s:
                self._free_s = self._sent[0][0]
            else:
                break  # idle until a message comes, which cannot be before now
        for block in (block for at_s, blocks in self._done if at_s <= now_s for block in blocks):
            self.links[block.request_id].blocks.append(block)
        self._done = [(at_s, blocks) for at_s, blocks in self._done if at_s > now_s]

    @property
    def next_s(self) -> float:
        """The time at which the next blocks arrive, of those in work."""
        return min((at_s for at_s, _ in self._done), default=math.inf)


class PricedLink:
    """A verifying worker's link to a drafting worker on the same virtual clock."""

    generation = 0

    def __init__(self, worker: PricedDrafting) -> None:
        self._worker = worker
        self.blocks: list[Block] = []

    def send(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        self._worker.work()  # what began before now does not know of it
        self._worker.send(self, commits, closed)

    def take(self) -> Sequence[Block]:
        self._worker.work()
        blocks, self.blocks = self.blocks, []
        return blocks

    def wait(self, timeout_s: float) -> None:
        time = self._worker.time
        time.sleep(max(0.0, min(timeout_s, self._worker.next_s - time.now_s)))
        self._worker.work()
