"""Being asked to stop: by SIGTERM, or by Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal, saved, can go on


def stop_on_signals(saving: str) -> Callable[[], bool]:
    """Ask for a stop at the first SIGTERM or Ctrl-C; a second Ctrl-C ends at once.

    `saving` says what is going to be saved.
    """
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        os.write(2, f"stopping: saving {saving}...\n".encode())

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    return lambda: bool(asked)
