"""The environment server: imports the user's file once, and forks a process for each episode.

    python -m reprise.rl.environments.worker     started by rl.environments.server, not by hand

Over its standard input, a socket, the server reads JSON lines, and answers each in order:

in   {"factory", "memory_limit_mib", "parent_pid"}      out  {"ready": true} | {"fatal": message}
in   {"open": true}, with a socket                      out  {"pid"} | {"failed": message}
in   {"end": pid}                                       out  {"status"}: as from Popen, or null

A forked process answers the calls of one episode over its socket, each with a ticket:

in   {"ticket", "body": {"op": "describe" | "reset" | "step" | "score", "row", "text", "seeds"}}
out  {"ticket", "answer": {…}}                          by rl.environments.user_environment
     | {"ticket", "failure": [kind, message]}

A fork makes episodes independent: each starts from the same memory, whatever others have changed,
and can be killed without them. The server is the only process that kills and reaps an episode, so
no other process can have got the number of a dead one. No jax, no pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from reprise.rl.environments.user_environment import UserEnvironment, WrongAnswer
from reprise.rl.rewards.worker import Writer, die_with_parent, limit_memory, take_socket
from reprise.rl.runtime.user_files import describe, load_user_name

REAP_S = 5.0  # for a killed process to exit, unless it is stuck in the kernel
_NUMPY_SEEDS = 2**32
Factory = Callable[[], Any]


def main() -> int:
    """Serve until the socket closes; return 0, or 1 if the factory cannot be loaded."""
    control = take_socket()
    setup, _ = _request(control)
    if setup is None:
        return 1
    die_with_parent(setup["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    limit_memory(setup["memory_limit_mib"])
    try:
        factory = load_user_name(setup["factory"])
        _check_threads()
    except BaseException as error:  # also SystemExit of a user file
        _send(control, fatal=describe(error))
        return 1
    _send(control, ready=True)
    children = set[int]()
    while True:
        request, descriptors = _request(control)
        if request is None:
            break
        if "end" in request:
            pid = request["end"]
            status = _end(pid) if pid in children else None
            children.discard(pid)
            _send(control, status=status)
            continue
        try:
            pid = _fork(control, descriptors[0], factory)
        except OSError as error:  # no memory, or too many processes
            _send(control, failed=f"a process cannot be started: {error}")
        else:
            children.add(pid)
            _send(control, pid=pid)
        for descriptor in descriptors:
            os.close(descriptor)
    for pid in children:
        _kill(pid)
    return 0


def _request(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next request and its file descriptors; None once the socket is closed."""
    text = b""
    descriptors = list[int]()
    while not text.endswith(b"\n"):
        try:
            piece, more, _, _ = socket.recv_fds(control, 1 << 16, 1)
        except ConnectionError:
            piece = b""
            more = []
        descriptors += more
        if not piece:
            return None, descriptors
        text += piece
    return json.loads(text), descriptors


def _send(control: socket.socket, **answer: Any) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def _check_threads() -> None:
    """Raise ValueError if the file has started threads, which a fork would leave out."""
    others = [thread.name for thread in threading.enumerate() if thread is not _MAIN]
    if others:
        raise ValueError(
            f"Environment.factory: its file starts the thread {others[0]!r} when it is imported, "
            "and episodes are forks of the process that imports it; fix: start threads and clients "
            "in __init__ or reset"
        )


_MAIN = threading.main_thread()


def _fork(control: socket.socket, descriptor: int, factory: Factory) -> int:
    """Start the process of an episode; return its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    server_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        control.close()
        os.setsid()  # a process group, killed as one
        die_with_parent(server_pid)
        with contextlib.suppress(ConnectionError):  # closed while an answer was on its way
            _serve(descriptor, factory)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:  # also after SystemExit, without the exit handlers of the server
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve(descriptor: int, factory: Factory) -> None:
    """Answer the calls of one episode until its socket closes."""
    os.set_inheritable(descriptor, False)
    lines = socket.socket(fileno=descriptor).makefile("rwb")
    writer = Writer(lines)
    episode = _Episode(factory)
    for line in lines:
        request = json.loads(line)
        writer.send(request["ticket"], **episode.answer(request["body"]))


class _Episode:
    """The environment of this process, made by its first call."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._environment: UserEnvironment | None = None

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a call, or its failure."""
        try:
            return {"answer": self._call(body)}
        except WrongAnswer as error:
            return {"failure": ["answer", str(error)]}
        except BaseException as error:  # sys.exit() in an environment costs one episode
            return {"failure": ["raised", describe(error)]}

    def _call(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            _seed(body["seeds"][0])
            self._environment = UserEnvironment(self._factory)
        environment = self._environment
        match body["op"]:
            case "describe":
                return environment.describe()
            case "reset":
                answer = environment.reset(body["row"])
                _seed(body["seeds"][1])
                return answer
            case "step":
                return environment.step(body["text"])
        return environment.score()


def _seed(seed: int) -> None:
    """Seed the random numbers of Python, and of numpy if the environment uses it."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % _NUMPY_SEEDS)


def _end(pid: int) -> int | None:
    """Kill the process group of an episode, and reap it; return its status as `Popen` has it."""
    _kill(pid)
    limit = time.monotonic() + REAP_S
    while time.monotonic() < limit:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if reaped:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it may not have a group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
