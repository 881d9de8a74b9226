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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rl.cluster.join import identity_of, mismatch
from rl.remote.link import Channel, Link, RemoteError
from rl.remote.messages import Done, Failed
from rl.remote.wire import Codec, WireError
from rl.runtime.progress import say
from rl.runtime.waits import ProgramLost

MOST_STARTS = 3  # of a service in a row that does nothing
LOOK_S = 1.0  # between two looks at how long nobody has spoken


@dataclasses.dataclass(frozen=True)
class Met:
    """A service's own identity, and where it runs."""

    identity: Mapping[str, str]
    host: str
    pid: int


ANSWERS = (Met, Done, Failed)  # that every service gives


def service_identity(config_text: str) -> dict[str, str]:
    """Return what a service and its run must have in common; services have no policy folder."""
    found = identity_of(config_text, Path(__file__))
    return {name: value for name, value in found.items() if "Policy." not in name}


class ServiceProgram:
    """Answers messages, from any number of threads, by the functions in `answers`.

    `leave` is called where nobody has spoken for the seconds that were agreed on in `meet`.
    """

    def __init__(
        self,
        codec: Codec,
        config_text: str,
        leave: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec, self._config, self._leave, self._clock = codec, config_text, leave, clock
        self._heard_s, self._watches = clock(), False
        self.answers: dict[type, Callable[[Any], Any]] = {}

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message; `Failed` for what cannot be done or read."""
        self._heard_s = self._clock()
        try:
            asked = self._codec.decode(message)
            if type(asked) not in self.answers:
                raise WireError(f"this program is not asked {type(asked).__name__}")
            return self._codec.encode(self.answers[type(asked)](asked))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f" ({Path(where.filename).name}:{where.lineno})"
            text = f"{str(error)[:2000]}{'' if isinstance(error, WireError) else place}"
            return self._codec.encode(Failed(type(error).__name__, text))

    def meet(self, identity: Mapping[str, str], silence_s: float, more: Mapping[str, str]) -> Met:
        """Raise WireError where the run's program is another one; else say who this is.

        `more` is what must be alike beside the code, the configuration and the versions.
        """
        mine = {**service_identity(self._config), **more}
        if wrong := mismatch([dict(identity), mine]):
            raise WireError(wrong)
        if self._leave is not None and not self._watches:
            self._watches = True
            listen = threading.Thread(
                target=self._listen, args=(silence_s,), name="silence", daemon=True
            )
            listen.start()
        return Met(mine, socket.gethostname(), os.getpid())

    def _listen(self, silence_s: float) -> None:
        assert self._leave is not None
        while (silent_s := self._clock() - self._heard_s) < silence_s:
            time.sleep(min(LOOK_S, silence_s / 4))
        self._leave(f"nobody has spoken to this program for {silent_s:.1f} s: it ends")


def end_process(why: str) -> None:
    """End this program at once, with a line."""
    say(why)
    os._exit(1)


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
