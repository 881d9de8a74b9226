"""The parent side of a reward worker process: start, score, kill.

`score` returns or raises within its limits; every line carries the ticket of its request. Processes
of environments (`rl.environments.server`) share the lines, the output and the marks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from reprise import IMPORT_ROOT
from reprise.rl.rewards.config import BUILT_IN, RewardConfig
from reprise.rl.runtime.user_files import split_user_name

MARK = "REPRISE_REWARD_WORKER"  # in the environment of a worker and of its child processes
_MIN_ACCEPT_S = 5.0  # a loaded machine may be slow to accept a sample
_REAP_S = 10.0  # a killed process exits in this time, unless it is stuck in the kernel
MAX_LINE_BYTES = 1 << 24  # failures of a large group, each with its message
MAX_OUTPUT_BYTES = 1 << 20  # of a sample, or of the start
_CUT = b"\n... (the rest of this sample's output is left out)\n"


class RewardWorkerError(RuntimeError):
    """A worker cannot serve at all, because its functions or the task cannot be loaded."""


class WorkerStopped(Exception):
    """The worker `died`, missed its `deadline` or broke the `protocol` (the kind) with a sample.

    `function` is the number of the running function, or None before the first function.
    """

    def __init__(self, kind: str, message: str, function: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.function = function


class Lines:
    """Requests and answers as JSON lines over a socket; each answer has the ticket of its request.

    Output of a child process, or a late answer, can thus not answer another request.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._buffer = bytearray()
        self._num_requests = 0

    @property
    def has_input(self) -> bool:
        """Return whether the other side has written, or closed its end, since its last answer."""
        return bool(self._buffer or self._readable.poll(0))

    def send(self, body: bytes, limit: float) -> str:
        """Send a request; return its ticket: a number, and a nonce that no earlier line has.

        `limit` is of the monotonic clock. Raises WorkerStopped.
        """
        self._num_requests += 1
        ticket = f"{self._num_requests}-{secrets.token_hex(8)}"
        try:
            self._socket.settimeout(_seconds_to(limit))
            self._socket.sendall(b'{"ticket": "%s", "body": %s}\n' % (ticket.encode(), body))
        except TimeoutError:
            raise WorkerStopped("deadline", "it did not take its input in time") from None
        except OSError:
            raise WorkerStopped("died", "its process ended") from None
        return ticket

    def receive(self, ticket: str, limit: float) -> dict[str, Any]:
        """Return the next line, which must answer `ticket`. Raises WorkerStopped."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise WorkerStopped("protocol", "it wrote a line without end")
            try:
                self._socket.settimeout(_seconds_to(limit))
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                raise WorkerStopped("deadline", "no answer within its time") from None
            except OSError:
                piece = b""
            if not piece:
                raise WorkerStopped("died", "its process ended")
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get("ticket") == ticket:
                return answer
        raise WorkerStopped("protocol", f"not an answer to this request: {line[:80]!r}")

    def close(self) -> None:
        """Close the socket; a call in another thread raises WorkerStopped."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerProcess:
    """A running worker. Linux kills it if the thread that created it exits before it."""

    def __init__(self, config: RewardConfig, tasks: tuple[str, ...], startup_s: float) -> None:
        """Start the worker; `wait_ready` must follow. It opens `tasks` before the first sample."""
        self._config = config
        self._tasks = tasks
        self._startup_s = startup_s
        self._lock = threading.Lock()
        self._mark = secrets.token_hex(16)
        ours, theirs = socket.socketpair()
        self._lines = Lines(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "reprise.rl.rewards.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=worker_environment(self._mark),
                start_new_session=True,  # a process group, killed as one
            )
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout)

    def wait_ready(self) -> None:
        """Wait until the worker can score. Raises RewardWorkerError if it cannot be set up."""
        config = self._config
        setup = {
            "functions": [
                name if name in BUILT_IN else "{}:{}".format(*split_user_name(name))
                for name in config.functions
            ],
            "extract": config.extract,
            "memory_limit_mib": config.memory_limit_mib,
            "parent_pid": os.getpid(),
            "tasks": self._tasks,
        }
        limit = time.monotonic() + self._startup_s
        try:
            self._answer(self._lines.send(json.dumps(setup).encode(), limit), limit)
        except WorkerStopped as stopped:
            names = ", ".join(config.functions)
            raise RewardWorkerError(
                f"a reward worker could not start with {names}: {self._explained(stopped).message} "
                f"({self._output.whereabouts})"
            ) from stopped

    def score(self, job: bytes, size: int) -> list[list[list[Any]]]:
        """Score a job of `size` responses: [value, failure kind, message] by response and function.

        The worker must accept the job within the deadline (5 s at least). Its preparation may take
        as long as a start; then the deadline runs. Raises WorkerStopped, and RewardWorkerError if
        the task of the job cannot be opened.
        """
        deadline_s = self._config.deadline_s
        num_functions = len(self._config.functions)
        limit = time.monotonic() + max(deadline_s, _MIN_ACCEPT_S)
        function = None
        try:
            if self._lines.has_input:
                raise WorkerStopped("protocol", "it wrote, or ended, without a request")
            self._output.begin_sample()
            ticket = self._lines.send(job, limit)
            while True:
                answer = self._answer(ticket, limit)
                if "outcomes" in answer:
                    return _checked(answer["outcomes"], size, num_functions)
                if answer["at"] is None:
                    limit = time.monotonic() + self._startup_s
                    continue
                if function is None:
                    limit = time.monotonic() + deadline_s
                function = range(num_functions)[answer["at"]]
        except WorkerStopped as stopped:
            explained = self._explained(stopped)
            explained.function = function
            raise explained from None
        except (ValueError, LookupError, TypeError) as error:
            raise WorkerStopped("protocol", f"unreadable answer: {error!r}", function) from error

    def kill(self) -> None:
        """Kill the worker and its children (in other sessions only on Linux), from any thread."""
        with self._lock:  # never after the wait, when another process may have the pid
            if self._process.returncode is not None:
                return
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # macOS: PermissionError for a zombie
                self._process.kill()
            kill_marked(self._mark)

    def dispose(self) -> None:
        """Kill and reap the worker, and close the socket, in the thread that created it."""
        self._end()
        self._lines.close()

    def _end(self) -> int:
        self.kill()
        with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_REAP_S)
        return -signal.SIGKILL  # killed, but stuck inside the kernel

    def _answer(self, ticket: str, limit: float) -> dict[str, Any]:
        answer = self._lines.receive(ticket, limit)
        if "fatal" in answer:
            raise RewardWorkerError(f"a reward worker cannot work: {answer['fatal']}")
        return answer

    def _explained(self, stopped: WorkerStopped) -> WorkerStopped:
        """Return a failure with the exit status of a worker that died, which is reaped."""
        return self._died() if stopped.kind == "died" else stopped

    def _died(self) -> WorkerStopped:
        code = self._end()  # a worker that only closed its socket is killed
        self._output.wait()
        how = f"exit status {code}"
        if code < 0:
            with contextlib.suppress(ValueError):  # a real-time signal
                how = f"signal {signal.Signals(-code).name}"
        return WorkerStopped("died", f"the worker process ended: {how}")


