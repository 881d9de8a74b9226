"""Drafting workers as users set them: section SpecActor."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from spec.decoupled.messages import MOST_WINDOW

Ahead = Literal["free_running", "enumeration"]


@dataclasses.dataclass(frozen=True)
class SpecActorConfig:
    """Drafts of workers that do nothing else, for those that verify (SpecActor, section 4).

    `drafting_workers` of `Sched.workers` draft with the `DraftModel`, each on its first device;
    None: as many as the plan says (Algorithm 1), 0: each worker drafts by itself. They draft
    `ahead`: `free_running` goes on behind a window while it is verified, `enumeration` drafts for
    all that the round may bring, with `fan_out` guesses of each next token. A `window` has as many
    draft tokens; None: as the plan says. Every `reconfigure_tokens` tokens of a request that is
    accepted less than the others its window and whether the next one is begun early are planned
    anew (Algorithm 2); 0: never. A worker that has nothing left to do answers up to
    `requests_per_helper` of the others' last requests a second time, drafting by another method:
    the first one to end counts (Algorithm 3).
    """

    drafting_workers: int | None = 0
    ahead: Ahead = "enumeration"
    window: int | None = None
    fan_out: int = 2
    reconfigure_tokens: int = 1000
    requests_per_helper: int = 0

    def __post_init__(self) -> None:
        if self.ahead not in (known := typing.get_args(Ahead)):
            raise ValueError(f"expected ahead of {', '.join(known)}, got {self.ahead!r}")
        if self.drafting_workers is not None and self.drafting_workers < 0:
            raise ValueError(f"drafting_workers must be 0 or more, got {self.drafting_workers}")
        if self.window is not None and not 1 <= self.window <= MOST_WINDOW:
            raise ValueError(f"window must be 1 … {MOST_WINDOW}, got {self.window}")
        if self.fan_out < 1:
            raise ValueError(f"fan_out must be at least 1, got {self.fan_out}")
        for name in ("reconfigure_tokens", "requests_per_helper"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def drafts_apart(self) -> bool:
        """True if some workers may draft for the others."""
        return self.drafting_workers != 0
