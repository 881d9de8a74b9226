"""Waits for another thread, with a timeout since the last progress, not since the start."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

HANG_LIMIT_S = 600.0  # the default of Run.hang_limit_s
POLL_S = 0.05  # between two checks for progress
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The maximum wait without progress; `heartbeat` is called on progress."""

    hang_limit_s: float = HANG_LIMIT_S
    heartbeat: Callable[[], object] = lambda: None


class Hang(RuntimeError):
    """A wait without any progress; the message names the waiter, its target and the seconds."""


class ProgramLost(RuntimeError):
    """Another program has exited, hangs or cannot be reached; the message names the program."""

    silent = False  # True if it may still exist, without an answer or progress


def result_of(
    future: Future[T], what: str, deadline: Deadline, progress: Callable[[], Any] = lambda: None
) -> T:
    """Return the result of a future. Raises Hang if `progress` does not change for too long."""
    seen = progress()
    since_s = time.monotonic()
    while not wait([future], min(POLL_S, deadline.hang_limit_s)).done:
        now = progress()
        now_s = time.monotonic()
        if now != seen:
            deadline.heartbeat()
            seen = now
            since_s = now_s
        elif now_s - since_s > deadline.hang_limit_s:
            waiter = threading.current_thread().name
            raise Hang(f"{waiter} waits for {what}: no sign of life for {now_s - since_s:.1f} s")
    return future.result()


def code_line(thread_id: int) -> str:
    """Return the current line of code of a thread, the innermost in this project if possible."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "it has ended"
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if _path_of_ours(line.filename) is not None]
    line = ours[-1] if ours else lines[-1]
    name = _path_of_ours(line.filename) or Path(line.filename).name
    return f"{name}:{line.lineno} in {line.name}"


def _path_of_ours(filename: str) -> Path | None:
    """Return the path of a file relative to this project; None for files of other projects."""
    path = Path(filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return None if "site-packages" in relative.parts else relative  # a checkout has a .venv
