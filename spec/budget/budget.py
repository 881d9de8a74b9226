"""The contract of budgets, which decide which draft tokens a round verifies.

A budget lives for one rollout. It sees counts and a table of seconds only, so that its decisions
repeat. A = live requests, B = slots, N = draft tokens of a request, M = nodes of a round (a root
for each slot and the draft tokens), S = cache positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numba
import numpy as np

from reprise.spec.buckets import widest_tree
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots, PerRequest, RequestIndex

Sizes = Sequence[int]  # of rounds, in nodes, ascending
MANY_ROUNDS = 2**15  # as many as a fetch may have


@dataclasses.dataclass(frozen=True, eq=False)
class DraftDecision:
    """A round of `num_nodes` with the first `taken_A` draft tokens of each request.

    With the B roots they are at most `num_nodes`, with its root at most
    `spec.buckets.widest_tree(…)` of a request, or the round fails with ValueError. Without
    `taken_A`: plain decoding for `num_rounds` rounds. With `tree_tokens` these rounds draft on the
    device, at most so many draft tokens a request, and verify the best, by probability times
    `scale_A`.
    """

    num_nodes: int
    taken_A: np.ndarray | None = None
    num_rounds: int = 1
    tree_tokens: int = 0
    scale_A: np.ndarray | None = None


class Budget(Protocol):
    """Limits the draft tokens of a round before drafting, and chooses among them after it."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        """Return the names of the drafters that this round leaves out."""
        return frozenset()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        """Return the most draft tokens that each live request may get; int [A]."""
        ...

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        """Decide for rounds that draft on the device; None: `choose` decides."""
        return None

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        """Choose for a round of this bucket; `sizes` are the numbers of nodes, ascending."""
        ...

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        """Learn which of the draft tokens given to `choose` were accepted."""
        return


def plain(num_slots: int, num_rounds: int = 1) -> DraftDecision:
    """Decide for plain decoding."""
    return DraftDecision(num_slots, num_rounds=num_rounds)


def equal_trees(max_tokens: int, sizes: Sizes, num_slots: int) -> DraftDecision | None:
    """Decide for many rounds of trees of so many draft tokens, or of as many as fit."""
    wanted = num_slots * (max_tokens + 1)
    num_nodes = next((m for m in sizes if m >= wanted), max(sizes, default=num_slots))
    tree_tokens = min(max_tokens, num_nodes // num_slots - 1)
    if tree_tokens < 1:
        return None
    return DraftDecision(num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens)


def best_trees(
    num_nodes: int, num_slots: int, max_tokens: int, scale_A: np.ndarray | None = None
) -> DraftDecision:
    """Decide for many rounds of the best draft tokens, at most `max_tokens` of a request."""
    tree_tokens = widest_tree(num_slots, num_nodes, max_tokens + 1) - 1
    return DraftDecision(
        num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens, scale_A=scale_A
    )


def best(drafts: Drafts, scale_A: np.ndarray, num_slots: int, num_nodes: int) -> np.ndarray:
    """Return how many draft tokens of each request are among the best of all; int32 [A].

    The best make their request fastest: they are ranked by p / (1 + w), with the probability p,
    scaled by the request's factor, and w tokens expected to be accepted before it. (A rollout ends
    with its last request; by p alone those whose drafts are seldom right would get fewer.) p never
    exceeds the parent's, so those taken are each request's first ones.
    """
    return best_by_size(drafts, scale_A, num_slots, (num_nodes,))[0][0]


def best_by_size(
    drafts: Drafts, scale_A: np.ndarray, num_slots: int, sizes: Sizes, share: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return `best` for each number of nodes, [sizes, A], and its expected accepted tokens.

    Drafts have a `share` of the nodes.
    """
    widest = [widest_tree(num_slots, size, drafts.max_nodes + 1) - 1 for size in sizes]
    room_S = np.array([round(share * (size - num_slots)) for size in sizes], np.int64)
    widest_S = np.array(widest, np.int64)
    keys_X = _keys(drafts.prob_AN, drafts.count_A, scale_A, max(widest))
    keys_X.sort()
    return _first(keys_X, drafts.prob_AN, scale_A, widest_S, room_S)


_LAST = 2**31 - 1


