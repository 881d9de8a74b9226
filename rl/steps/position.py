"""The position of a run between two steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """The progress of a run: whole steps, response tokens, and prompts consumed of the data."""

    step: int = 0
    num_tokens: int = 0
    cursor: int = 0
