"""Actors of a run: objects in other programs, which are restarted when lost."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from reprise.rl.cluster.join import mismatch, program_identity
from reprise.rl.runtime.waits import ProgramLost

MAX_STARTS = 3  # consecutive, of an actor that does no work
CONCURRENCY = 8  # methods that an actor runs concurrently
WATCH_S = 0.2  # between two checks of deadlines
BEATS = 4  # heartbeats per deadline


class ActorDied(RuntimeError):
    """The program of an actor has exited, cannot be reached, or reports that it is unusable."""


class Host:
    """The program of an actor, which makes an object and calls its methods."""

    def __init__(self, cpu_only: bool) -> None:
        from reprise.rl.runtime import host_memory

        host_memory.bound_arenas()  # before any device thread starts
        if cpu_only:  # devices of this host belong to other actors
            os.environ["JAX_PLATFORMS"] = "cpu"

    def identity(self, files: Mapping[str, str]) -> tuple[dict[str, str], str, int]:
        """Return the identity of this program, the host name and the process id."""
        return program_identity(files), socket.gethostname(), os.getpid()

    def ping(self) -> None:
        """Answer a heartbeat, in a separate thread."""

    def make(self, target: str, *args: Any) -> None:
        """Make the object; `target` is "module:Class"."""
        module, _, name = target.partition(":")
        self._object = getattr(importlib.import_module(module), name)(*args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._object, method)(*args)


class Handle(Protocol):
    """Calls members of a `Host` in another program."""

    def submit(self, member: str, *args: Any) -> Future[Any]:
        """Return the future of the result, which raises the method error or ActorDied."""
        ...

    def kill(self) -> None: ...


class Starts(Protocol):
    """Starts programs with a `Host` (`rl.cluster.ray_session.Room`)."""

    def start(self, index: int, concurrency: int, name: str) -> Handle: ...


@dataclasses.dataclass(frozen=True)
class ActorSettings:
    """Settings of all actors of a run.

    Contents of `files` (paths by name) must be the same on hosts that have them. `deadline_s`
    limits a call and a heartbeat, `start_s` each step of a start; `say` prints a line.
    """

    files: Mapping[str, str]
    deadline_s: float
    start_s: float
    say: Callable[[str], None] = lambda line: None


@dataclasses.dataclass(eq=False)
class _Call:
    member: str  # of the host
    args: tuple[Any, ...]
    limit_s: float
    is_work: bool
    future: Future[Any] = dataclasses.field(default_factory=Future)
    until_s: float | None = None  # on the monotonic clock, once sent


class Actor:
    """An object in another program, which is started immediately, and restarted when lost.

    The constructor of the object gets `args`, and may take `make_s`. The actor is lost if its
    program exits, a call is late or raises ActorDied, or no heartbeat arrives for `deadline_s`.
    Pending calls then raise ProgramLost, which names the actor, its host and its process. Calls
    during a start wait for the start. The actor is given up, and all calls fail, if it cannot start
    at all, if it is lost MAX_STARTS times in a row before it did any work, or if it is lost with
    `restarts` False.
    """

    def __init__(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        settings: ActorSettings,
        room: Starts,
        index: int,
        *,
        concurrency: int = CONCURRENCY,
        restarts: bool = True,
        make_s: float | None = None,
    ) -> None:
        self.name = name
        self._label = name
        self.where = ""
        self._target = target
        self._args = args
        self._settings = settings
        self._start_program = lambda: room.start(index, concurrency, target.rpartition(":")[2])
        self._restarts = restarts
        self._lock = threading.Lock()
        self._make_s = settings.start_s if make_s is None else make_s
        self._calls = dict[_Call, None]()  # in call order
        self._done = queue.SimpleQueue[tuple[_Call, Future[Any]] | None]()
        self._has_worked = False
        self._is_closed = False
        self.handle: Handle | None = None  # of the present program, which may still be starting
        self.is_there = False
        self.num_starts = 0
        self.pid = 0
        self.fatal_error: ProgramLost | None = None
        threading.Thread(target=self._keep, name=name, daemon=True).start()

    def call(
        self, method: str, *args: Any, limit_s: float | None = None, is_work: bool = True
    ) -> Future[Any]:
        """Call a method; the future raises its error, or ProgramLost if the actor is lost.

        The limit starts when the call is sent. `is_work` is False for calls that only prepare work.
        Callbacks of the future must not wait for this actor.
        """
        limit_s = self._settings.deadline_s if limit_s is None else limit_s
        call = _Call("call", (method, *args), limit_s, is_work)
        return self._add(call)

    def close(self) -> None:
        """Kill the program immediately, without waiting; calls fail."""
        with self._lock:
            self._is_closed = True
        self._done.put(None)
        self._kill()

    def _add(self, call: _Call) -> Future[Any]:
        with self._lock:
            if self.fatal_error is None:
                self._calls[call] = None
                if self.is_there:
                    self._send(call)
                return call.future
        call.future.set_exception(self.fatal_error)
        return call.future

    def _send(self, call: _Call) -> None:
        """Send a call, while the caller holds the lock."""
        assert self.handle is not None
        if not call.future.set_running_or_notify_cancel():
            del self._calls[call]
            return
        call.until_s = time.monotonic() + call.limit_s
        done = self._done
        try:
            sent = self.handle.submit(call.member, *call.args)
        except Exception as error:  # arguments that cannot be sent
            del self._calls[call]
            call.future.set_exception(error)
        else:
            sent.add_done_callback(lambda result: done.put((call, result)))

    def _kill(self) -> None:
        """Kill the program in a thread, since Ray may take a long time."""
        if (handle := self.handle) is not None:
            threading.Thread(target=handle.kill, name=f"end of {self.name}", daemon=True).start()

    # -- the thread ---------------------------------------------------------------------

    def _keep(self) -> None:
        num_vain = 0
        has_served = False
        while self.fatal_error is None:
            self._label = self.name
            self._has_worked = False
            self._done = queue.SimpleQueue()
            error: Exception = RuntimeError("the run has ended")
            try:
                self._open()
                has_served = True
                self._serve()
            except Exception as raised:
                error = raised
            num_vain = 0 if self._has_worked else num_vain + 1
            self._lose(error, num_vain, has_served=has_served)

    def _open(self) -> None:
        start_s = self._settings.start_s
        files = self._settings.files
        handle = self._start_program()
        with self._lock:
            self.handle = handle
        if self._is_closed:
            return
        theirs, host, pid = _result(handle.submit("identity", files), start_s)
        self.where = f"{host}, process {pid}"
        self.pid = pid
        self._label = f"{self.name} ({self.where})"
        mine = {name: x for name, x in program_identity(files).items() if name in theirs}
        if wrong := mismatch([mine, theirs], ("the run", "it")):
            raise ValueError(wrong)
        _result(handle.submit("make", self._target, *self._args), self._make_s)
        with self._lock:
            self.is_there = True
            self.num_starts = self.num_starts + 1
            for call in list(self._calls):
                self._send(call)

    def _serve(self) -> None:
        """Serve until the actor is closed. Raises ActorDied or TimeoutError for a lost program."""
        looked_s = time.monotonic()
        deadline_s = self._settings.deadline_s
        ping_s = looked_s + deadline_s / BEATS
        while not self._is_closed:
            with contextlib.suppress(queue.Empty):
                if (done := self._done.get(timeout=WATCH_S)) is not None:
                    self._finish(*done)
            if (now_s := time.monotonic()) - looked_s < WATCH_S or not self._done.empty():
                continue  # answers that have arrived are not late
            looked_s = now_s
            if now_s > ping_s:
                ping_s = now_s + deadline_s / BEATS
                self._add(_Call("ping", (), deadline_s, is_work=False))
            for call in list(self._calls):
                if call.until_s is not None and call.until_s < now_s:
                    what = call.args[0] if call.args else "a heartbeat"
                    raise TimeoutError(f"no answer to {what} within {call.limit_s:.1f} s")

    def _finish(self, call: _Call, done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, ActorDied):
            raise error
        with self._lock:
            del self._calls[call]
        if error is None:
            self._has_worked |= call.is_work
            call.future.set_result(done.result())
        else:
            call.future.set_exception(error)

    def _lose(self, error: Exception, num_vain: int, *, has_served: bool) -> None:
        """Kill the program; fail the calls sent to it, or all calls if the actor is given up."""
        is_plain = isinstance(error, ActorDied | TimeoutError | ValueError | RuntimeError)
        why = str(error) if is_plain else f"{type(error).__name__}: {error}"
        text = f"{self._label} {'is lost' if has_served else 'does not start'}: {why}"
        is_vain = num_vain >= MAX_STARTS
        if has_served and is_vain:
            text += f"; it is given up: it was lost {num_vain} times before it did any work"
        lost = ProgramLost(text)
        lost.silent = isinstance(error, TimeoutError)
        with self._lock:
            self._kill()
            self.handle = None
            self.is_there = False
            if self._is_closed or is_vain or not (has_served and self._restarts):
                self.fatal_error = lost
            failed = [c for c in self._calls if self.fatal_error or c.until_s is not None]
            for call in failed:
                del self._calls[call]
        if not self._is_closed and has_served and self._restarts:
            self._settings.say(text if self.fatal_error else f"{text}; it is started again")
        for call in failed:
            if call.until_s is not None or call.future.set_running_or_notify_cancel():
                call.future.set_exception(lost)


def _result(sent: Future[Any], limit_s: float) -> Any:
    try:
        return sent.result(limit_s)
    except TimeoutError:
        raise TimeoutError(f"no answer within {limit_s:.1f} s") from None
