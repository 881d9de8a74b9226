"""The interface of budgets, which decide which draft tokens a round verifies.

A budget lives for one rollout. It sees only counts and a table of seconds, so that its decisions
are reproducible. A = live requests, B = slots, N = draft tokens of a request, M = nodes of a
round (a root for each slot and the draft tokens), S = cache positions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numba
import numpy as np

from reprise.spec.buckets import widest_tree
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots, PerRequest, RequestIndex

Sizes = Sequence[int]  # numbers of nodes of rounds, ascending
MANY_ROUNDS = 2**15  # no limit: the engine caps the rounds per fetch


@dataclasses.dataclass(frozen=True, eq=False)
class DraftDecision:
    """A round of `num_nodes` with the first `taken_A` draft tokens of each request.

    All roots and draft tokens must fit in `num_nodes`, and the root and draft tokens of a request
    in `spec.buckets.widest_tree(…)`, or the round fails with ValueError. Without `taken_A` the
    decision is plain decoding for `num_rounds` rounds. With `tree_tokens`, these rounds draft up to
    `tree_tokens` tokens per request on the device, and verify the best by probability times
    `scale_A`.
    """

    num_nodes: int
    taken_A: np.ndarray | None = None
    num_rounds: int = 1
    tree_tokens: int = 0
    scale_A: np.ndarray | None = None


class Budget(Protocol):
    """A limit on draft tokens before drafting, and a choice among them after drafting."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        """Return the names of the drafters to skip in this round."""
        return frozenset()

    @abc.abstractmethod
    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        """Return the maximum number of draft tokens of each live request; int [A]."""
        ...

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        """Decide for rounds that draft on the device, or return None to let `choose` decide."""
        return None

    @abc.abstractmethod
    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        """Decide for a round of this bucket; `sizes` are the available numbers of nodes."""
        ...

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        """Learn which of the draft tokens passed to `choose` were accepted."""
        return


def plain(num_slots: int, num_rounds: int = 1) -> DraftDecision:
    """Return a decision for plain decoding."""
    return DraftDecision(num_slots, num_rounds=num_rounds)


def equal_trees(max_tokens: int, sizes: Sizes, num_slots: int) -> DraftDecision | None:
    """Decide for many rounds of trees of up to `max_tokens`; None if no draft token fits."""
    wanted = num_slots * (max_tokens + 1)
    num_nodes = next((m for m in sizes if m >= wanted), max(sizes, default=num_slots))
    tree_tokens = min(max_tokens, num_nodes // num_slots - 1)
    if tree_tokens < 1:
        return None
    return DraftDecision(num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens)


def best_trees(
    num_nodes: int, num_slots: int, max_tokens: int, scale_A: np.ndarray | None = None
) -> DraftDecision:
    """Decide for many rounds of the best draft tokens, at most `max_tokens` per request."""
    tree_tokens = widest_tree(num_slots, num_nodes, max_tokens + 1) - 1
    return DraftDecision(
        num_nodes, num_rounds=MANY_ROUNDS, tree_tokens=tree_tokens, scale_A=scale_A
    )


def best(drafts: Drafts, scale_A: np.ndarray, num_slots: int, num_nodes: int) -> np.ndarray:
    """Return how many draft tokens of each request are among the best of all; int32 [A].

    Draft tokens are ranked by p / (1 + w), the relative gain of their request: p is the probability
    scaled by `scale_A`, and w the expected number of earlier accepted draft tokens. (The slowest
    request determines the rollout time; ranking by p would give fewer draft tokens to requests that
    are seldom accepted.) p never increases from parent to child, so the selected draft tokens are
    the first of each request.
    """
    return best_by_size(drafts, scale_A, num_slots, (num_nodes,))[0][0]


def best_by_size(
    drafts: Drafts, scale_A: np.ndarray, num_slots: int, sizes: Sizes, share: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return `best` for each number of nodes, [sizes, A], and the expected accepted tokens.

    Drafts may use a `share` of the nodes that are not roots.
    """
    most = drafts.tokens_AN.shape[1]
    widest = [widest_tree(num_slots, size, most + 1) - 1 for size in sizes]
    room_S = np.array([round(share * (size - num_slots)) for size in sizes], np.int64)
    widest_S = np.array(widest, np.int64)
    keys_X = _keys(drafts.prob_AN, drafts.count_A, scale_A, max(widest))
    keys_X.sort()
    return _first(keys_X, drafts.prob_AN, scale_A, widest_S, room_S)


_LAST = 2**31 - 1


