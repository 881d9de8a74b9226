"""The contract of budgets, which decide which draft tokens a round verifies.

Policies by name: `off`, `fixed:K`, `aimd` (HistoSpec's windows), `goodput` (ours) and `bandit`
(TLT's). A budget lives for one rollout; it sees counts and a table of seconds only, so that its
decisions repeat. A = live requests, B = slots, N = draft tokens of a request, M = nodes of a round
(a root for each slot and the draft tokens), S = cache positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec.drafter import Acceptance, Drafts, LiveSlots


@dataclasses.dataclass(frozen=True, eq=False)
class DraftDecision:
    """A round of `num_nodes` with the first `taken_A` draft tokens of each request.

    Without `taken_A` it is plain decoding: `num_rounds` rounds before the next decision.
    """

    num_nodes: int
    taken_A: np.ndarray | None = None
    num_rounds: int = 1


class Budget(Protocol):
    """Limits the draft tokens of a round before drafting, and chooses among them after it."""

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
        """Choose for a round of this bucket; `sizes` are the numbers of nodes, ascending."""
        ...

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        """Learn what was accepted of the draft tokens that `choose` was given."""
        return


def plain(num_slots: int, num_rounds: int = 1) -> DraftDecision:
    """Decide for plain decoding."""
    return DraftDecision(num_slots, num_rounds=num_rounds)


def likeliest(drafts: Drafts, scale_A: np.ndarray, most: int) -> np.ndarray:
    """Return how many draft tokens of each request are among the `most` likeliest of all; int [A].

    A draft token's probability is scaled by its request's factor. It never exceeds its parent's,
    so that those chosen are each request's first ones.
    """
    if int(drafts.count_A.sum()) <= most:
        return drafts.count_A.copy()
    prob_AN = np.where(_real(drafts), drafts.prob_AN * scale_A[:, None], -1.0)
    # stable: of equals the earlier one is taken, a parent before its children
    chosen_X = np.argsort(-prob_AN, axis=None, kind="stable")[:most]
    return np.bincount(chosen_X // drafts.max_nodes, minlength=len(prob_AN))


def worth(drafts: Drafts, scale_A: np.ndarray) -> np.ndarray:
    """Return the accepted tokens to expect of the n likeliest draft tokens, n = 0, 1, …"""
    prob_AN = np.where(_real(drafts), drafts.prob_AN * scale_A[:, None], 0.0)
    return np.concatenate([[0.0], np.cumsum(np.sort(prob_AN, axis=None)[::-1])])


def all_that_fit(drafts: Drafts, sizes: Sequence[int], num_slots: int) -> DraftDecision:
    """Decide for the smallest round that holds all draft tokens, else for the likeliest of them."""
    wanted = num_slots + int(drafts.count_A.sum())
    if wanted == num_slots or not sizes:
        return plain(num_slots)
    size = next((m for m in sizes if m >= wanted), sizes[-1])
    taken_A = likeliest(drafts, np.ones(len(drafts.count_A)), size - num_slots)
    return DraftDecision(size, taken_A)


def _real(drafts: Drafts) -> np.ndarray:
    return np.arange(drafts.max_nodes) < drafts.count_A[:, None]


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
        return all_that_fit(drafts, sizes, num_slots)


class Backoff:
    """Waits of `SHORTEST`, twice that, … `LONGEST` rounds between attempts that do not pay."""

    SHORTEST, LONGEST = 8, 64

    def __init__(self) -> None:
        self.rounds = 0  # of the present wait

    def lengthen(self) -> int:
        """Double the wait and return it."""
        self.rounds = min(max(2 * self.rounds, self.SHORTEST), self.LONGEST)
        return self.rounds
