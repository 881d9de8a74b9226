"""Waiting for another thread, with a deadline: what hangs is named, not waited for.

A deadline is beaten by progress: it runs from the last sign of life, not from the beginning.
"""

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

HANG_LIMIT_S = 600.0  # where nothing else is said: Run.hang_limit_s says otherwise
POLL_S = 0.05  # between two looks at whether there is progress, or whether to go on
T = TypeVar("T")


ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long without progress something is waited for; `alive` is called while there is some."""

    hang_limit_s: float = HANG_LIMIT_S
    alive: Callable[[], object] = lambda: None


class Hang(RuntimeError):
    """Something that was waited for shows no sign of life; says who waits for what, since when."""


def result_of(
    future: Future[T],
    what: str,
    patience: Patience,
    progress: Callable[[], Any] = lambda: None,
) -> T:
    """The future's result. Raises Hang once `progress` has said the same for too long."""
    seen, since_s = progress(), time.monotonic()
    while not wait([future], min(POLL_S, patience.hang_limit_s)).done:
        now, now_s = progress(), time.monotonic()
        if now != seen:
            patience.alive()
            seen, since_s = now, now_s
        elif now_s - since_s > patience.hang_limit_s:
            waiter = threading.current_thread().name
            raise Hang(f"{waiter} waits for {what}: no sign of life for {now_s - since_s:.1f} s")
    return future.result()


def place_of(thread_id: int) -> str:
    """Where a thread is: the innermost line of ours, or where it left us for others' code."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "it has ended"
    lines = traceback.extract_stack(frame)
    ours = [x for x in lines if _is_ours(x.filename)]
    line = ours[-1] if ours else lines[-1]
    name = Path(line.filename).relative_to(ROOT) if ours else Path(line.filename).name
    return f"{name}:{line.lineno} in {line.name}"


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(ROOT) and "site-packages" not in filename
