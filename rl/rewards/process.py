"""The parent's side of a reward worker process: start, ask, kill.

Invariants: `ask` returns or raises within its limits, whatever the worker does, and its answer
belongs to that sample: every line carries the ticket of its question.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
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

MARK = "REPRISE_REWARD_WORKER"  # in the environment of a worker and of all that it starts
_LEAST_PULSE_S = 5.0  # a loaded machine may be slow to say that it has a sample
_REAP_S = 10.0  # a killed process is gone by then, unless it is stuck in the kernel
_LONGEST_LINE_BYTES = 1 << 20


class RewardWorkerError(RuntimeError):
    """A worker cannot serve at all: its functions or the task cannot be loaded."""


class WorkerStopped(Exception):
    """The worker died, hung or broke the protocol while it had a sample.

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
        self._num_functions = len(config.functions)
        self._num_asked = 0
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._mark = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_worker_environment(self._mark),
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
        ticket = self._ticket()
        try:
            self._write(_question(ticket, self._setup), limit)
            _raise_if_fatal(self._read(ticket, limit))
        except WorkerStopped as stopped:
            raise RewardWorkerError(
                f"a reward worker could not start: {stopped.message} (its own output is above)"
            ) from stopped

    def ask(self, job: bytes) -> list[list[Any]]:
        """Score one sample: [[value, failure kind, message], ...], one per function.

        The worker has to say within the deadline (5 s at least) that it has the sample: one
        that was stopped while idle does not. What comes before the first function (imports,
        opening a task) may take as long as starting may; then the deadline runs. Raises
        WorkerStopped, and RewardWorkerError where the sample's task cannot be opened.
        """
        limit = time.monotonic() + max(self._deadline_s, _LEAST_PULSE_S)
        ticket, function = self._ticket(), None
        try:
            if self._buffer or self._readable.poll(0):
                raise WorkerStopped("protocol", None, "it spoke, or ended, without being asked")
            self._write(_question(ticket, job), limit)
            while True:
                answer = self._read(ticket, limit)
                _raise_if_fatal(answer)
                if "outcomes" in answer:
                    return _checked(answer["outcomes"], self._num_functions)
                if answer["at"] is None:
                    limit = time.monotonic() + self._startup_s
                    continue
                if function is None:
                    limit = time.monotonic() + self._deadline_s
                function = range(self._num_functions)[answer["at"]]
        except WorkerStopped as stopped:
            stopped.function = function
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise WorkerStopped("protocol", function, f"unreadable answer: {error!r}") from error

    def _ticket(self) -> str:
        """Return a name for a question: its number and a nonce that no earlier answer can hold."""
        self._num_asked += 1
        return f"{self._num_asked}-{secrets.token_hex(8)}"

    def kill(self) -> None:
        """End the worker and everything that it started. May be called twice, by any thread.

        On Linux that includes children in sessions of their own; elsewhere those live on.
        """
        with self._lock:  # never after the wait: by then the number may be another's
            if self._process.returncode is not None:
                return
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # macOS says "permission" of a zombie
                self._process.kill()
            _kill_marked(self._mark)

    def dispose(self) -> None:
        """Kill, reap and close the pipes; by the thread that made it."""
        self._end()
        self._stdin_pipe.close()
        self._stdout_pipe.close()

    def _end(self) -> int:
        self.kill()
        with self._lock:
            try:
                return self._process.wait(_REAP_S)
            except subprocess.TimeoutExpired:  # killed, but stuck inside the kernel
                return -signal.SIGKILL

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

    def _read(self, ticket: str, limit: float) -> dict[str, Any]:
        """Read the next line, which has to answer that question."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _LONGEST_LINE_BYTES:
                raise WorkerStopped("protocol", None, "it wrote without end on its pipe")
            if not self._readable.poll(_left_ms(limit)):
                raise WorkerStopped("deadline", None, "no answer within its time")
            piece = os.read(self._stdout, 1 << 16)
            if not piece:
                raise self._died()
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("ticket") == ticket:
                return answer
        raise WorkerStopped("protocol", None, f"not an answer to this sample: {line[:80]!r}")

    def _died(self) -> WorkerStopped:
        code = self._end()  # one that only closed its pipe is killed
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        return WorkerStopped("died", None, f"the worker process ended: {how}")


def _left_ms(limit: float) -> float:
    return max(0.0, limit - time.monotonic()) * 1e3


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _question(ticket: str, body: bytes) -> bytes:
    return b'{"ticket": "%s", "body": %s}\n' % (ticket.encode(), body)


def _checked(outcomes: Any, num_functions: int) -> list[list[Any]]:
    """Check that outcomes are [[value, failure kind, message], ...]; raises ValueError."""
    if len(outcomes) != num_functions:
        raise ValueError(f"expected {num_functions} outcomes, got {len(outcomes)}")
    for value, kind, message in outcomes:
        is_number = isinstance(value, float) and math.isfinite(value)
        if not (is_number or value is None) or (kind is None) != (message is None):
            raise ValueError(f"expected value, kind and message, got {[value, kind, message]!r}")
    return outcomes


def _kill_marked(mark: str) -> None:
    """Kill every process with the mark in its environment (Linux: there is a /proc)."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(10):  # one that was starting another when it was killed may be missed once
        marked = [pid for pid in _process_ids() if wanted in _environment(pid)]
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # until they are gone from the table


def _process_ids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process; [] where it has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


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
    return json.dumps(setup).encode()


def _worker_environment(mark: str) -> dict[str, str]:
    """Return an environment with our packages on the path, one thread, and no accelerator."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",  # a scorer that uses jax must not take the trainer's devices
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
