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

from spec.buckets import widest_tree
from spec.drafter import Acceptance, Drafts, LiveSlots

MANY_ROUNDS = 2**15  # as many as a fetch may have


@dataclasses.dataclass(frozen=True, eq=False)
class DraftDecision:
    """A round of `num_nodes` with the first `taken_A` draft tokens of each request.

    Without `taken_A` it is plain decoding: `num_rounds` rounds before the next decision. With
    `tree_tokens` these draft on the device, at most so many draft tokens a request, and verify the
    likeliest, their probabilities scaled by their request's factor (`scale_A`).
    """

    num_nodes: int
    taken_A: np.ndarray | None = None
    num_rounds: int = 1
    tree_tokens: int = 0
    scale_A: np.ndarray | None = None


class Budget(Protocol):
    """Limits the draft tokens of a round before drafting, and chooses among them after it."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        """Return the drafters, by name, that are not asked in this round."""
        return frozenset()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        """Return the most draft tokens that each live request may get; int [A]."""
        ...

    def unseen(
        self, live: LiveSlots, most_tokens: int, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        """Decide for rounds whose drafts, at most `most_tokens` a request, nobody sees before.

        None: `choose` is to see them.
        """
        return None

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


def equal_trees(most_tokens: int, sizes: Sequence[int], num_slots: int) -> DraftDecision | None:
    """Decide for many rounds of trees of so many draft tokens, or what the largest round holds."""
    wanted = num_slots * (most_tokens + 1)
    num_nodes = next((m for m in sizes if m >= wanted), max(sizes, default=num_slots))
    tree_tokens = min(most_tokens, num_nodes // num_slots - 1)
    if tree_tokens < 1:
        return None
    return DraftDecision(num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens)


def likeliest_trees(
    num_nodes: int, num_slots: int, most_tokens: int, scale_A: np.ndarray | None = None
) -> DraftDecision:
    """Decide for many rounds of the likeliest draft tokens, at most `most_tokens` of a request."""
    tree_tokens = widest_tree(num_slots, num_nodes, most_tokens + 1) - 1
    return DraftDecision(
        num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens, scale_A=scale_A
    )


def likeliest(drafts: Drafts, scale_A: np.ndarray, num_slots: int, num_nodes: int) -> np.ndarray:
    """Return how many draft tokens of each request are among the likeliest of all; int [A].

    As many are chosen as a round of `num_nodes` holds, of one request as many as its tree may. A
    draft token's probability is scaled by its request's factor. It never exceeds its parent's, so
    that those chosen are each request's first ones.
    """
    real_AN = _taken(drafts, num_slots, num_nodes)
    if int(real_AN.sum()) <= num_nodes - num_slots:
        return real_AN.sum(axis=1)
    prob_AN = np.where(real_AN, drafts.prob_AN * scale_A[:, None], -1.0)
    # stable: of equals the earlier one is taken, a parent before its children
    chosen_X = np.argsort(-prob_AN, axis=None, kind="stable")[: num_nodes - num_slots]
    return np.bincount(chosen_X // drafts.max_nodes, minlength=len(prob_AN))


def worth(drafts: Drafts, scale_A: np.ndarray, num_slots: int, num_nodes: int) -> float:
    """Return the accepted draft tokens to expect of those that `likeliest` chooses."""
    real_AN = _taken(drafts, num_slots, num_nodes)
    prob_X = np.sort((drafts.prob_AN * scale_A[:, None])[real_AN])
    return float(prob_X[::-1][: num_nodes - num_slots].sum())


def all_that_fit(drafts: Drafts, sizes: Sequence[int], num_slots: int) -> DraftDecision:
    """Decide for the smallest round that holds all draft tokens, else for the likeliest of them."""
    if not drafts.count_A.any() or not sizes:
        return plain(num_slots)
    one_A, total = np.ones(len(drafts.count_A)), int(drafts.count_A.sum())
    for size in sizes:
        taken_A = likeliest(drafts, one_A, num_slots, size)
        if taken_A.sum() == total:
            break
    return DraftDecision(size, taken_A)


def _taken(drafts: Drafts, num_slots: int, num_nodes: int) -> np.ndarray:
    """Draft tokens that a round of so many nodes may hold; bool [A, N]."""
    most = widest_tree(num_slots, num_nodes, drafts.max_nodes + 1) - 1
    return np.arange(drafts.max_nodes) < np.minimum(drafts.count_A, most)[:, None]


class FixedBudget(Budget):
    """Verifies all draft tokens that there are, at most `most` a request."""

    def __init__(self, most: int = 2**30) -> None:
        self._most = most

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._most, np.int32)

    def unseen(
        self, live: LiveSlots, most_tokens: int, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        return equal_trees(min(most_tokens, self._most), sizes, num_slots)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        return all_that_fit(drafts, sizes, num_slots)


class SeeingBudget(FixedBudget):
    """The same, with drafts that come to the host even where they need not."""

    def unseen(
        self, live: LiveSlots, most_tokens: int, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        return None


class Backoff:
    """Waits of `SHORTEST`, twice that, … `LONGEST` rounds between attempts that do not pay."""

    SHORTEST, LONGEST = 8, 64

    def __init__(self) -> None:
        self.rounds = 0  # of the present wait

    def lengthen(self) -> int:
        """Double the wait and return it."""
        self.rounds = min(max(2 * self.rounds, self.SHORTEST), self.LONGEST)
        return self.rounds
