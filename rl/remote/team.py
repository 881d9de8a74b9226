"""The worker programs of a run: started, told who they are, watched, started again when lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from models.transformer import Params
from rl.cluster.join import mismatch
from rl.remote.jobs import Jobs
from rl.remote.link import Channel, Link, RemoteError
from rl.remote.messages import Compile, Done, Hello, Measure, Measured, Ping, Pong, Welcome
from rl.remote.remote_engine import RemoteEngine
from rl.runtime.waits import POLL_S, ProgramLost
from rl.weights.offers import VersionId

MOST_STARTS = 3  # of a worker program in a row that does no round
BEAT_S = 2.0  # between two signs of life of a worker without requests
Connect = Callable[[int], Channel]  # reaches or starts the program of a worker's number; may wait


class Mismatch(ProgramLost):
    """A program that must not take part; says why."""


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds: of any answer, of a program's start, and of compiling without a sign of life."""

    answer_s: float
    start_s: float
    compile_s: float


class Team:
    """Worker programs behind `engines`; a context manager, which ends them.

    `hello(number)` is what a program is told first; `say` takes lines for the user.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        jobs: Jobs,
        connect: Connect,
        hello: Callable[[int], Hello],
        deadlines: Deadlines,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        # the very list that a MultiEngine has: what is appended joins
        self.engines: list[RemoteEngine] = list(engines)
        self._jobs, self._connect, self._hello = jobs, connect, hello
        self._deadlines, self._say = deadlines, say
        self._compile: Compile | None = None
        self._measured: Measured | None = None
        self._starting: dict[RemoteEngine, Future[None]] = {}
        self._vain: dict[RemoteEngine, int] = {}  # starts in a row
        self._beats: dict[RemoteEngine, tuple[float, Future[Any], Link]] = {}
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="workers' programs")
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="heartbeats", daemon=True)
        self.losses: list[tuple[float, int, str]] = []  # when, number, why

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watch.is_alive():
            self._watch.join()  # no wait of its own is long
        for engine in self.engines:
            if engine.link is not None:
                engine.link.lose("the run has ended")
        self._jobs.weights.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- the start ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start all programs; return once all are there, compiled as far as is known.

        Raises Mismatch for a program that must not take part, and ProgramLost where none starts.
        """
        starts = {engine: self._threads.submit(self._open, engine) for engine in self.engines}
        failed: list[BaseException] = []
        for engine, started in starts.items():
            if (error := started.exception()) is not None:
                if isinstance(error, Mismatch):
                    raise error
                failed.append(error)
                self._vain[engine] = 1
                self._say(f"worker program {engine.number} does not start: {error}")
        if len(failed) == len(starts):
            raise failed[0]
        self._watch.start()

    def warm_up(self, params: Params, bounds: Compile, rounds: str | None) -> Measured:
        """Have all programs compile, and one of them measure; return what it measured.

        `rounds` is the file that an earlier start of the run has written, if any.
        """
        self._jobs.weights.publish(params)
        self._compile = bounds
        ready = [engine for engine in self.engines if engine.link is not None]
        compiled = [self._threads.submit(self._compile_there, engine) for engine in ready]
        for one in compiled:
            one.result()
        first, *others = ready
        self._measured = self._measure_there(first, rounds)
        for measured in [self._threads.submit(self._measure_there, e) for e in others]:
            measured.result()
        return self._measured

    def _open(self, engine: RemoteEngine) -> None:
        """Connect one engine's program, and have it compile what is known."""
        number = engine.number
        channel = self._connect(number)
        link = Link(f"worker program {number}", channel, self._deadlines.answer_s)
        try:
            hello = self._hello(number)
            asked_s = engine.clock()
            try:
                welcome = link.ask(hello, Welcome, self._deadlines.start_s)
            except RemoteError as error:
                raise Mismatch(f"worker program {number}: {error}") from None
            later_s = (asked_s + engine.clock()) / 2 - welcome.clock_s
            if wrong := mismatch([dict(hello.identity), dict(welcome.identity)]):
                raise Mismatch(f"worker program {number}: {wrong}")
            link.name = f"worker program {number} ({welcome.host}, process {welcome.pid})"
            engine.pid, engine.host = welcome.pid, welcome.host
            have = self._prepare(link)
        except BaseException as error:
            link.lose(str(error))
            raise
        engine.connected(link, later_s, have)

    def _prepare(self, link: Link) -> VersionId | None:
        """Bring the newest weights, and have a program compile what is known."""
        weights, limit_s = self._jobs.weights, self._deadlines.compile_s
        newest = weights.newest
        if newest is None:
            return None
        have = weights.bring(link, None, newest, None, limit_s)
        if self._compile is not None:
            link.ask(self._compile, Done, limit_s)
            if self._measured is not None:
                link.ask(Measure(self._measured.rounds), Measured, limit_s)
        return have

    def _compile_there(self, engine: RemoteEngine) -> None:
        link = engine.link
        if link is None:
            raise ProgramLost(f"worker program {engine.number} was lost before the first rollout")
        engine.connected(link, engine.later_s, self._prepare(link))

    def _measure_there(self, engine: RemoteEngine, rounds: str | None = None) -> Measured:
        link = engine.link
        if link is None:
            raise ProgramLost(f"worker program {engine.number} was lost before the first rollout")
        known = self._measured.rounds if self._measured is not None else rounds
        return link.ask(Measure(known), Measured, self._deadlines.compile_s)

    # -- later ---------------------------------------------------------------------------------

    def _look(self) -> None:
        """A thread: programs that are idle give signs of life, and lost ones start again."""
        try:
            self._look_after_all()
        except BaseException as error:
            for engine in self.engines:  # so that nobody waits for them
                engine.given_up = True
            self._say(f"worker programs are not started again any more: {error!r}")
            raise

    def _look_after_all(self) -> None:
        while not self._over.wait(POLL_S):
            for engine in list(self.engines):
                if engine in self._starting:
                    self._look_at_start(engine)
                elif engine.link is None:
                    self._start_again(engine)
                elif not engine.runs:
                    self._beat(engine, engine.link)

    def _beat(self, engine: RemoteEngine, link: Link) -> None:
        now_s = time.monotonic()
        sent_s, asked, of_link = self._beats.get(engine, (-BEAT_S, None, None))
        try:
            if asked is None or of_link is not link or (asked.done() and now_s - sent_s > BEAT_S):
                if asked is not None and of_link is link:
                    for remark in link.expect(asked.result(), Pong).remarks:
                        self._say(f"{link.name}: {remark}")
                self._beats[engine] = now_s, link.submit(Ping()), link
            elif now_s - sent_s > link.deadline_s and not asked.done():
                link.lose(f"no sign of life for {now_s - sent_s:.1f} s", silent=True)
        except (ProgramLost, RemoteError) as error:
            link.lose(str(error))

    def _start_again(self, engine: RemoteEngine) -> None:
        if engine.given_up:
            return
        why = engine.why_lost()
        if engine.last_name:
            self._jobs.weights.forget(engine.last_name)
        self.losses.append((time.monotonic(), engine.number, why))
        vain = self._vain[engine] = 0 if engine.has_worked else self._vain.get(engine, 0) + 1
        if vain >= MOST_STARTS:
            engine.given_up = True
            self._say(f"{why}; it is given up: it was lost {vain} times before its first round")
            return
        self._say(f"{why}; its requests go on elsewhere, and it is started again")
        self._starting[engine] = self._threads.submit(self._open, engine)

    def _look_at_start(self, engine: RemoteEngine) -> None:
        started = self._starting[engine]
        if not started.done():
            return
        del self._starting[engine]
        if (error := started.exception()) is not None:
            engine.has_worked = False
            engine.failed_to_start(f"worker program {engine.number} does not start: {error}")
