"""The trainer processes of a run, as their launcher sees them: started, heard, and ended together.

One that is lost ends all: the others wait for it in what they do together, and can save nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from rl.remote.link import Link, RemoteError
from rl.remote.messages import Done
from rl.remote.trainer_messages import Address, Line, Listen, Said, Start, Stop, Where
from rl.runtime.waits import POLL_S, ProgramLost

LEAVING_S = 10.0  # beside the deadline, from the first process's end to the last one's
ENDING_S = 5.0  # that ending all of them may take
Show = Callable[[int, Line], object]  # takes a process's number and what it says


@dataclasses.dataclass(frozen=True)
class Shared:
    """The part of `rl.remote.trainer_messages.Start` that is alike for all processes of a group."""

    config: str
    resume: bool
    directory: str
    ray_address: str


class StoppedAtOnce(Exception):
    """The run was asked to stop a second time: nothing is waited for."""


class TrainerGroup:
    """The programs behind `links`, one a trainer process; a context manager, which ends them all.

    `deadline_s` is the time of any answer, `show` is given every line.
    """

    def __init__(
        self,
        links: Sequence[Link],
        deadline_s: float,
        show: Show,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links, self._deadline_s, self._show, self._clock = links, deadline_s, show, clock
        self._statuses: dict[int, int] = {}  # in the order of their ends
        self._first_end_s: float | None = None
        self._asked = 0  # how often they were asked to stop

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, wherever it is."""
        left = [link for i, link in enumerate(self._links) if i not in self._statuses]
        sent = []
        for link in left:
            with contextlib.suppress(ProgramLost):
                sent.append(link.submit(Stop(at_once=True)))
        wait(sent, ENDING_S)
        for link in self._links:
            link.lose("the run has ended")

    def start(self, shared: Shared, *, loopback: bool, start_s: float) -> None:
        """Start all processes. Raises ProgramLost with the number of one that does not start."""
        with self._named(0, starting=True):
            found = self._links[0].ask(Where(loopback), Address, start_s)
        starts = [
            Start(**vars(shared), coordinator=found.address, process_id=i)
            for i in range(len(self._links))
        ]
        for i, (link, start) in enumerate(zip(self._links, starts, strict=True)):
            with self._named(i, starting=True):
                link.ask(start, Done, start_s)

    def follow(self, asked: Callable[[], int]) -> int:
        """Show what the processes say until all have ended; return the status of the first to fail.

        0 where none fails. `asked` says how often the run was asked to stop: they are told of the
        first time, and ended at the second. Raises ProgramLost where a process is lost.
        """
        listening = {i: self._listen(i) for i in range(len(self._links))}
        while listening:
            wait([answer for answer, _ in listening.values()], POLL_S, FIRST_COMPLETED)
            for i, (answer, since_s) in list(listening.items()):
                if not answer.done():
                    self._check_silence(i, since_s)
                    continue
                with self._named(i):
                    said = self._links[i].expect(answer.result(), Said)
                for line in said.lines:
                    self._show(i, line)
                if said.status is None:
                    listening[i] = self._listen(i)
                else:
                    del listening[i]
                    self._ended(i, said.status)
            self._check_all_leave(listening)
            if (times := asked()) > self._asked:
                self._asked = times
                if times > 1:
                    raise StoppedAtOnce
                self._tell_to_stop(listening)
        first = self.first_to_fail
        return 0 if first is None else self._statuses[first]

    @property
    def first_to_fail(self) -> int | None:
        """The first process that ended with another status than 0."""
        return next((i for i, status in self._statuses.items() if status), None)

    def _listen(self, i: int) -> tuple[Future[Any], float]:
        with self._named(i):
            return self._links[i].submit(Listen()), self._clock()

    def _check_silence(self, i: int, since_s: float) -> None:
        silent_s = self._clock() - since_s
        if silent_s > self._deadline_s:
            self._links[i].lose(f"no answer for {silent_s:.1f} s", silent=True)

    def _ended(self, i: int, status: int) -> None:
        if status < 0 and not (self._asked and status == -signal.SIGTERM):
            self._statuses[i] = status
            raise self._lost(i, f"killed by {_signal_name(-status)}")
        # asked to stop before it could handle a signal
        self._statuses[i] = status if status >= 0 else 128 - status
        if status and self._first_end_s is None:
            self._first_end_s = self._clock()

    def _check_all_leave(self, listening: Mapping[int, object]) -> None:
        """Raise ProgramLost where a process goes on long after another has failed or stopped."""
        if self._first_end_s is None or not listening:
            return
        late_s = self._clock() - self._first_end_s
        if late_s > self._deadline_s + LEAVING_S:
            why = f"it has not ended {late_s:.1f} s after process {self.first_to_fail} had failed"
            raise self._lost(min(listening), why)

    def _tell_to_stop(self, listening: Mapping[int, object]) -> None:
        for i in listening:
            with self._named(i):
                self._links[i].submit(Stop(at_once=False))  # that it is lost is heard otherwise

    @contextlib.contextmanager
    def _named(self, i: int, *, starting: bool = False) -> Iterator[None]:
        """Raise what a link does as ProgramLost with the process's number."""
        try:
            yield
        except (ProgramLost, RemoteError) as error:
            why = str(error).removeprefix(f"{self._links[i].name}: ")
            if not starting:
                raise self._lost(i, why) from error
            count = len(self._links)
            raise ProgramLost(f"trainer process {i} of {count} does not start: {why}") from error

    def _lost(self, i: int, why: str) -> ProgramLost:
        return ProgramLost(f"trainer process {i} of {len(self._links)} is lost: {why}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
