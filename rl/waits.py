"""Waiting for another thread, with a deadline: what hangs is named, not waited for.

A deadline is beaten by progress: it runs from the last sign of life, not from the beginning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

HANG_LIMIT_S = 600.0  # where nothing else is said: Run.hang_limit_s says otherwise
POLL_S = 0.05  # between two looks at whether there is progress, or whether to go on
T = TypeVar("T")


class Hang(RuntimeError):
    """Something that was waited for shows no sign of life; says who waits for what, since when."""


def result_of(
    future: Future[T],
    what: str,
    limit_s: float,
    *,
    progress: Callable[[], Any] = lambda: None,
    check: Callable[[], object] = lambda: None,
) -> T:
    """The future's result. Raises Hang once `progress` has said the same for `limit_s`.

    `check` is called now and then while the result is not there: what it raises ends the wait.
    """
    seen, since_s = progress(), time.monotonic()
    while True:
        try:
            return future.result(timeout=min(POLL_S, limit_s))
        except NotYet:
            if future.done():  # the work itself raised a TimeoutError
                raise
        check()
        now, now_s = progress(), time.monotonic()
        if now != seen:
            seen, since_s = now, now_s
        elif now_s - since_s > limit_s:
            waiter = threading.current_thread().name
            raise Hang(f"{waiter} waits for {what}: no sign of life for {now_s - since_s:.1f} s")
