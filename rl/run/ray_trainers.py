"""The trainer processes of a run on Ray: children of actors, which `rl.run.launch` starts.

A child process has a main thread, signal handlers, a separate jax, and an exit status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import IO

from reprise import IMPORT_ROOT
from reprise.rl.cluster import ray_session
from reprise.rl.cluster.actors import Actor
from reprise.rl.runtime.waits import POLL_S, ProgramLost

COMMAND = (sys.executable, "-m", "reprise.rl.run.launch")
LISTEN_S = 1.0  # of one `Trainer.listen` call
LAST_LINES_S = 2.0  # after a process exits; its children may keep the pipes open
ENDING_S = 5.0  # for killed processes to exit
LEAVING_S = 10.0  # for processes to exit after another has failed, beyond the deadline
MAX_CHARACTERS = 4000  # of a line
Line = tuple[bool, str]  # whether it is from stderr; the text


@dataclasses.dataclass(frozen=True)
class Start:
    """The settings of a trainer process; `config` is text written by `rl.gin.loader.dump`."""

    config: str
    resume: bool
    directory: str
    coordinator: str
    process_id: int
    ray_address: str


class Trainer:
    """An actor object that starts a trainer process, reads its lines, and kills it."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = queue.SimpleQueue[Line | int]()  # the exit status comes last

    def address(self, host: str | None) -> str:
        """Return HOST:PORT with a port that is free now; `host` defaults to the node address."""
        host = host or ray_session.node_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.bind((host, 0))
            port = listener.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self, start: Start) -> None:
        if not Path(start.directory).is_dir():
            raise ValueError(
                f"expected the folder {start.directory}, where the run was started, on "
                f"{socket.gethostname()} too: start it in one that all hosts share"
            )
        path = os.pathsep.join(filter(None, [IMPORT_ROOT, os.environ.get("PYTHONPATH")]))
        self._process = process = subprocess.Popen(
            self._command,
            cwd=start.directory,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        readers = [
            threading.Thread(target=self._read, args=(pipe, is_error), daemon=True)
            for pipe, is_error in ((process.stdout, False), (process.stderr, True))
        ]
        reaper = threading.Thread(target=self._reap, args=(process, readers), daemon=True)
        for thread in (*readers, reaper):
            thread.start()
        with contextlib.suppress(BrokenPipeError):  # its exit status says more
            process.stdin.write(json.dumps(vars(start)).encode() + b"\n")
            process.stdin.flush()

    def listen(self) -> tuple[list[Line], int | None]:
        """Wait for lines and return them; after the last line, also the exit status or −signal."""
        lines = list[Line]()
        with contextlib.suppress(queue.Empty):
            item = self._lines.get(timeout=LISTEN_S)
            while not isinstance(item, int):
                lines.append(item)
                item = self._lines.get_nowait()
            return lines, item
        return lines, None

    def stop(self) -> None:
        """Send SIGTERM to the process, which saves and stops."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(ENDING_S)

    def _read(self, pipe: IO[bytes], is_error: bool) -> None:
        while data := pipe.readline(MAX_CHARACTERS):
            self._lines.put((is_error, data.decode(errors="replace").rstrip("\r\n")))

    def _reap(self, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children
        until_s = time.monotonic() + LAST_LINES_S
        for reader in readers:
            reader.join(max(0.0, until_s - time.monotonic()))
        self._lines.put(status)


class StoppedAtOnce(Exception):
    """Raised when a run is stopped a second time, and must exit without waiting."""


def run_trainers(
    actors: Sequence[Actor],
    start: Start,
    host: str | None,
    limit_s: float,
    show: Callable[[int, bool, str], object],
    num_stops: Callable[[], int],
) -> dict[int, int]:
    """Start a process in each actor; return exit statuses by process, in the order of the exits.

    All processes get `start`, with the address of process 0 on `host` and their number. `show` gets
    each line with the number of its process and whether it is an error. On the first stop request,
    all processes get SIGTERM. Raises StoppedAtOnce on the second request, and ProgramLost if a
    process is lost, or still runs `limit_s` and LEAVING_S after another has failed. On return, all
    processes are killed.
    """
    try:
        address = actors[0].call("address", host).result()
        for i, actor in enumerate(actors):
            numbered = dataclasses.replace(start, coordinator=address, process_id=i)
            try:
                actor.call("start", numbered).result()
            except (ValueError, OSError) as error:
                raise ProgramLost(f"{actor.name} does not start: {error}") from error
        return _follow(actors, limit_s + LEAVING_S, show, num_stops)
    finally:
        wait([actor.call("kill") for actor in actors if actor.is_there], ENDING_S)
        for actor in actors:
            actor.close()


def _follow(
    actors: Sequence[Actor],
    leaving_s: float,
    show: Callable[[int, bool, str], object],
    num_stops: Callable[[], int],
) -> dict[int, int]:
    listening = {i: actor.call("listen") for i, actor in enumerate(actors)}
    statuses = dict[int, int]()
    failed_s = math.inf
    is_stopped = False
    while listening:
        wait(listening.values(), POLL_S, FIRST_COMPLETED)
        for i, answer in list(listening.items()):
            if not answer.done():
                continue
            lines, status = answer.result()
            for is_error, text in lines:
                show(i, is_error, text)
            if status is None:
                listening[i] = actors[i].call("listen")
                continue
            del listening[i]
            # a process that is stopped at its start may not handle the signal yet
            if status < 0 and not (is_stopped and status == -signal.SIGTERM):
                raise ProgramLost(f"{actors[i].name} is lost: killed by {_signal_name(-status)}")
            statuses[i] = status if status >= 0 else 128 - status
            if status:
                failed_s = min(failed_s, time.monotonic())
        late_s = time.monotonic() - failed_s
        if listening and late_s > leaving_s:
            why = f"it has not ended {late_s:.1f} s after another one failed"
            raise ProgramLost(f"{actors[min(listening)].name} is lost: {why}")
        if num_stops() > 1:
            raise StoppedAtOnce
        if num_stops() and not is_stopped:
            is_stopped = True
            for i in listening:
                actors[i].call("stop")
    return statuses


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
