"""BEG-MAB, a bandit that chooses the drafters, their depth and the number of verified tokens.

Strategies are grouped by the number of draft tokens that they verify. Each group serves one range
of batch sizes; smaller batches verify more draft tokens per request. Within a range the choice is
ε-greedy over the median reward of a sliding window. The reward is tokens per second. Unlike in the
paper, seconds come from the measured table instead of the clock, so that a resumed run repeats its
decisions.
Source: TLT, sections 5.2 (Algorithm 1) and 5.3.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from reprise.spec.budget.budget import Budget, DraftDecision, Sizes, best, equal_trees, plain
from reprise.spec.budget.config import LEARNED, TunerConfig
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots, RoundsDrafter, Source
from reprise.spec.round_times import RoundTimes

EPSILON = 0.1  # probability of a random arm
WINDOW = 32  # rewards of an arm that count
_STRIDE = 2**64  # counter distance between two draws, so that draws never overlap


@dataclasses.dataclass(frozen=True)
class Strategy:
    """An arm: drafters, their depth and width, and tokens to verify; plain without drafters."""

    name: str
    sources: tuple[str, ...]
    depth: int
    top_k: int
    verify_tokens: int


class BegMab:
    """Algorithm 1, with a window of rewards per strategy and range.

    The paper does not define the median of an empty window. Here, candidates without a reward in
    this range are tried first, in the order of `strategies`. Decisions depend only on the seed, the
    draws so far and the recorded rounds.
    """

    def __init__(self, strategies: Sequence[Strategy], config: TunerConfig, seed: int) -> None:
        self.config = config
        self._candidates = _by_bucket(strategies, config)  # S_i of bucket i
        self._seed = seed
        self._draws = 0
        self._num_chosen = collections.Counter[str]()  # by name, since the last `take_chosen`
        # R_s: tokens per second of the batch
        self._rewards = {
            (bucket, s.name): collections.deque[float](maxlen=WINDOW)
            for bucket, candidates in enumerate(self._candidates)
            for s in candidates
        }

    def candidates(self, batch_size: int) -> tuple[Strategy, ...]:
        """Return V, the strategies for this batch size."""
        return self._candidates[self._bucket(batch_size)]

    def select(self, batch_size: int) -> Strategy:
        """Choose the strategy for the next round of `batch_size` requests."""
        chosen = self._select(batch_size)
        self._num_chosen[chosen.name] += 1
        return chosen

    def _select(self, batch_size: int) -> Strategy:
        candidates = self.candidates(batch_size)
        bucket = self._bucket(batch_size)
        untried = [s for s in candidates if not self._rewards[bucket, s.name]]
        if len(candidates) == 1 or untried:
            return (untried or candidates)[0]
        # each draw has a new generator, so that the saved state is a number
        bits = np.random.Philox(key=self._seed, counter=self._draws * _STRIDE)
        self._draws += 1
        rng = np.random.Generator(bits)
        if rng.random() < EPSILON:
            return candidates[int(rng.integers(len(candidates)))]
        best = self.best(batch_size)
        assert best is not None, "all candidates have rewards"
        return best

    def record(
        self,
        strategy: Strategy,
        elapsed_s: float,
        accept_lens: Sequence[float] | np.ndarray,
        batch_size: int,
    ) -> None:
        """Record the reward of a round, (Σ accept_lens + batch_size) / elapsed_s."""
        tokens = float(np.sum(accept_lens)) + batch_size
        rewards = self._rewards[self._bucket(batch_size), strategy.name]
        rewards.append(tokens / float(elapsed_s))

    def median_reward(self, strategy: Strategy, batch_size: int) -> float | None:
        """Return the median tokens per second in the window of this range, None if it is empty."""
        rewards = self._rewards[self._bucket(batch_size), strategy.name]
        return statistics.median(rewards) if rewards else None

    def best(self, batch_size: int) -> Strategy | None:
        """Return the candidate with the largest median reward, or None before any round."""
        medians = [(self.median_reward(s, batch_size), s) for s in self.candidates(batch_size)]
        known = [(median, s) for median, s in medians if median is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    def take_chosen(self) -> collections.Counter[str]:
        """Return how often each strategy was chosen since the last call, by name."""
        chosen = self._num_chosen
        self._num_chosen = collections.Counter()
        return chosen

    def rewards(self) -> dict[str, list[float]]:
        """Return all rewards in the windows, by strategy name."""
        result = dict[str, list[float]]()
        for (_, name), rewards in self._rewards.items():
            if rewards:
                result.setdefault(name, []).extend(rewards)
        return result

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, with which later decisions repeat."""
        windows = [
            {"bucket": bucket, "strategy": name, "rewards": list(rewards)}
            for (bucket, name), rewards in self._rewards.items()
        ]
        return {"seed": self._seed, "draws": self._draws, "windows": windows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`; strategies missing from it count as untried."""
        windows = {(w["bucket"], w["strategy"]): w["rewards"] for w in state["windows"]}
        self._seed = state["seed"]
        self._draws = state["draws"]
        for key, rewards in self._rewards.items():
            rewards.clear()
            rewards.extend(windows.get(key, ()))

    def _bucket(self, batch_size: int) -> int:
        """Return i (from 0) with t_i ≤ batch_size < t_{i+1}; the last range is unbounded."""
        return bisect.bisect_right(self.config.thresholds, batch_size) - 1


def _by_bucket(
    strategies: Sequence[Strategy], config: TunerConfig
) -> tuple[tuple[Strategy, ...], ...]:
    """Return the candidates of each range, grouped by `verify_tokens` in descending order.

    Plain decoding is a candidate in every range (our addition). If there is one threshold more than
    other groups, the last range has only plain decoding, as in TLT's elastic activation
    (section 5.1).
    """
    sizes = {s.verify_tokens for s in strategies}
    plain = tuple(s for s in strategies if not s.verify_tokens)
    if plain and len(sizes) != len(config.thresholds):
        sizes.discard(0)  # plain decoding has no separate range
    return tuple(
        tuple(s for s in strategies if s.verify_tokens == size or s in plain)
        for size in sorted(sizes, reverse=True)
    )


PLAIN = Strategy("plain", (), 0, 0, 0)


def strategies(
    config: TunerConfig, sources: Sequence[str], top_k: int, deepest: Mapping[str, int]
) -> list[Strategy]:
    """Return the arms; `deepest` maps drafters on the devices of verifying workers to depths."""
    text_sources = tuple(s for s in sources if s not in deepest)
    together = [text_sources, tuple(sources)] if len(text_sources) > 1 else [tuple(sources)]
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
    """Return the numbers of nodes of rounds with `num_slots` slots, before rounding up."""
    low = _batch_size(1, num_slots)
    high = num_slots
    ends = (*config.thresholds[1:], high + 1)
    ranges = zip(config.thresholds, ends, config.verify_tokens, strict=False)
    reached = [tokens for first, end, tokens in ranges if first <= high and low < end]
    return {num_slots * (tokens + 1) for tokens in reached}


def _batch_size(num_requests: int, num_slots: int) -> int:
    """Return the batch size that a round counts as; its bucket of slots sets its cost."""
    return max(num_requests, num_slots // 2 + 1)


def make_bandit(
    config: TunerConfig, sources: Sequence[str], top_k: int, deepest: Mapping[str, int], seed: int
) -> BegMab:
    """Return the bandit of a worker, which lives as long as the run."""
    return BegMab(strategies(config, sources, top_k, deepest), config, seed)


class BanditBudget(Budget):
    """The budget of one rollout, chosen by a bandit that keeps learning across rollouts.

    The bandit ignores rounds with cached responses, which are decided by measured seconds. It also
    ignores requests that `is_copy` matches, or that draft tokens of another copy. `on_device` names
    the drafters that take device time, at the depth of the arm.
    """

    def __init__(
        self,
        bandit: BegMab,
        times: RoundTimes,
        union: DrafterUnion,
        on_device: Collection[str] = (),
        is_copy: Callable[[int], bool] = lambda request_id: False,
    ) -> None:
        self._bandit = bandit
        self._times = times
        self._union = union
        self._on_device = frozenset(on_device)
        self._is_copy = is_copy
        self._strategy = PLAIN
        self._size = 1
        self._is_mixed = False
        self._bucket = (0, 0)
        self._batch = 1  # (slots, positions), requests
        self._live_tokens = 0.0  # mean per live request

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        self._bucket = (num_slots, num_positions)
        self._batch = _batch_size(len(live), num_slots)
        self._live_tokens = float(live.total_tokens_A.mean())
        self._strategy = strategy = self._bandit.select(self._batch)
        if strategy == PLAIN:  # its reward is known in advance
            self._record(np.zeros(len(live)), num_slots)
        for name in self._on_device & set(strategy.sources):
            cast(RoundsDrafter, self._union.named(name)).depth = strategy.depth
        return frozenset(self._union.names) - frozenset(strategy.sources)

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._strategy.verify_tokens, np.int32)

    def choose_on_device(
        self, live: LiveSlots, max_tokens: int, sizes: Sizes, num_slots: int
    ) -> DraftDecision | None:
        decision = equal_trees(self._strategy.verify_tokens, sizes, num_slots)
        self._is_mixed = False
        if decision is not None:
            self._size = decision.num_nodes
        return decision

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        # enough nodes for any strategy of the range: only one size per range is compiled
        self._is_mixed = bool(drafts.cached_A.any())
        max_tokens = max(s.verify_tokens for s in self._bandit.candidates(self._batch))
        if not self._is_mixed:
            max_tokens = self._strategy.verify_tokens
        wanted = num_slots * (max_tokens + 1)
        self._size = next((m for m in sizes if m >= wanted), max(sizes, default=num_slots))
        taken_A = best(drafts, np.ones(len(live)), num_slots, self._size)
        if not taken_A.any() or (self._is_mixed and not self._pays(drafts, taken_A)):
            self._size = num_slots
            return plain(num_slots)
        return DraftDecision(self._size, taken_A)

    def _pays(self, drafts: Drafts, taken_A: np.ndarray) -> bool:
        """Return whether a round that continues cached responses pays; no arm drafted these."""
        num_slots, num_positions = self._bucket
        plain_s = self._times(num_slots, num_slots, num_positions, self._live_tokens)
        round_s = self._times(num_slots, self._size, num_positions, self._live_tokens)
        if plain_s is None or round_s is None:
            return True
        taken_AN = np.arange(drafts.max_nodes) < taken_A[:, None]
        accepted = float(drafts.prob_AN[taken_AN].sum())  # expected count
        return (len(taken_A) + accepted) / round_s > len(taken_A) / plain_s

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        if self._is_mixed:  # the arm did not choose this round
            return
        copies = [self._is_copy(r) for r in live.request_ids_A.tolist()]
        own_A = ~np.array(copies, bool) & (drafts.sources_AN[:, 0] != Source.COPY)
        verified = acceptance.verified
        accepted_A = acceptance.accepted_AN.sum(axis=1) if verified else np.zeros(len(live))
        if own_A.any():
            self._record(accepted_A[own_A], self._size)

    def _record(self, accepted_A: np.ndarray, num_nodes: int) -> None:
        num_slots, num_positions = self._bucket
        strategy = self._strategy
        round_s = self._times(num_slots, num_nodes, num_positions, self._live_tokens)
        if round_s is not None:  # buckets without measured seconds are not recorded
            for name in self._on_device & set(strategy.sources):
                round_s += self._times.draft(name, num_slots, strategy.depth, num_positions)
            mean_accepted = float(accepted_A.mean())
            self._bandit.record(strategy, round_s, [mean_accepted] * self._batch, self._batch)