@numba.njit(cache=True, nogil=True)
def _keys(prob_AN, count_A, scale_A, max_tokens):  # type: ignore[no-untyped-def]
    """Return a sort key per draft token, ascending in worth; ties go to the earlier token."""
    A, N = prob_AN.shape
    worth_X = np.empty(A * N, np.float32)
    place_X = np.empty(A * N, np.int64)
    X = 0
    for a in range(A):
        tokens = 1.0  # expected tokens of the request
        for n in range(min(count_A[a], max_tokens)):
            scaled = prob_AN[a, n] * scale_A[a]
            worth_X[X] = scaled / tokens
            place_X[X] = a * N + n
            tokens += scaled
            X += 1
    bits_X = worth_X.view(np.int32)  # bits of non-negative floats sort like the floats
    for x in range(X):
        place_X[x] = np.int64(bits_X[x]) << 32 | (_LAST - place_X[x])
    return place_X[:X]


@numba.njit(cache=True, nogil=True)
def _first(keys_X, prob_AN, scale_A, widest_S, room_S):  # type: ignore[no-untyped-def]
    A, N = prob_AN.shape
    taken_SA = np.zeros((len(room_S), A), np.int32)
    accepted_S = np.zeros(len(room_S))
    for s in range(len(room_S)):
        left = room_S[s]
        x = len(keys_X)
        while left > 0 and x > 0:
            x -= 1
            place = _LAST - (keys_X[x] & _LAST)
            a = place // N
            n = place % N
            if n < widest_S[s]:
                taken_SA[s, a] += 1
                accepted_S[s] += prob_AN[a, n] * scale_A[a]
                left -= 1
    return taken_SA, accepted_S


def all_that_fit(drafts: Drafts, sizes: Sizes, num_slots: int) -> DraftDecision:
    """Decide for the smallest round with all draft tokens, or the largest with the best."""
    if not drafts.count_A.any() or not sizes:
        return plain(num_slots)
    taken_SA, _ = best_by_size(drafts, np.ones(len(drafts.count_A)), num_slots, sizes)
    holds_all_S = taken_SA.sum(axis=1) == drafts.count_A.sum()
    s = int(holds_all_S.argmax()) if holds_all_S.any() else -1
    return DraftDecision(sizes[s], taken_SA[s])


class Backoff:
    """Exponential backoff of `shortest` to `longest` rounds between attempts that do not pay."""

    def __init__(self, shortest: int = 8, longest: int = 64) -> None:
        self._shortest = shortest
        self._longest = longest
        self.rounds = 0  # of the current wait

    def lengthen(self) -> int:
        """Double the wait and return it."""
        self.rounds = min(max(2 * self.rounds, self._shortest), self._longest)
        return self.rounds


class PlainSpell:
    """Spells of plain rounds, each longer, until the number of slots or all requests change."""

    def __init__(self, index: RequestIndex, shortest: int, longest: int) -> None:
        self._start_tokens = PerRequest(index, np.inf)  # tokens at the start of the spell
        self._wait = Backoff(shortest, longest)
        self._num_slots = 0

    def lasts(self, live: LiveSlots, num_slots: int) -> bool:
        if num_slots != self._num_slots:
            return False
        passed_A = live.total_tokens_A - self._start_tokens.get(live)
        return bool(0 <= passed_A.max() < self._wait.rounds)

    def begin(self, live: LiveSlots, num_slots: int) -> DraftDecision:
        """Decide for plain decoding: a longer spell, or the shortest spell for a smaller batch."""
        if self.lasts(live, num_slots):  # `choose` ran during the spell for cached responses
            return plain(num_slots, self._wait.rounds)
        if num_slots < self._num_slots:
            self.end()
        self._num_slots = num_slots
        self._start_tokens.set(live, live.total_tokens_A)
        return plain(num_slots, self._wait.lengthen())

    def end(self) -> None:
        """Reset, so that the next spell is the shortest."""
        self._num_slots = self._wait.rounds = 0


class FixedBudget(Budget):
    """A budget that verifies all draft tokens, at most `max_tokens` per request."""

    def __init__(self, max_tokens: int = 2**30) -> None:
        self._max_tokens = max_tokens

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full_like(live.rows_A, self._max_tokens)

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        return equal_trees(min(max_tokens, self._max_tokens), sizes, num_slots)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        return all_that_fit(drafts, sizes, num_slots)


class SeeingBudget(FixedBudget):
    """A `FixedBudget` without rounds that draft on the device: the host sees all drafts."""

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        return None
