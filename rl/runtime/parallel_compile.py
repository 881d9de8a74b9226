"""Compile programs before the first of them is needed, several at a time.

On CPU every compiled program takes memory mappings. Linux limits them for each process, and XLA
crashes without more, so their number is checked as programs are compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

OnCompiled = Callable[[int, int], None]  # (programs compiled, all of them)
CHECK_EVERY = 16  # programs
LIMIT = Path("/proc/sys/vm/max_map_count")
HELD = Path("/proc/self/maps")
MAX_SHARE = 0.9  # of the limit: compilation needs some itself


class TooManyMappings(RuntimeError):
    """The memory mappings that Linux allows this process are nearly used up."""


def unwatched(done: int, total: int) -> None:
    """Ignore the progress of a compilation."""


def compile_all(lowered: Iterable[Any], total: int, on_compiled: OnCompiled = unwatched) -> None:
    """Compile `total` lowered steps in threads, while later ones are still being lowered.

    `on_compiled` is called in this thread with the number compiled. Raises TooManyMappings if they
    exceed the limit of Linux for a process.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    compiled: list[Future[Any]] = []
    done = 0

    def report() -> None:
        nonlocal done
        before, done = done, sum(future.done() for future in compiled)
        if done // CHECK_EVERY != before // CHECK_EVERY or 0 < done == total:
            check_mappings(f"{done} of {total} programs are compiled")
        if done > before:
            on_compiled(done, total)

    on_compiled(0, total)
    try:
        for step in lowered:
            compiled.append(pool.submit(step.compile))
            report()
        for future in as_completed(compiled):
            future.result()
            report()
    finally:
        pool.shutdown(cancel_futures=True)


def check_mappings(progress: str) -> None:
    """Raise TooManyMappings, with the mend, if nearly all mappings are in use."""
    if not LIMIT.is_file():
        return
    limit = int(LIMIT.read_text(encoding="ascii"))
    held = HELD.read_bytes().count(b"\n")
    if held > MAX_SHARE * limit:
        raise TooManyMappings(
            f"{progress}, and this process holds {held:,} of the {limit:,} memory mappings that "
            f"Linux allows one (vm.max_map_count): XLA would crash. Allow more (sysctl -w "
            f"vm.max_map_count={4 * limit}), or compile fewer buckets: a larger "
            "Engine.min_positions or min_slots, a smaller Engine.max_round_nodes"
        )
