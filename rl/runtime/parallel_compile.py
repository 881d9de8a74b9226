"""Programs compiled before the first of them is needed, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from rl.runtime import memory_mappings

OnCompiled = Callable[[int, int], None]  # (programs compiled, all of them)
CHECK_EVERY = 16  # programs


def unwatched(done: int, total: int) -> None:
    """Nobody is told."""


def compile_all(lowered: Iterable[Any], total: int, told: OnCompiled = unwatched) -> None:
    """Compile `total` lowered steps in threads, while those behind them are still being lowered.

    `told` hears in this thread how many are done. Raises TooManyMappings where they do not fit
    into what Linux allows a process.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    compiled: list[Future[Any]] = []
    done = 0

    def look() -> None:
        nonlocal done
        before, done = done, sum(future.done() for future in compiled)
        if done // CHECK_EVERY != before // CHECK_EVERY or 0 < done == total:
            memory_mappings.check(f"{done} of {total} programs are compiled")
        if done > before:
            told(done, total)

    told(0, total)
    try:
        for step in lowered:
            compiled.append(pool.submit(step.compile))
            look()
        for future in as_completed(compiled):
            future.result()
            look()
    finally:
        pool.shutdown(cancel_futures=True)
