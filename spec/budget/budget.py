"""How many draft tokens a round tries: the choice that buys the most tokens per second.

A round of B slots and N nodes costs what the measured table says; it brings each
request one token and the draft tokens that turn out right. Policies by name: `off`,
`fixed:k`, `aimd` (HistoSpec's windows), `goodput` (ours), and in spec/budget/bandit_budget.py
`bandit` (TLT's). A budget lives for one phase; what it is told is counts and a table, so that its
decisions repeat. A = live requests, B = slots, N = nodes (root included), S = cache positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec.acceptance import Acceptance, deepest
from spec.budget.device_turns import DeviceDraftGate
from spec.budget.window import WindowConfig, next_windows
from spec.drafter import Drafts, LiveSlots
from spec.per_request import PerRequest, RequestIndex
from spec.round_times import RoundTimes

POLICIES = "off, fixed:K, aimd, goodput, bandit"
BETTER = 1.03  # a mode is left only for one that promises this much more
DECAY = 0.9  # of a request's acceptance counts, a round
PRIOR_NODES = 2.0  # how many expected draft tokens the prior of a request weighs


@dataclasses.dataclass(frozen=True)
class DraftDecision:
    """Trees of `num_nodes`; 1 is plain decoding, `num_rounds` rounds before the next question."""

    num_nodes: int
    num_rounds: int = 1


class Budget(Protocol):
    """Told before drafting how much each request may get, after it what was found."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        """The drafters, by name, that are not to be asked in this round."""
        ...

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        """The most draft tokens that each live request may get; int [A]."""
        ...

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        """One of `sizes` (ascending, root included), or 1; their bucket is given."""
        ...

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        """What became of the draft tokens that `choose` was asked about."""
        ...


def size_for(widest: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds the root and `widest` draft tokens, else the largest; 1 for
    none.
    """
    if not widest or not sizes:
        return 1
    return next((n for n in sizes if n > widest), sizes[-1])


class AsksAll:
    """Base of budgets that leave no drafter out."""

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return frozenset()


class Off(AsksAll):
    """Never a draft token."""

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.zeros(len(live), np.int32)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        return DraftDecision(1, 2**30)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        pass


class FixedBudget(AsksAll):
    """All draft tokens that there are, at most `most` a request."""

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

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        pass


class Aimd(AsksAll):
    """HistoSpec's windows, with its gate on the batch size (RhymeRL, section 5.4).

    A window is the most draft tokens of a request. The paper drafts chains; a tree, which other
    sources bring, counts as accepted where its longest path is.
    A round is plain where the table says that at the acceptance seen so far trees of
    the wanted size would bring fewer tokens per second; every `PROBE` rounds the gate
    is opened once, to see the acceptance anew.
    """

    PROBE = 32

    def __init__(self, times: RoundTimes | None = None, window: WindowConfig | None = None) -> None:
        self._config = window or WindowConfig()
        self._times = times
        self._windows = PerRequest(RequestIndex(), self._config.start_tokens)
        self._tokens_per_request = 0.0  # a round of trees brings this many, decayed mean
        self._closed = 0

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return self._windows.get(live).astype(np.int32)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        size = size_for(int(drafts.count_A.max(initial=0)), sizes)
        if self._times is None or size == 1 or not self._tokens_per_request:
            return DraftDecision(size)
        plain_s = self._times(num_slots, 1, num_positions)
        tree_s = self._times(num_slots, size, num_positions)
        if plain_s is None or tree_s is None or tree_s < self._tokens_per_request * plain_s:
            self._closed = 0
            return DraftDecision(size)
        self._closed += 1
        return DraftDecision(1 if self._closed % self.PROBE else size)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        if not acceptance.verified:
            return
        deepest_A = deepest(drafts, acceptance.observed_AN)
        accepted_A = acceptance.accepted_AN.sum(axis=1)
        windows_A = next_windows(self._config, self._windows.get(live), deepest_A, accepted_A)
        self._windows.set(live, windows_A)
        mean = 1.0 + float(accepted_A.mean())
        old = self._tokens_per_request or mean
        self._tokens_per_request = DECAY * old + (1 - DECAY) * mean


