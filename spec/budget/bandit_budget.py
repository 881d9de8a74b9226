"""The bandit as a budget: which drafters are asked, how deep they search, how much is verified.

A round's reward is tokens a second, its seconds those of the measured table: unlike the paper's
they do not come from the clock, so that decisions are a function of the tokens and of that
table, and a resumed run decides as the first one did. Source: TLT sections 5.2 and 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import numpy as np

from spec.budget.bandit import BegMab, Strategy
from spec.budget.budget import Budget, DraftDecision, best, equal_trees, plain
from spec.budget.config import LEARNED, BanditConfig, TunerConfig
from spec.budget.device_gate import DeviceDrafter
from spec.budget.union import DrafterUnion
from spec.drafter import Acceptance, Drafts, LiveSlots, Source
from spec.round_times import RoundTimes

PLAIN = Strategy("plain", (), 0, 0, 0)


def strategies(
    config: TunerConfig, sources: Sequence[str], top_k: int, deepest: Mapping[str, int]
) -> list[Strategy]:
    """Return the arms for these drafters; `deepest` are the levels of those on the device.

    What drafting workers send is as deep as their plan says: such a source has an arm as text has.
    """
    found = tuple(s for s in sources if s not in deepest)
    together = [found, tuple(sources)] if len(found) > 1 else [tuple(sources)]
    choices = list(dict.fromkeys([*((s,) for s in sources), *together]))
    arms = [PLAIN]
    for tokens in config.verify_tokens:
        for chosen in choices:
            width = top_k if LEARNED in chosen else 0
            reached = [deepest[name] for name in chosen if name in deepest]
            for depth in [d for d in config.depths if d <= min(reached)] if reached else [0]:
                name = "+".join(chosen) + (f" depth {depth}" if depth else "") + f" × {tokens}"
                arms.append(Strategy(name, chosen, depth, width, tokens))
    return arms


def node_counts(config: TunerConfig, num_slots: int) -> set[int]:
    """Return the nodes of rounds of this many slots, before they are rounded up."""
    least, most = _batch_size(1, num_slots), num_slots
    ends = (*config.thresholds[1:], most + 1)
    ranges = zip(config.thresholds, ends, config.verify_tokens, strict=False)
    reached = [tokens for first, end, tokens in ranges if first <= most and least < end]
    return {num_slots * (tokens + 1) for tokens in reached}


def _batch_size(num_requests: int, num_slots: int) -> int:
    """Return the batch size that a round counts as: its cost is that of its bucket of slots."""
    return max(num_requests, num_slots // 2 + 1)


def make_bandit(
    config: TunerConfig,
    sources: Sequence[str],
    top_k: int,
    deepest: Mapping[str, int],
    seed: int,
) -> BegMab:
    """Return a worker's bandit, which lives as long as the run."""
    bandit = BanditConfig(config.thresholds, config.epsilon, config.window, everywhere=True)
    return BegMab(strategies(config, sources, top_k, deepest), bandit, seed)


class BanditBudget(Budget):
    """The budget of one rollout, by a bandit that learns from rollout to rollout.

    Rounds in which cached responses go on are no arm's: the measured seconds decide on them, and
    the bandit learns nothing. Of requests that `is_copy` names, and of those that draft what
    another copy has, it learns nothing either: `spec.decoupled.copies` drafts for them. `on_device`
    are the drafters that take the device's time, at a depth of the arm's.
    """

    def __init__(
        self,
        bandit: BegMab,
        times: RoundTimes,
        union: DrafterUnion,
        on_device: Collection[str] = (),
        is_copy: Callable[[int], bool] = lambda request_id: False,
    ) -> None:
        self._bandit, self._times, self._union = bandit, times, union
        self._on_device, self._is_copy = frozenset(on_device), is_copy
        self._strategy, self._size, self._is_mixed = PLAIN, 1, False
        self._bucket, self._batch = (0, 0), 1  # slots, positions; requests

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        self._bucket, self._batch = (num_slots, num_positions), _batch_size(len(live), num_slots)
        self._strategy = strategy = self._bandit.select(self._batch)
        if strategy == PLAIN:  # its reward is known
            self._record(np.zeros(len(live)), num_slots)
        for name in self._on_device & set(strategy.sources):
            cast(DeviceDrafter, self._union.named(name)).depth = strategy.depth
        return frozenset(self._union.names) - frozenset(strategy.sources)

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._strategy.verify_tokens, np.int32)

    def unseen(
        self, live: LiveSlots, most_tokens: int, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        decision = equal_trees(self._strategy.verify_tokens, sizes, num_slots)
        self._is_mixed = False
        if decision is not None:
            self._size = decision.num_nodes
        return decision

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        # as many nodes as the range's strategies may have: one size of each range is compiled
        self._is_mixed = bool(drafts.cached_A.any())
        most = max(s.verify_tokens for s in self._bandit.candidates(self._batch))
        if not self._is_mixed:
            most = self._strategy.verify_tokens
        wanted = num_slots * (most + 1)
        self._size = next((m for m in sizes if m >= wanted), max(sizes, default=num_slots))
        taken_A = best(drafts, np.ones(len(live)), num_slots, self._size)
        if not taken_A.any() or (self._is_mixed and not self._pays(drafts, taken_A)):
            self._size = num_slots
            return plain(num_slots)
        return DraftDecision(self._size, taken_A)

    def _pays(self, drafts: Drafts, taken_A: np.ndarray) -> bool:
        """Return whether a round pays where cached responses go on, which no arm has drafted."""
        num_slots, num_positions = self._bucket
        plain_s = self._times(num_slots, num_slots, num_positions)
        round_s = self._times(num_slots, self._size, num_positions)
        if plain_s is None or round_s is None:
            return True
        taken_AN = np.arange(drafts.max_nodes) < taken_A[:, None]
        accepted = float(drafts.prob_AN[taken_AN].sum())  # as expected
        return (len(taken_A) + accepted) / round_s > len(taken_A) / plain_s

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        if self._is_mixed:  # the round was not the arm's choice
            return
        copies = [self._is_copy(r) for r in live.request_ids_A.tolist()]
        own_A = ~np.array(copies, bool) & (drafts.sources_AN[:, 0] != Source.COPY)
        verified = acceptance.verified
        accepted_A = acceptance.accepted_AN.sum(axis=1) if verified else np.zeros(len(live))
        if own_A.any():
            self._record(accepted_A[own_A], self._size)

    def _record(self, accepted_A: np.ndarray, num_nodes: int) -> None:
        (num_slots, num_positions), strategy = self._bucket, self._strategy
        round_s = self._times(num_slots, num_nodes, num_positions)
        if round_s is not None:  # nothing is learned from a bucket that was not measured
            for name in self._on_device & set(strategy.sources):
                round_s += self._times.draft(name, num_slots, strategy.depth, num_positions)
            mean_accepted = float(accepted_A.mean())
            self._bandit.record(strategy, round_s, [mean_accepted] * self._batch, self._batch)
