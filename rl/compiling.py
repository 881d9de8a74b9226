"""Programs compiled before the first of them is needed, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from rl import memory_mappings

OnCompiled = Callable[[int, int], None]  # (programs compiled, all of them)
CHECK_EVERY = 16  # programs


def unwatched(done: int, total: int) -> None:
    """Nobody is told."""


def compile_all(lowered: Sequence[Any], told: OnCompiled = unwatched) -> None:
    """Compile lowered steps in threads; `told` hears of each, in this thread.

    Raises TooManyMappings where they do not fit into what Linux allows a process.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for done, program in enumerate(as_completed([pool.submit(p.compile) for p in lowered]), 1):
            program.result()
            if done % CHECK_EVERY == 1:
                memory_mappings.check(f"{done} of {len(lowered)} programs are compiled")
            told(done, len(lowered))
    finally:
        pool.shutdown(cancel_futures=True)
