"""A reward worker: one JSON object a line in, JSON lines out. No jax, no pickle.

    python -m rl.rewards.worker        started by rl.rewards.process, not by hand

in   {"functions", "extract", "memory_limit_mib", "parent_pid", "tasks"}   once
out  {"ready": true} | {"fatal": message}
in   {"prompt", "completion", "completion_ids", "columns"}                 per sample
out  {"at": k}                        function k starts; the first one starts the deadline
out  {"outcomes": [[value, kind, message], ...]} | {"fatal": message}

Standard output is moved to standard error first: a scorer that prints cannot harm
the protocol. The process ends when its input does, or its parent.
"""

from __future__ import annotations

import ctypes
import json
import math
import numbers
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

# value, kind of failure, message: a value of None without a kind is "not applicable".
Outcome = tuple[float | None, str | None, str | None]


def main() -> int:
    """Serve until the input ends; 0 then, 1 where the functions cannot be loaded."""
    reader, writer = _private_pipes()
    setup = json.loads(reader.readline())
    _die_with_parent(setup["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _limit_memory(setup["memory_limit_mib"])
    try:
        from rl.rewards.functions import load

        functions = [load(name, setup["extract"]) for name in setup["functions"]]
        for spec in setup["tasks"]:
            _prepare(functions, spec)
    except BaseException as error:  # SystemExit of a user's file included: say so, then end
        traceback.print_exc()
        _send(writer, {"fatal": _describe(error)})
        return 1
    _send(writer, {"ready": True})
    prepared = set(setup["tasks"])
    for line in reader:
        _serve(functions, json.loads(line), prepared, writer)
    return 0


def _serve(functions: list, job: Mapping[str, Any], prepared: set[str], writer: BinaryIO) -> None:
    spec = job["columns"]["task"]
    if spec not in prepared:
        try:
            _prepare(functions, spec)
        except Exception as error:
            traceback.print_exc()
            _send(writer, {"fatal": _describe(error)})
            return
        prepared.add(spec)
    outcomes = []
    for number, function in enumerate(functions):
        _send(writer, {"at": number})
        outcomes.append(_outcome(function, job))
    _send(writer, {"outcomes": outcomes})


def _prepare(functions: list, spec: str) -> None:
    for function in functions:
        function.prepare(spec)


def _outcome(function: Any, job: Mapping[str, Any]) -> Outcome:
    try:
        result = function(job["prompt"], job["completion"], job["completion_ids"], job["columns"])
    except BaseException as error:  # sys.exit() in a scorer costs one sample, not a worker
        return None, "raised", _describe(error)
    try:
        return read_result(result)
    except Exception as error:  # a list-like object whose own methods raise
        return None, "raised", _describe(error)


def read_result(result: Any) -> Outcome:
    """Check what a function returned for one sample: a list of one finite number or None.

    Arrays and scalars of numpy and the like count as their Python values, True as 1.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        return None, "not_a_list", f"expected a list of 1 number, got {_shown(result)}"
    if len(result) != 1:
        return None, "length", f"expected 1 value for 1 completion, got {len(result)} values"
    value = result[0]
    if value is None:
        return None, None, None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None, "not_a_number", f"expected a number or None, got {_shown(value)}"
    if not math.isfinite(value):
        return None, "not_finite", f"expected a finite number, got {float(value)}"
    return float(value), None, None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def _describe(error: BaseException) -> str:
    """Type, message and the innermost line, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


def _send(writer: BinaryIO, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    writer.flush()


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the protocol's two pipes; give user code an empty input and stderr to print to."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return reader, writer


def _die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process with its parent, even in the middle of a scorer."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(1)


def _limit_memory(limit_mib: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20))


if __name__ == "__main__":
    sys.exit(main())
