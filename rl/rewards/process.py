"""One reward worker process, seen from the parent: start, ask, kill.

Invariant: `ask` returns or raises within its limits, whatever the worker does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.rewards.config import BUILT_IN, RewardConfig, split_user_function


class RewardWorkerError(RuntimeError):
    """A worker cannot serve at all: its functions or the task cannot be loaded."""


class WorkerStopped(Exception):
    """The worker died, hung or talked nonsense while it had a sample.

    `kind` is `died`, `deadline` or `protocol`; `function` is the number of the function
    that was running, or None before the first one had started.
    """

    def __init__(self, kind: str, function: int | None, message: str) -> None:
        super().__init__(message)
        self.kind, self.function, self.message = kind, function, message


class WorkerProcess:
    """A running worker. The thread that makes it must outlive it.

    (Linux sends the parent-death signal when the *thread* that started a child ends.)
    """

    def __init__(self, config: RewardConfig, tasks: tuple[str, ...], startup_s: float) -> None:
        """Start it; `wait_ready` must follow. `tasks` are opened before the first sample."""
        self._startup_s = startup_s
        self._deadline_s = config.deadline_s
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_worker_environment(),
            start_new_session=True,  # its own group: killed with all that it started
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin_pipe, self._stdout_pipe = self._process.stdin, self._process.stdout
        self._stdin, self._stdout = self._stdin_pipe.fileno(), self._stdout_pipe.fileno()
        os.set_blocking(self._stdin, False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._stdout, select.POLLIN)
        self._writable.register(self._stdin, select.POLLOUT)
        self._setup = _setup_line(config, tasks)

    def wait_ready(self) -> None:
        """Raises RewardWorkerError where the worker cannot load what it was told to."""
        limit = time.monotonic() + self._startup_s
        try:
            self._write(self._setup, limit)
            answer = self._read(limit)
        except WorkerStopped as stopped:
            raise RewardWorkerError(
                f"a reward worker could not start: {stopped.message} (its own output is above)"
            ) from stopped
        _raise_if_fatal(answer)

    def ask(self, line: bytes) -> list[list[Any]]:
        """Score one sample: [[value, failure kind, message], ...], one per function.

        The deadline runs from the moment when the first function starts; until then
        (imports, opening a task) the start-up limit holds. Raises WorkerStopped, and
        RewardWorkerError where the sample's task cannot be opened.
        """
        limit = time.monotonic() + self._startup_s
        function: int | None = None
        try:
            self._write(line, limit)
            while True:
                answer = self._read(limit)
                _raise_if_fatal(answer)
                if "outcomes" in answer:
                    return answer["outcomes"]
                if function is None:
                    limit = time.monotonic() + self._deadline_s
                function = answer["at"]
        except WorkerStopped as stopped:
            stopped.function = function
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerStopped("protocol", function, f"unreadable answer: {error!r}") from error

    def kill(self) -> None:
        """End the worker and everything that it started. May be called twice, by any thread."""
        with self._lock:  # never after the wait: by then the number may be another's
            if self._process.returncode is not None:
                return
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # macOS says "permission" of a zombie
                self._process.kill()

    def dispose(self) -> None:
        """Kill, reap and close the pipes; by the thread that made it."""
        self._end()
        self._stdin_pipe.close()
        self._stdout_pipe.close()

    def _end(self) -> int:
        self.kill()
        with self._lock:
            return self._process.wait()

    def _write(self, data: bytes, limit: float) -> None:
        view = memoryview(data)
        while view:
            if not self._writable.poll(_left_ms(limit)):
                raise WorkerStopped("deadline", None, "it did not take its input in time")
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._died() from None

    def _read(self, limit: float) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            if not self._readable.poll(_left_ms(limit)):
                raise WorkerStopped("deadline", None, "no answer within its time")
            piece = os.read(self._stdout, 1 << 16)
            if not piece:
                raise self._died()
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def _died(self) -> WorkerStopped:
        code = self._end()  # a worker that closed its pipe is of no use either
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return WorkerStopped("died", None, f"the worker process ended: {how}")


def _left_ms(limit: float) -> float:
    return max(0.0, limit - time.monotonic()) * 1e3


def _raise_if_fatal(answer: Mapping[str, Any]) -> None:
    if "fatal" in answer:
        raise RewardWorkerError(f"a reward worker cannot work: {answer['fatal']}")


def _setup_line(config: RewardConfig, tasks: tuple[str, ...]) -> bytes:
    functions = [
        name if name in BUILT_IN else "{}:{}".format(*split_user_function(name))
        for name in config.functions
    ]
    setup = {
        "functions": functions,
        "extract": config.extract,
        "memory_limit_mib": config.memory_limit_mib,
        "parent_pid": os.getpid(),
        "tasks": tasks,
    }
    return json.dumps(setup).encode() + b"\n"


def _worker_environment() -> dict[str, str]:
    """Our packages on the path, one thread each, and hands off the accelerators."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",  # a scorer that uses jax must not take the trainer's devices
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