class Goodput:
    """The tree size with the most expected tokens per second this round.

    tokens(N) = A + Σ_a s_a Σ_{i<N} probability[a, i],  choice = argmax tokens(N) / seconds(B, N, S)

    `s_a` is what a request's draft tokens were worth so far over what they promised, drawn
    towards that of all requests; draft tokens that were not tried are judged by what was then
    drawn. A mode is left only for one that promises `BETTER`.
    While plain decoding wins, drafts are asked for after 8, 16, … `LONGEST_WAIT` rounds
    (and where the batch shrinks): they cost the host's time.
    """

    SHORTEST_WAIT, LONGEST_WAIT = 8, 64

    def __init__(self, times: RoundTimes) -> None:
        self._times = times
        index = RequestIndex()
        self._hits, self._hopes = PerRequest(index, 0.0), PerRequest(index, 0.0)
        self._asked_at = PerRequest(index, np.inf)  # tokens of a request when drafts were refused
        self._all_hits = self._all_hopes = 0.0
        self._speculating = False
        self._plain_rounds = 0
        self._wait = (0, 0)  # drafts are not asked for at these slots for so many rounds
        self._turns = DeviceDraftGate()

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return self._turns.skips()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        slots, rounds = self._wait
        passed_A = live.total_tokens_A - self._asked_at.get(live)
        waiting = slots == num_slots and 0 <= passed_A.max() < rounds
        return np.full(len(live), 0 if waiting else 2**30, np.int32)

    def scale(self, live: LiveSlots) -> np.ndarray:
        """s_a = (hits + prior · s) / (hopes + prior), with s the same over all requests."""
        overall = (self._all_hits + PRIOR_NODES) / (self._all_hopes + PRIOR_NODES)
        hits_A, hopes_A = self._hits.get(live), self._hopes.get(live)
        return (hits_A + PRIOR_NODES * overall) / (hopes_A + PRIOR_NODES)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        plain_s = self._times(num_slots, 1, num_positions)
        if plain_s is None:
            raise KeyError(
                f"no measured time of a plain round of {num_slots} slots and {num_positions} "
                "positions: measure the engine's rounds (rl.warm_up.round_times) before the phase"
            )
        worth_N = self.scale(live) @ np.cumsum(drafts.prob_AN, axis=1)
        best, best_rate = 1, 1.0
        widest = int(drafts.count_A.max(initial=0))
        for size in sizes:
            tree_s = self._times(num_slots, size, num_positions)
            if tree_s is None or not widest:
                continue
            worth = worth_N[min(size - 1, drafts.max_nodes) - 1]
            rate = (len(live) + worth) / len(live) * plain_s / tree_s
            if rate > best_rate:
                best, best_rate = size, rate
            if size > widest:
                break
        bucket = num_slots, best, num_positions
        self._turns.judge(self._times, live, drafts, self.scale(live), bucket)
        self._speculating = best > 1 and (self._speculating or best_rate > BETTER)
        if self._speculating:
            self._plain_rounds, self._wait = 0, (0, 0)
            return DraftDecision(best)
        shrunk = num_slots < self._wait[0]
        longer = min(2 * self._plain_rounds, self.LONGEST_WAIT)
        self._plain_rounds = self.SHORTEST_WAIT if shrunk else max(longer, self.SHORTEST_WAIT)
        self._wait = (num_slots, self._plain_rounds)
        self._asked_at.set(live, live.total_tokens_A)
        return DraftDecision(1, self._plain_rounds)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        hopes_A = np.where(acceptance.observed_AN, drafts.prob_AN, 0.0).sum(axis=1)
        hits_A = acceptance.accepted_AN.sum(axis=1)
        self._hits.set(live, DECAY * self._hits.get(live) + hits_A)
        self._hopes.set(live, DECAY * self._hopes.get(live) + hopes_A)
        self._all_hits = 0.99 * self._all_hits + float(hits_A.sum())
        self._all_hopes = 0.99 * self._all_hopes + float(hopes_A.sum())


def make_budget(policy: str, times: RoundTimes | None) -> Budget:
    """The budget of that name, for one phase.

    Raises ValueError for a name that there is not.
    """
    if policy == "off":
        return Off()
    if policy == "aimd":
        return Aimd(times)
    if policy == "goodput":
        assert times is not None, "goodput needs the measured seconds of a round"
        return Goodput(times)
    name, _, size = policy.partition(":")
    if name == "fixed" and size.isdecimal() and int(size) >= 1:
        return FixedBudget(int(size))
    raise ValueError(f"budget must be one of {POLICIES}, got {policy!r}")
