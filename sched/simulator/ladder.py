"""The draft ladder: what a drafting method buys at an acceptance (SpecActor, section 4.2).

It is made beforehand, from drafting and verification seconds alone; the acceptance that was
seen lately then picks the method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from sched.simulator.specactor import LinearTime, best_request_plan


@dataclasses.dataclass(frozen=True)
class Ladder:
    """`draft` gives each method's seconds per token; `verify` those of windows, 0 for plain."""

    draft: Mapping[str, LinearTime]
    verify: Callable[[int], LinearTime]
    batch: float = 1

    def speedup(self, method: str, p: float) -> float:
        """Tokens per second over plain decoding, at the best window and mode; at least 1."""
        found = best_request_plan(p, self.draft[method], self.verify, self.batch)
        return found.tokens_per_s * self.verify(0)(self.batch)

    def best(self, acceptance: Mapping[str, float]) -> str:
        """The method that buys most at the acceptance that each had; ties go to the first."""
        return max(acceptance, key=lambda method: self.speedup(method, acceptance[method]))

    def rank(self, acceptance: Mapping[str, float]) -> list[str]:
        """All methods, the best first."""
        return sorted(acceptance, key=lambda m: -self.speedup(m, acceptance[m]))
