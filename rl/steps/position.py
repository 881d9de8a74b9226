"""The progress of a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """The whole steps, response tokens, and consumed prompts of a run so far."""

    step: int = 0
    num_tokens: int = 0
    cursor: int = 0
