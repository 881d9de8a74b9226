"""Programs that serve a run beside its workers (scorers, history workers): both ends of them.

The run's program starts a service, compares who both are, watches it by its answers, and starts it
again when it is lost, a bounded number of times.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from rl.cluster.join import identity_of, mismatch
from rl.remote.link import Channel, Link, RemoteError
from rl.remote.messages import Done, Failed
from rl.remote.program import MessageProgram
from rl.remote.wire import Codec, WireError
from rl.runtime.waits import ProgramLost

MOST_STARTS = 3  # of a service in a row that does nothing


@dataclasses.dataclass(frozen=True)
class Met:
    """A service's own identity, and where it runs."""

    identity: Mapping[str, str]
    host: str
    pid: int


ANSWERS = (Met, Done, Failed)  # that every service gives


def service_identity(config_text: str, draft_model: Path | None = None) -> dict[str, str]:
    """Return what a service and its run must have in common; services have no policy folder."""
    found = identity_of(config_text, Path(__file__), draft_model)
    return {name: value for name, value in found.items() if "Policy." not in name}


class ServiceProgram(MessageProgram):
    """A service's end: it answers messages, once it has met the run's program."""

    def __init__(
        self,
        codec: Codec,
        config_text: str,
        leave: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(codec, leave, clock)
        self._config = config_text

    def meet(self, identity: Mapping[str, str], silence_s: float, more: Mapping[str, str]) -> Met:
        """Raise WireError where the run's program is another one; else say who this is.

        `more` is what must be alike beside the code, the configuration and the versions.
        """
        mine = {**service_identity(self._config), **more}
        if wrong := mismatch([dict(identity), mine]):
            raise WireError(wrong)
        self.end_after_silence(silence_s)
        return Met(mine, socket.gethostname(), os.getpid())


@dataclasses.dataclass(frozen=True)
class ServiceDeadlines:
    """Seconds: of any answer, of a program's start, and that one waits for a word until it ends."""

    answer_s: float
    start_s: float
    silence_s: float


class Service(abc.ABC):
    """One service of a run, kept by a thread: opened, served, and opened again where it is lost.

    `connect` reaches or starts the program, and may wait. `say` takes lines for the user.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        connect: Callable[[], Channel],
        deadlines: ServiceDeadlines,
        say: Callable[[str], None],
    ) -> None:
        self.name, self._codec, self._connect = name, codec, connect
        self.deadlines, self._say = deadlines, say
        self.link: Link | None = None
        self.pid = 0
        self.worked = False  # since it was opened
        self.given_up: Exception | None = None
        self.started: Future[None] = Future()  # for the first time
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    @abc.abstractmethod
    def hello(self) -> tuple[Any, Mapping[str, str]]:
        """Return the first message, which `Met` answers, and the run's identity."""

    @abc.abstractmethod
    def prepare(self, link: Link) -> None:
        """Have the program do what must be done before it serves."""

    @abc.abstractmethod
    def serve(self, link: Link) -> None:
        """Return once `over`; raise ProgramLost or RemoteError where the program is lost."""

    @abc.abstractmethod
    def lost(self, why: str) -> None:
        """Give what the program had to others; `given_up` says whether it starts again."""

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the program; does not wait for its thread."""
        self._over.set()
        if (link := self.link) is not None:
            link.lose("the run has ended")

    def _keep(self) -> None:
        vain = 0
        while not self.over:
            try:
                self._open()
                assert self.link is not None
                if not self.started.done():
                    self.started.set_result(None)
                self.serve(self.link)
            except Exception as error:
                if self.over:
                    return
                vain = 0 if self.worked else vain + 1
                self._end(error, vain)
                if self.given_up is not None:
                    return

    def _open(self) -> None:
        link = Link(self.name, self._connect(), self.deadlines.answer_s, self._codec)
        self.link, self.worked = link, False
        if self.over:  # closed meanwhile
            link.lose("the run has ended")
        message, identity = self.hello()
        met = link.ask(message, Met, self.deadlines.start_s)
        if wrong := mismatch([dict(identity), dict(met.identity)]):
            raise ProgramLost(wrong)
        link.name, self.pid = f"{self.name} ({met.host}, process {met.pid})", met.pid
        self.prepare(link)

    def _end(self, error: Exception, vain: int) -> None:
        """End a program that is lost, whatever it has raised."""
        link, self.link = self.link, None
        name = self.name if link is None else link.name
        if link is not None:
            link.lose(str(error))
        why = str(error) if isinstance(error, ProgramLost) else f"{name}: {error}"
        if not isinstance(error, ProgramLost | RemoteError):
            traceback.print_exception(error)  # of this program: not one that others cause
        if not self.started.done():  # it has never served: the reason will be the same
            self.given_up = error
            self.started.set_exception(error)
            return
        if vain >= MOST_STARTS:
            self.given_up = error
            why += f"; it is given up: it was lost {vain} times before it did anything"
        self.lost(why)


def wait_started(services: Sequence[Service], limit_s: float) -> None:
    """Return once all have served; raise ProgramLost, with its own words, where one cannot."""
    for service in services:
        try:
            service.started.result(limit_s)
        except FutureTimeoutError:
            late = f"{service.name} did not start within {limit_s:.0f} s"
            raise ProgramLost(late) from None
        except Exception as error:
            raise ProgramLost(f"{service.name} does not start: {error}") from error
