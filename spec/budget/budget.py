"""The contract of budgets, which decide how many draft tokens a round verifies.

Policies by name: `off`, `fixed:K`, `aimd` (HistoSpec's windows), `goodput` (ours) and `bandit`
(TLT's). A budget lives for one rollout; it sees counts and a table of seconds only, so that its
decisions repeat. A = live requests, B = slots, N = nodes (root included), S = cache positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec.drafter import Acceptance, Drafts, LiveSlots


@dataclasses.dataclass(frozen=True)
class DraftDecision:
    """Trees of `num_nodes`; 1 is plain decoding, `num_rounds` rounds before the next decision."""

    num_nodes: int
    num_rounds: int = 1


class Budget(Protocol):
    """Limits the draft tokens of a round before drafting, and chooses a tree size after it."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        """Return the drafters, by name, that are not asked in this round."""
        return frozenset()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        """Return the most draft tokens that each live request may get; int [A]."""
        ...

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        """Return one of `sizes` (ascending, root included) or 1, for a round of this bucket."""
        ...

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        """Learn what was accepted of the draft tokens that `choose` was given."""
        return


def size_for(widest: int, sizes: Sequence[int]) -> int:
    """Return the smallest size that holds the root and `widest` draft tokens, else the largest.

    Without draft tokens or sizes it is 1.
    """
    if not widest or not sizes:
        return 1
    return next((n for n in sizes if n > widest), sizes[-1])


class FixedBudget(Budget):
    """Verifies all draft tokens that there are, at most `most` a request."""

    def __init__(self, most: int = 2**30) -> None:
        self._most = most

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._most, np.int32)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        return DraftDecision(size_for(int(drafts.count_A.max(initial=0)), sizes))


class Backoff:
    """Waits of `SHORTEST`, twice that, … `LONGEST` rounds between attempts that do not pay."""

    SHORTEST, LONGEST = 8, 64

    def __init__(self) -> None:
        self.rounds = 0  # of the present wait

    def lengthen(self) -> int:
        """Double the wait and return it."""
        self.rounds = min(max(2 * self.rounds, self.SHORTEST), self.LONGEST)
        return self.rounds
