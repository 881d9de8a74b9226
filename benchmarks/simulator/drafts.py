"""Rounds with draft tokens in the simulator, decided by the budgets and windows of `spec`.

A `sched.simulator.worker.RoundModel` calls the objects that decide in an engine's rounds,
`spec.budget.budget` and `spec.budget.aimd`, with a roofline's seconds instead of measured ones and
with probabilities instead of drafts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from reprise.sched.policies.specactor import sequential_tokens
from reprise.sched.simulator.roofline import Instance, RoundCost
from reprise.sched.simulator.worker import RoundModel, RoundPlan
from reprise.spec.budget.aimd import START_TOKENS, next_windows
from reprise.spec.budget.budget import Budget
from reprise.spec.drafter import Drafts, LiveSlots
from reprise.spec.round_times import RoundTimes


@dataclasses.dataclass(frozen=True)
class RequestClass:
    """Requests with at least `finished_siblings`: probabilities of their draft tokens, best first.

    A probability is that of accepting a draft token and all above it: a tree's first n tokens bring
    the sum of their probabilities.
    """

    finished_siblings: int
    probs: tuple[float, ...]


def chain_probs(p: float, window: int) -> tuple[float, ...]:
    """Return the probabilities of a chain whose draft tokens are each accepted with p."""
    return tuple(p**i for i in range(1, window + 1))


class CostTimes(RoundTimes):
    """Round times by a roofline, plus `draft_s` for drafting."""

    def __init__(
        self, cost: Callable[[int, int], RoundCost], draft_s: Callable[[int, int], float]
    ) -> None:
        super().__init__({})
        self._cost, self._draft_s = cost, draft_s

    def __call__(
        self, num_slots: int, num_nodes: int, num_positions: int, live_tokens: float | None = None
    ) -> float:
        of_each = num_nodes // num_slots
        draft_s = self._draft_s(num_slots, of_each) if of_each > 1 else 0.0
        return self._cost(num_slots, of_each)(num_positions) + draft_s


class Budgeted(RoundModel):
    """Rounds of the size that each worker's budget chooses; plain rounds above `max_requests`.

    `draft_s` returns the seconds of drafting from (requests, nodes of each tree).
    """

    def __init__(
        self,
        instance: Instance,
        lanes: Sequence[RequestClass],
        make_budget: Callable[[RoundTimes], Budget],
        sizes: Sequence[int],
        *,
        draft_s: Callable[[int, int], float] = lambda requests, nodes: 0.0,
        max_requests: int = 2**30,
    ) -> None:
        super().__init__(instance)
        self.num_lanes, self._sizes = len(lanes), sizes
        self._draft_s, self._max_requests = draft_s, max_requests
        self._siblings = [lane.finished_siblings for lane in lanes]
        self._make_budget = make_budget
        self._budgets: dict[int, Budget] = {}
        widest = max(sizes) - 1
        rows = [(lane.probs + (0.0,) * widest)[:widest] for lane in lanes]
        self._prob_LN = np.array(rows, np.float32)
        self._count_L = np.count_nonzero(self._prob_LN, axis=1)
        self._drafts = functools.lru_cache(4096)(self._make_drafts)
        self._cost = functools.lru_cache(2**16)(instance.round_cost)

    def lane(self, request_id: int, finished_siblings: int) -> int:
        return bisect.bisect_right(self._siblings, finished_siblings) - 1

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> RoundPlan:
        batch, others = sum(counts), self.others(worker_id)
        nodes, tokens = 1, (1.0,) * self.num_lanes
        if batch <= self._max_requests:
            live, drafts = self._drafts(counts)
            sizes = [batch * n for n in self._sizes]
            choice = self._budget(worker_id).choose(live, drafts, sizes, batch, int(positions))
            if choice.taken_A is not None:
                nodes = choice.num_nodes // batch
                tokens = self._tokens(counts, choice.taken_A)
        cost = self._cost(batch, nodes, others)
        if nodes > 1:
            fixed_s = cost.fixed_s + self._draft_s(batch, nodes)
            cost = dataclasses.replace(cost, fixed_s=fixed_s)
        return RoundPlan(cost, tokens)

    def _tokens(self, counts: tuple[int, ...], taken_A: np.ndarray) -> tuple[float, ...]:
        """Return the mean tokens a round of each lane's requests."""
        gain_LN = np.pad(np.cumsum(self._prob_LN, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
        lanes_A = np.repeat(np.arange(len(counts)), counts)
        total_L = np.bincount(lanes_A, gain_LN[lanes_A, taken_A], len(counts))
        return tuple((1 + total_L / np.maximum(counts, 1)).tolist())

    def _budget(self, worker_id: int) -> Budget:
        def cost(requests: int, nodes: int) -> RoundCost:
            return self._cost(requests, nodes, self.others(worker_id))

        if worker_id not in self._budgets:
            self._budgets[worker_id] = self._make_budget(CostTimes(cost, self._draft_s))
        return self._budgets[worker_id]

    def _make_drafts(self, counts: tuple[int, ...]) -> tuple[LiveSlots, Drafts]:
        """Return placeholders for running requests: probabilities of their lanes, no tokens."""
        lanes_A = np.repeat(np.arange(len(counts)), counts)
        prob_AN = self._prob_LN[lanes_A]
        blank_AN = np.zeros(prob_AN.shape, np.int32)
        drafts = Drafts(blank_AN, blank_AN, prob_AN, blank_AN, self._count_L[lanes_A])
        A = np.arange(len(lanes_A))
        return LiveSlots(A, A, A, A, A, A, np.zeros((len(A), 0), np.int32)), drafts


@dataclasses.dataclass(frozen=True)
class WindowMean:
    """A request's long-run means of draft tokens and tokens a round."""

    drafts: float
    tokens: float


def window_mean(p: float, share_found: float = 1.0) -> WindowMean:
    """Return the stationary mean of `spec.budget.aimd` if draft tokens are each accepted with p.

    Draft tokens are found with probability `share_found`; otherwise a request decodes plainly and
    keeps its window.
    """
    found = [START_TOKENS]
    while (after := int(next_windows(*[np.array(found[-1:])] * 3)[0])) != found[-1]:
        found.append(after)  # all windows that a request can grow to
    windows = np.array(found)
    index = {int(w): i for i, w in enumerate(windows)}
    grown = next_windows(windows, windows, windows)
    reset = next_windows(windows, windows, np.zeros_like(windows))
    share = np.zeros(len(windows))
    share[0] = 1.0
    accepted = p ** windows.astype(float)
    while True:
        after = np.zeros_like(share)
        for i in range(len(windows)):
            after[index[int(grown[i])]] += share[i] * accepted[i]
            after[index[int(reset[i])]] += share[i] * (1 - accepted[i])
        mixed = (share + after) / 2
        if np.abs(mixed - share).max() < 1e-12:
            break
        share = mixed
    tokens = sum(s * sequential_tokens(p, int(w)) for s, w in zip(share, windows, strict=True))
    return WindowMean(share_found * float(share @ windows), 1 + share_found * (float(tokens) - 1))


class Windowed(RoundModel):
    """HistoSpec's windows: rounds of their mean size, or plain rounds if these are faster."""

    def __init__(self, instance: Instance, mean: WindowMean) -> None:
        super().__init__(instance)
        self._mean = mean

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> RoundPlan:
        plain = self._instance.round_cost(counts[0])
        trees = self._instance.round_cost(counts[0], 1 + self._mean.drafts)
        if trees(positions) < self._mean.tokens * plain(positions):
            return RoundPlan(trees, (self._mean.tokens,))
        return RoundPlan(plain, (1.0,))
