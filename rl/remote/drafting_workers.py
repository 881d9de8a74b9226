"""The drafting programs of a run: started, compiled, watched, started again when they are lost.

Rollout workers reach them by name (`rl.drafting.elsewhere.Address`) and draft without one that is
lost, until the program that takes its place is there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

from rl.drafting.elsewhere import Address, Apart
from rl.drafting.plans import Planner
from rl.drafting.workers import share
from rl.remote.drafting_messages import CODEC, Look, Meet, Prepare, Prepared, Seen
from rl.remote.link import Channel, Link
from rl.remote.service import MOST_STARTS, Service, ServiceDeadlines, wait_started
from rl.runtime.waits import ProgramLost

BEAT_S = 2.0  # between two signs of life
Connect = Callable[[int, str], Channel]  # starts a program by number, to be reached by that name


class DraftingPrograms:
    """Programs that draft for the verifying workers of a run; a context manager, which ends them.

    `planner` has how many workers there are of both kinds, `meet` is what a program is told first.
    A program may compile for `compile_s`.
    """

    def __init__(
        self,
        planner: Planner,
        meet: Meet,
        connect: Connect,
        deadlines: ServiceDeadlines,
        compile_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._planner, count = planner, planner.drafting_workers
        series = f"drafting-{secrets.token_hex(8)}"
        given = meet, connect, deadlines, compile_s, say
        self.workers = [_DraftingWorker(i, f"{series}-{i}", *given) for i in range(count)]
        self._start_s = MOST_STARTS * (deadlines.start_s + deadlines.answer_s) + compile_s

    def __enter__(self) -> DraftingPrograms:
        """Start all, and wait for none."""
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def wait_started(self) -> None:
        """Return once all have compiled. Raises ProgramLost where one cannot serve."""
        wait_started(self.workers, self._start_s)

    @property
    def draft_s(self) -> float:
        """The seconds of a draft token for all requests of a device, once they are measured."""
        return max(worker.draft_s for worker in self.workers)

    def apart(self, verifying: int) -> Apart:
        """Return where the drafts of a verifying worker come from, by its number."""
        planner = self._planner
        count = planner.num_workers - planner.drafting_workers
        mine = share(self.workers, verifying % count, count)
        shape = planner.num_workers, planner.num_requests, planner.most_window
        addresses = tuple(worker.address for worker in mine)
        return Apart(addresses, planner.config, *shape, self.draft_s)


class _DraftingWorker(Service):
    """One drafting program; `address` is the name by which the present one is reached."""

    def __init__(
        self,
        number: int,
        series: str,
        meet: Meet,
        connect: Connect,
        deadlines: ServiceDeadlines,
        compile_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.address, self.draft_s = Address(series, 0), 0.0
        self._meet, self._number, self._compile_s, self.say = meet, number, compile_s, say
        start = partial(self._start, connect)
        super().__init__(f"drafting program {number}", CODEC, start, deadlines, say)

    def _start(self, connect: Connect) -> Channel:
        self.address = Address(self.address.series, self.address.start + 1)
        return connect(self._number, self.address.name())

    def hello(self) -> tuple[Meet, Mapping[str, str]]:
        return self._meet, self._meet.identity

    def prepare(self, link: Link) -> None:
        """Have it compile, with a sign of life now and then."""
        until_s = time.monotonic() + self._compile_s
        wait_s = min(BEAT_S, self.deadlines.answer_s / 4)
        while not (told := link.ask(Prepare(wait_s), Prepared)).done:
            if self.over:
                return
            if time.monotonic() > until_s:
                raise ProgramLost(f"{link.name}: it has compiled for {self._compile_s:.0f} s")
        self.draft_s = told.draft_s

    def serve(self, link: Link) -> None:
        while not self._over.wait(BEAT_S):
            seen = link.ask(Look(), Seen)
            self.worked |= seen.steps > 0
            for remark in seen.remarks:
                self.say(f"{link.name}: {remark}")

    def lost(self, why: str) -> None:
        again = "" if self.given_up is not None else "; it is started again"
        self.say(f"{why}; rollout workers go on without its drafts{again}")