@numba.njit(cache=True, nogil=True)
def _keys(prob_AN, count_A, scale_A, max_tokens):  # type: ignore[no-untyped-def]
    """Return a number for each draft token that ascends with its worth, of equals the earlier's."""
    A, N = prob_AN.shape
    worth_X, place_X, X = np.empty(A * N, np.float32), np.empty(A * N, np.int64), 0
    for a in range(A):
        tokens = 1.0  # expected of the request
        for n in range(min(count_A[a], max_tokens)):
            scaled = prob_AN[a, n] * scale_A[a]
            worth_X[X], place_X[X] = scaled / tokens, a * N + n
            tokens += scaled
            X += 1
    bits_X = worth_X.view(np.int32)  # they ascend with the numbers
    for x in range(X):
        place_X[x] = np.int64(bits_X[x]) << 32 | (_LAST - place_X[x])
    return place_X[:X]


@numba.njit(cache=True, nogil=True)
def _first(keys_X, prob_AN, scale_A, widest_S, room_S):  # type: ignore[no-untyped-def]
    A, N = prob_AN.shape
    taken_SA, accepted_S = np.zeros((len(room_S), A), np.int32), np.zeros(len(room_S))
    for s in range(len(room_S)):
        left, x = room_S[s], len(keys_X)
        while left > 0 and x > 0:
            x -= 1
            place = _LAST - (keys_X[x] & _LAST)
            a, n = place // N, place % N
            if n < widest_S[s]:
                taken_SA[s, a] += 1
                accepted_S[s] += prob_AN[a, n] * scale_A[a]
                left -= 1
    return taken_SA, accepted_S


def all_that_fit(drafts: Drafts, sizes: Sizes, num_slots: int) -> DraftDecision:
    """Decide for the smallest round that holds all draft tokens, else for the best of them."""
    if not drafts.count_A.any() or not sizes:
        return plain(num_slots)
    taken_SA, _ = best_by_size(drafts, np.ones(len(drafts.count_A)), num_slots, sizes)
    holds_all_S = taken_SA.sum(axis=1) == drafts.count_A.sum()
    s = int(holds_all_S.argmax()) if holds_all_S.any() else -1
    return DraftDecision(sizes[s], taken_SA[s])


class Backoff:
    """Waits of `shortest`, twice that, … `longest` rounds between attempts that do not pay."""

    def __init__(self, shortest: int = 8, longest: int = 64) -> None:
        self._shortest, self._longest = shortest, longest
        self.rounds = 0  # of the present wait

    def lengthen(self) -> int:
        """Double the wait and return it."""
        self.rounds = min(max(2 * self.rounds, self._shortest), self._longest)
        return self.rounds


class PlainSpell:
    """Rounds of plain decoding, more each time, until the batch changes its slots or ends."""

    def __init__(self, index: RequestIndex, shortest: int, longest: int) -> None:
        self._start_tokens = PerRequest(index, np.inf)  # tokens at the start of the spell
        self._wait, self._num_slots = Backoff(shortest, longest), 0

    def lasts(self, live: LiveSlots, num_slots: int) -> bool:
        if num_slots != self._num_slots:
            return False
        passed_A = live.total_tokens_A - self._start_tokens.get(live)
        return bool(0 <= passed_A.max() < self._wait.rounds)

    def begin(self, live: LiveSlots, num_slots: int) -> DraftDecision:
        """Decide for plain decoding: a longer spell, or the shortest one of a smaller batch."""
        if self.lasts(live, num_slots):  # cached responses were looked at meanwhile
            return plain(num_slots, self._wait.rounds)
        if num_slots < self._num_slots:
            self.end()
        self._num_slots = num_slots
        self._start_tokens.set(live, live.total_tokens_A)
        return plain(num_slots, self._wait.lengthen())

    def end(self) -> None:
        """Let the next spell be the shortest."""
        self._num_slots = self._wait.rounds = 0


class FixedBudget(Budget):
    """Verifies all draft tokens, at most `max_tokens` a request."""

    def __init__(self, max_tokens: int = 2**30) -> None:
        self._max_tokens = max_tokens

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._max_tokens, np.int32)

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        return equal_trees(min(max_tokens, self._max_tokens), sizes, num_slots)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        return all_that_fit(drafts, sizes, num_slots)


class SeeingBudget(FixedBudget):
    """Verifies as `FixedBudget` does, with drafts that always come to the host."""

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        return None
