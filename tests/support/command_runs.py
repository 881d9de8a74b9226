"""A command's `main` in this process: starting Python takes longer than what it does here."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence


def call_main(main: Callable[[Sequence[str]], int], *arguments: object) -> int:
    """Its exit code; this process's signal handlers are put back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        return main([str(a) for a in arguments])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
