"""Waits for what other threads and programs do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Return once `condition` holds; after `limit_s` that is an error."""
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.005)
