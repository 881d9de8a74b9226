"""A reward worker: JSON lines over a socket, which is its standard input. No jax, no pickle.

    python -m reprise.rl.rewards.worker        started by rl.rewards.process, not by hand

in   {"ticket", "body": {"functions", "extract", "memory_limit_mib", "parent_pid", "tasks"}}
out  {"ticket", "ready": true} | {"ticket", "fatal": message}
in   {"ticket", "body": {"prompt", "completions", "completion_ids", "columns", "spec"}}
out  {"ticket", "at": null}           the job is accepted (one response, or a whole group)
out  {"ticket", "at": k}              function k starts; the first function starts the deadline
out  {"ticket", "outcomes": [[[value, kind, message], per function], per response]}
     | {"ticket", "fatal": message}

Every answer carries the ticket of its request. A child that a scorer forks, and that returns here,
exits without an answer. The process exits when the socket closes or its parent dies.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import math
import numbers
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from reprise.rl.runtime.user_files import describe, user_frames

# value, kind of failure, message: a value of None without a kind means "not applicable"
ScoreOutcome = tuple[float | None, str | None, str | None]
LARGEST_REWARD = 1e12  # float32 holds the sum of the squares of gradients of about this size


def main() -> int:
    """Serve until the socket closes; return 0, or 1 if the functions cannot be loaded."""
    lines = take_socket().makefile("rwb")
    ticket, setup = _request(lines.readline())
    writer = Writer(lines)
    die_with_parent(setup["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    limit_memory(setup["memory_limit_mib"])
    try:
        from reprise.rl.rewards.functions import load

        functions = [load(name, setup["extract"]) for name in setup["functions"]]
        for function, spec in itertools.product(functions, setup["tasks"]):
            function.prepare(spec)
    except BaseException as error:  # also SystemExit of a user file
        _print_users_frames(error)
        writer.send(ticket, fatal=describe(error) + _memory_hint(error, setup))
        return 1
    writer.send(ticket, ready=True)
    for line in lines:
        _serve(functions, *_request(line), writer)
    return 0


class Writer:
    """Sends answers from this process; a forked child that sends exits instead."""

    def __init__(self, file: io.BufferedRWPair) -> None:
        self._file = file
        self._pid = os.getpid()

    def send(self, ticket: str, **answer: Any) -> None:
        if os.getpid() != self._pid:  # forked by a scorer
            os._exit(0)
        self._file.write(json.dumps({"ticket": ticket} | answer).encode() + b"\n")
        self._file.flush()


def _request(line: bytes) -> tuple[str, Any]:
    request = json.loads(line)
    return request["ticket"], request["body"]


def _serve(functions: list, ticket: str, job: Mapping[str, Any], writer: Writer) -> None:
    writer.send(ticket, at=None)
    try:
        for function in functions:
            function.prepare(job["spec"])
    except Exception as error:
        writer.send(ticket, fatal=describe(error))
        return
    columns = []
    for number, function in enumerate(functions):
        writer.send(ticket, at=number)
        columns.append(_outcomes(function, job))
    writer.send(ticket, outcomes=list(zip(*columns, strict=True)))


def _outcomes(function: Any, job: Mapping[str, Any]) -> list[ScoreOutcome]:
    size = len(job["completions"])
    try:
        return read_result(function.score(**job), size)
    except BaseException as error:  # sys.exit() in a scorer costs one job, not a worker
        return [(None, "raised", describe(error))] * size


def read_result(result: Any, size: int) -> list[ScoreOutcome]:
    """Return the outcomes of a function for `size` responses.

    The result must be a list or array of numbers and None.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        text = f"expected a list of {_count(size, 'number')}, got {_shown(result)}"
        return [(None, "not_a_list", text)] * size
    if len(result) != size:
        got = _count(len(result), "value")
        text = f"expected {_count(size, 'value')} for {_count(size, 'completion')}, got {got}"
        return [(None, "length", text)] * size
    return [read_value(value) for value in result]


def read_value(value: Any) -> ScoreOutcome:
    """Return the outcome of a value: a number, None, or a failure."""
    if value is None:
        return None, None, None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None, "not_a_number", f"expected a number or None, got {_shown(value)}"
    try:
        number = float(value)
    except OverflowError:  # a large int
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:  # also refuses nan
        return (
            None,
            "not_finite",
            f"expected a number of at most {LARGEST_REWARD:g} in size, got {number}",
        )
    return number, None, None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def _print_users_frames(error: BaseException) -> None:
    """Print the frames between a user file and an error in another file."""
    frames = user_frames(error)
    if len({frame.filename for frame in frames}) > 1:
        traceback.print_list(frames, sys.stderr)
        sys.stderr.flush()


def _memory_hint(error: BaseException, setup: Mapping[str, Any]) -> str:
    """Return a hint if an error looks like a lack of memory, however a library phrases it."""
    limit = setup["memory_limit_mib"]
    hints = ("allocate", "MemoryError", "failed to map", "can't start new thread")
    if limit is None or not any(hint in repr(error) for hint in hints):
        return ""
    return f"; Reward.memory_limit_mib is {limit}: raise it, or set it to None"


def take_socket() -> socket.socket:
    """Take the socket from standard input, which is then empty for user code."""
    taken = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return taken


def die_with_parent(parent_pid: int) -> None:
    """Have Linux kill this process with its parent, even in the middle of a scorer."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before
        sys.exit(1)


def limit_memory(limit_mib: int | None) -> None:
    """Limit the address space of this process, and write no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20))


if __name__ == "__main__":
    sys.exit(main())
