"""The number of programs that jax has traced or compiled in this process."""

from __future__ import annotations

import jax.monitoring

_EVENTS = "/jax/core/compile/"
_count = 0


def num_programs() -> int:
    """Return the number of traced, lowered and compiled programs so far, counted separately."""
    return _count


def _listen(event: str, duration_s: float, **details: object) -> None:
    global _count
    if event.startswith(_EVENTS):
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
