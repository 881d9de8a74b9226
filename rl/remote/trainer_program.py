"""The program that holds one trainer process: it starts it, hears what it says, and ends it.

The process is a child, so that it has a main thread, signals, a jax and an exit status of its own.
Its standard input stays open for as long as this program lives: where it closes, the process stops.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rl.remote.messages import Done
from rl.remote.program import MessageProgram
from rl.remote.trainer_messages import (
    CODEC,
    MOST_CHARACTERS,
    MOST_LINES,
    Address,
    Line,
    Listen,
    Said,
    Start,
    Stop,
    Where,
    write_start,
)
from rl.remote.wire import WireError
from rl.runtime.waits import ROOT

COMMAND = (sys.executable, "-m", "rl.loop.trainer_process")
LISTEN_S = 1.0  # that an answer to Listen may take
KILLED_S = 2.0  # until a killed process is gone
LAST_LINES_S = 2.0  # after the end of a process, whose pipe a child of its own may hold open


class TrainerProgram(MessageProgram):
    """Answers a launcher's messages; any thread may call it. `host` is this host's address."""

    def __init__(self, host: str, command: Sequence[str] = COMMAND) -> None:
        super().__init__(CODEC)
        self._host, self._command = host, command
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: collections.deque[Line] = collections.deque(maxlen=MOST_LINES)
        self._num_lost, self._status = 0, None  # type: tuple[int, int | None]
        self._changed = threading.Condition()
        self.answers = {
            Where: self._where,
            Start: self._start,
            Listen: self._listen,
            Stop: self._stop,
        }

    def _where(self, asked: Where) -> Address:
        host = "127.0.0.1" if asked.loopback else self._host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        return Address(f"{shown}:{port}", socket.gethostname())

    def _start(self, start: Start) -> Done:
        if self._process is not None:
            raise WireError("it has been started")
        if not Path(start.directory).is_dir():
            raise WireError(
                f"expected the folder {start.directory}, where the run was started, on "
                f"{socket.gethostname()} too: start it in one that all hosts share"
            )
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            self._command,
            cwd=start.directory,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        assert process.stdin and process.stdout and process.stderr
        readers = [
            threading.Thread(target=self._read, args=(pipe, is_error), daemon=True)
            for pipe, is_error in ((process.stdout, False), (process.stderr, True))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._reap, args=(process, readers), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # its exit status says more
            write_start(start, process.stdin)
        return Done()

    def _listen(self, _: Listen) -> Said:
        """Wait for lines, or for the end, which is told with the last of them."""
        until_s = time.monotonic() + LISTEN_S
        with self._changed:
            while not self._lines and self._status is None:
                if (left_s := until_s - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            lines = tuple(self._lines)
            self._lines.clear()
            if self._num_lost:
                lines = (Line(True, f"({self._num_lost} lines are left out)"), *lines)
                self._num_lost = 0
            return Said(lines, self._status)

    def _stop(self, stop: Stop) -> Done:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if not stop.at_once:
                    self._process.send_signal(signal.SIGTERM)
                else:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait(KILLED_S)
        return Done()

    # -- threads --------------------------------------------------------------------------

    def _read(self, pipe: IO[bytes], is_error: bool) -> None:
        while data := pipe.readline(MOST_CHARACTERS):
            text = data.decode(errors="replace").rstrip("\r\n")
            with self._changed:
                self._num_lost += len(self._lines) == MOST_LINES
                self._lines.append(Line(is_error, text))
                self._changed.notify_all()

    def _reap(self, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        until_s = time.monotonic() + LAST_LINES_S
        for reader in readers:
            reader.join(max(0.0, until_s - time.monotonic()))
        with self._changed:
            self._status = status
            self._changed.notify_all()
