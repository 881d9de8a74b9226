"""Timing in turns: only one kind computes at a time, and all see the same machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

WARM_TURNS = 2


def in_turns(
    kinds: Mapping[str, Callable[[], float]], repeats: int, warm: int = WARM_TURNS
) -> dict[str, np.ndarray]:
    """Return the seconds of each kind, turn by turn, after `warm` turns that do not count.

    Every other turn runs backwards, so that no kind always follows the same one.
    """
    seconds = {name: np.zeros(repeats + warm) for name in kinds}
    for turn in range(repeats + warm):
        for name in list(kinds)[:: -1 if turn % 2 else 1]:
            seconds[name][turn] = kinds[name]()
    return {name: taken_T[warm:] for name, taken_T in seconds.items()}
