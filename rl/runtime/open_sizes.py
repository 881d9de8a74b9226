"""Sizes that a configuration may leave open, as "auto": `rl.targets.sizes` finds them."""

from __future__ import annotations

from typing import Literal

AUTO: Literal["auto"] = "auto"


def found_size(name: str, size: int | Literal["auto"]) -> int:
    """Return the size. Raises ValueError where it is still open."""
    if size == AUTO:
        raise ValueError(
            f"{name}: expected a number, got {AUTO!r}, for which python -m rl.preflight and "
            "python -m rl.train, as one process, find one: write the number that preflight finds"
        )
    return size
