"""Stop signals and hangs, both detected by a dedicated thread.

Python handles a signal between two lines of the main thread, which may spend minutes in a
compilation or a device call. So signals go through a pipe to a watch thread, which notifies the
main thread, and exits the process if the main thread does not stop in time. Saved steps are always
complete. Before a command opens a `Watch`, and in commands without a `Watch`, `rl/__init__.py`
handles Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED
from reprise.rl.runtime.waits import HANG_LIMIT_S, code_line

COMPILE_LIMIT_S = 3600.0
SPEAKING_S = 1.0  # for the last message, since a terminal may hang too
SAME_STOP_S = 0.5  # launchers may forward a Ctrl-C that the terminal already sent to the process
# parts of a run with separate limits
STARTING = "starting"
SAVING = "checkpoint"
EXPORTING = "export"
COMPILING = "compiling"
LONG_PARTS = STARTING, EXPORTING, COMPILING


class Stopped(Exception):
    """A stop was requested; everything up to the last whole step is saved."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat, normally and while compiling, and seconds to stop."""

    hang_s: float = HANG_LIMIT_S
    compile_s: float = COMPILE_LIMIT_S
    stop_s: float = 8.0


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a command: Ctrl-C, SIGTERM, and unless ignored SIGHUP."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]  # nohup
    return [signal.SIGTERM, signal.SIGINT, *hangup]


class Watch:
    """A context manager that watches the main thread for hangs, and for `stop_signals`.

    While the run is `starting`, a signal exits the process immediately. Later, `check` raises in
    the main thread, which has `Limits.stop_s` to stop, and longer to save. A second Ctrl-C exits
    immediately, or a third Ctrl-C if whole steps (up to `whole_step`) are not saved yet. `standing`
    returns the last saved step (0 without any) and a description; `close` removes a live display
    before the last message.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        saving: str = "the last whole step",
        should_stop: Callable[[], bool] = lambda: False,
        standing: Callable[[], tuple[int, str]] = lambda: (0, "nothing to save"),
        say: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
        close: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._limits = limits or Limits()
        self._clock = clock
        self._end_process = end
        self._should_stop = should_stop
        self._last_saved = standing
        self._say = say
        self._close = close
        self._part = STARTING
        self._heartbeat_s = clock()
        self._noted = False
        self._saving = saving
        self._stop_requested_s: float | None = None
        self._stopped_at_s = clock()
        self._insisted = False
        self.whole_step = 0  # the last step that the main thread has completed
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._exits = contextlib.ExitStack()
        self.signal = signal.SIGTERM  # the latest signal

    # -- the main thread ----------------------------------------------------------------

    def at(self, part: str) -> None:
        """Start a part of the run: `rollout`, `reward`, `update`, `checkpoint` and others."""
        if self._part == SAVING and self._stop_requested_s is not None:
            self._stop_requested_s = self._clock()  # restart the time to stop
        self._part = part
        self.heartbeat()

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Run the body as another part of the run, then return to the previous part."""
        before = self._part
        self.at(part)
        try:
            yield
        finally:
            self.at(before)

    def heartbeat(self) -> None:
        """Record a heartbeat of the main thread."""
        self._heartbeat_s = self._clock()

    def asked(self) -> bool:
        """Return whether a stop was requested; also a heartbeat."""
        self.heartbeat()
        return self._noted or self._should_stop()

    def check(self) -> None:
        """Record a heartbeat; raise Stopped if a stop was requested."""
        if self.asked():
            raise Stopped

    @property
    def exit_status(self) -> int:
        """The status of a stopped run: 75 if it can be resumed, else 128 + signal number."""
        return EXIT_STOPPED if self._last_saved()[0] else 128 + self.signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in Python; the pipe already has the signal number."""
        self._noted = True

    # -- the thread that watches ----------------------------------------------------------

    def __enter__(self) -> Self:
        reader, writer = os.pipe()
        for fd in (reader, writer):
            os.set_blocking(fd, False)
            self._exits.callback(os.close, fd)
        self._exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
        self._signals = stop_signals()
        for number in self._signals:
            self._exits.callback(signal.signal, number, signal.signal(number, self._note))
        thread = threading.Thread(target=self._watch, args=(reader,), name="watch", daemon=True)
        thread.start()
        self._exits.callback(thread.join)
        self._exits.callback(self._over.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _watch(self, reader: int) -> None:
        tick_s = min(0.2, self._limits.hang_s / 4, self._limits.stop_s / 4)
        while not self._over.is_set():
            if select.select([reader], [], [], tick_s)[0]:
                for number in os.read(reader, 64):
                    self._signalled(signal.Signals(number))
            self._check_limits()

    def _signalled(self, number: signal.Signals) -> None:
        if number not in self._signals:
            return  # handlers of other code write to the pipe too
        first = self._stop_requested_s is None
        self.signal = number
        if self._part == STARTING:
            self._end(f"stopped before step {self._last_saved()[0] + 1}")
        elif first:
            self._stop_requested_s = self._stopped_at_s = self._clock()
            self._speak(f"stopping: saving {self._saving}...")
        elif number == signal.SIGINT and self._clock() - self._stopped_at_s > SAME_STOP_S:
            if self._insisted or not (unsaved := self._unsaved()):
                self._end("stopped at once")
            else:
                self._insisted = True
                self._speak(f"still saving: Ctrl-C once more loses {unsaved}")

    def _check_limits(self) -> None:
        """Exit the process if the main thread made no progress, or did not stop, in time."""
        now_s = self._clock()
        limits = self._limits
        part = self._part
        silent_s = now_s - self._heartbeat_s
        if silent_s > (limits.compile_s if part in LONG_PARTS else limits.hang_s):
            where = code_line(self._main)
            what = f"no sign of life for {silent_s:.1f} s from the main thread at {part} ({where})"
            self._end(f"error: {what}", EXIT_FAILED)
        elif self._stop_requested_s is not None and part not in (SAVING, EXPORTING):
            late_s = now_s - self._stop_requested_s
            if late_s > limits.stop_s:
                self._end(f"stopped at {part}, which did not come to an end in {late_s:.1f} s")

    def _unsaved(self) -> str:
        """Return the number of unsaved whole steps as text, empty without unsaved steps."""
        count = self.whole_step - self._last_saved()[0]
        return f"{count} whole step{'s' * (count > 1)}" if count > 0 else ""

    def _end(self, text: str, status: int | None = None) -> None:
        step, last_saved = self._last_saved()
        if unsaved := self._unsaved():
            last_saved = f"{unsaved} lost; {last_saved if step else 'nothing is saved'}"
        status = self.exit_status if status is None else status
        self._speak(f"{text}; {last_saved}", self._close)
        self._over.set()
        self._end_process(status)

    def _speak(self, text: str, first: Callable[[], object] = lambda: None) -> None:
        def speak() -> None:
            first()
            self._say(text)

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        speaker.join(SPEAKING_S)


def leave(status: int) -> Any:
    """Exit the process without waiting for threads that hang or compile."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