class Output:
    """Copies the output of a worker to standard error, up to a limit for each sample."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._left_bytes = MAX_OUTPUT_BYTES
        self._is_empty = True
        self._thread = threading.Thread(target=self._copy, name="reward-output", daemon=True)
        self._thread.start()

    def begin_sample(self) -> None:
        self._left_bytes = MAX_OUTPUT_BYTES

    @property
    def whereabouts(self) -> str:
        return "it printed nothing" if self._is_empty else "its own output is above"

    def wait(self) -> None:
        """Wait for the output of a worker that has exited; its children may hold the pipe open."""
        self._thread.join(1.0)

    def _copy(self) -> None:
        with self._pipe as pipe, contextlib.suppress(OSError):
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._is_empty = False
                if (left_bytes := self._left_bytes) > 0:
                    cut = b"" if len(piece) < left_bytes else _CUT
                    sys.stderr.flush()
                    os.write(2, piece[:left_bytes] + cut)
                self._left_bytes = left_bytes - len(piece)


def _seconds_to(limit: float) -> float:
    return max(1e-3, limit - time.monotonic())  # 0 would make the socket non-blocking


def _checked(outcomes: Any, size: int, num_functions: int) -> list[list[list[Any]]]:
    """Return the outcomes if they have the expected counts and form, else raise ValueError."""
    if (lengths := [len(row) for row in outcomes]) != [num_functions] * size:
        raise ValueError(f"expected {size} times {num_functions} outcomes, got {lengths}")
    for value, kind, message in itertools.chain(*outcomes):
        is_number = isinstance(value, float) and math.isfinite(value)
        if not (is_number or value is None) or (kind is None) != (message is None):
            raise ValueError(f"expected value, kind and message, got {[value, kind, message]!r}")
    return outcomes


def kill_marked(mark: str) -> None:
    """Kill every process with the mark in its environment (only on Linux, which has /proc)."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(10):  # a process may be missed once, if it was just being started
        marked = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has exited, or belongs to another user
                if wanted in path.read_bytes().split(b"\0"):
                    marked.append(int(path.parent.name))
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # until the processes are gone from the table


def worker_environment(mark: str) -> dict[str, str]:
    """Return an environment with our packages on the path, one thread, and no accelerator."""
    paths = [IMPORT_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",  # a scorer that uses jax must not take devices of the trainer
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
