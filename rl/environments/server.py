"""The parent side of the environment server, and of the process of each episode.

    server = EnvironmentServer(config)
    server.wait_ready()
    process = server.open()
    answer = process.call({"op": "reset", "row": row, "seeds": [1, 2]}, deadline_s)
    process.close()

Calls may come from any thread, one at a time for each process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.rewards.process import (
    Lines,
    Output,
    RewardWorkerError,
    WorkerStopped,
    kill_marked,
    worker_environment,
)
from reprise.rl.runtime.user_files import split_user_name

CONTROL_S = 30.0  # for the server to fork or end a process, on a busy machine
_REAP_S = 10.0  # for the killed server to exit, unless it is stuck in the kernel
_POLL_MS = 50


class EnvironmentServerError(RewardWorkerError):
    """The server cannot work, because the factory cannot be loaded or no process can be started.

    A run ends as if its rewards could not be scored.
    """


class ServerLost(Exception):
    """The server has died or does not answer; its episodes are lost with it."""


class EpisodeFailed(Exception):
    """An environment has failed: it `raised`, returned a wrong `answer`, `died`, missed its
    `deadline` or broke the `protocol` (the kind).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class EpisodeProcess:
    """The process of one episode. A failed call leaves it useless: close it."""

    def __init__(self, server: EnvironmentServer, pid: int, connection: socket.socket) -> None:
        self._server = server
        self._pid = pid
        self._lines = Lines(connection)
        self._lock = threading.Lock()
        self._is_closed = False

    def call(self, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Return the answer to a call. Raises EpisodeFailed, TypeError for a row without JSON."""
        text = json.dumps(body).encode()
        try:
            limit = time.monotonic() + deadline_s
            answer = self._lines.receive(self._lines.send(text, limit), limit)
        except WorkerStopped as stopped:
            raise self._failed(stopped, deadline_s) from None
        match answer:
            case {"answer": dict(found)}:
                return found
            case {"failure": ["raised" | "answer" as kind, str(message)]}:
                raise EpisodeFailed(kind, message)
        raise EpisodeFailed("protocol", f"an answer without content: {str(answer)[:80]!r}")

    def close(self) -> str:
        """Kill and reap the process; return how it ended, or an empty text."""
        with self._lock:
            if self._is_closed:
                return ""
            self._is_closed = True
        self._lines.close()
        return self._server.end(self._pid)

    def _failed(self, stopped: WorkerStopped, deadline_s: float) -> EpisodeFailed:
        message = stopped.message
        if stopped.kind == "died":
            message = self.close() or message
        if stopped.kind == "deadline":
            message = f"no answer within Environment.deadline_s={deadline_s:g}; killed"
        return EpisodeFailed(stopped.kind, message)


class EnvironmentServer:
    """A running server. Linux kills it if the thread that created it exits before it."""

    def __init__(self, config: EnvironmentConfig, startup_s: float) -> None:
        """Start the server; `wait_ready` must follow."""
        assert config.factory is not None, "a run without environments has no server"
        self._factory = "{}:{}".format(*split_user_name(config.factory))
        self._memory_limit_mib = config.memory_limit_mib
        self._startup_s = startup_s
        self._lock = threading.Lock()  # one request of the control socket at a time
        self._kill_lock = threading.Lock()
        self._mark = secrets.token_hex(16)
        self._control, theirs = socket.socketpair()
        self._readable = select.poll()
        self._readable.register(self._control, select.POLLIN)
        self.is_lost = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "reprise.rl.environments.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=worker_environment(self._mark) | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # a process group, killed as one
            )
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout)

    def wait_ready(self) -> None:
        """Wait until the server can fork. Raises EnvironmentServerError if it cannot be set up."""
        setup = {
            "factory": self._factory,
            "memory_limit_mib": self._memory_limit_mib,
            "parent_pid": os.getpid(),
        }
        try:
            answer = self._request(setup, self._startup_s)
        except ServerLost as lost:
            raise EnvironmentServerError(
                f"the environment server could not start with {self._factory}: {lost} "
                f"({self._output.whereabouts})"
            ) from lost
        if "fatal" in answer:
            raise EnvironmentServerError(
                f"the environment server could not start with {self._factory}: {answer['fatal']}"
            )

    def open(self) -> EpisodeProcess:
        """Fork a process for an episode.

        Raises ServerLost, and EnvironmentServerError if the system has no room for a process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = self._request({"open": True}, CONTROL_S, theirs)
        except BaseException:
            ours.close()
            raise
        if "pid" not in answer:
            ours.close()
            raise EnvironmentServerError(f"environments: {answer.get('failed')}")
        self._output.begin_sample()
        return EpisodeProcess(self, int(answer["pid"]), ours)

    def end(self, pid: int) -> str:
        """Kill and reap the process of an episode; return how it ended. Raises nothing."""
        try:
            status = self._request({"end": pid}, CONTROL_S)["status"]
        except (ServerLost, KeyError):
            return "the environment server has ended"
        return "" if status is None else f"its process ended: {how_ended(status)}"

    def kill(self) -> None:
        """Kill the server and all its processes, from any thread."""
        self.is_lost = True
        with self._kill_lock:  # never after the wait, when another process may have the pid
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            kill_marked(self._mark)

    def dispose(self) -> None:
        """Kill and reap the server, and close the socket."""
        self.kill()
        with self._kill_lock, contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        with self._lock:
            self._control.close()

    def _request(
        self, request: Mapping[str, Any], limit_s: float, passed: socket.socket | None = None
    ) -> dict[str, Any]:
        """Send a request, with a socket for the process of an episode; return the answer.

        Raises ServerLost, after which no further request is possible.
        """
        text = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self.is_lost:
                raise ServerLost("it has ended")
            try:
                self._control.settimeout(limit_s)
                if passed is None:
                    self._control.sendall(text)
                else:
                    sent = socket.send_fds(self._control, [text], [passed.fileno()])
                    self._control.sendall(text[sent:])
                return self._answer(time.monotonic() + limit_s)
            except TimeoutError:
                self.is_lost = True
                raise ServerLost("it did not answer in time") from None
            except (OSError, ValueError) as error:
                self.is_lost = True
                raise ServerLost(f"it ended ({error})") from error

    def _answer(self, limit: float) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\n"):
            if time.monotonic() > limit:
                raise TimeoutError
            ready = self._readable.poll(_POLL_MS)
            piece = self._control.recv(1 << 16) if ready else b""
            if ready and not piece:
                raise ConnectionError("its socket closed")
            if self.is_lost:
                raise ConnectionError("it was killed")
            text += piece
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise ValueError("an answer that is no object")
        return answer


def how_ended(status: int) -> str:
    """Return a status of `Popen` in words."""
    if status < 0:
        with contextlib.suppress(ValueError):  # a real-time signal
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
