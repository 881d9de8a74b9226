"""BEG-MAB: a bandit that chooses how the next round drafts, from the rewards of past rounds.

Strategies are grouped by the number of draft tokens that they verify; each group serves one range
of batch sizes, many draft tokens where few requests are left. Within the range, ε-greedy over the
median reward of a sliding window. Source: TLT, section 5.2, Algorithm 1.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec.budget.config import BanditConfig

_WORDS = 2**64  # of the counter between two draws, so that draws never overlap


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One arm: the drafters that are asked, their depth and width, and the tokens to verify.

    Without `sources` nothing is drafted and `verify_tokens` is 0: plain decoding.
    """

    name: str
    sources: tuple[str, ...]
    depth: int
    top_k: int
    verify_tokens: int

    def __post_init__(self) -> None:
        assert min(self.depth, self.top_k, self.verify_tokens) >= 0, (
            f"strategy {self.name!r}: expected depth, top_k and verify_tokens of at least 0, "
            f"got {self.depth}, {self.top_k} and {self.verify_tokens}"
        )
        assert bool(self.sources) == bool(self.verify_tokens), (
            f"strategy {self.name!r}: expected sources and verify_tokens, or neither for plain "
            f"decoding, got {self.sources} and {self.verify_tokens}"
        )


class BegMab:
    """Algorithm 1, with windows of rewards for each strategy and range.

    Only `everywhere` arms have other windows than in the paper: all others serve one range. The
    paper does not define the median of an empty window; here a candidate without a reward in this
    range is taken first, in the order of `strategies`. Decisions are a function of the seed, the
    draws so far and the recorded rounds.
    """

    def __init__(self, strategies: Sequence[Strategy], config: BanditConfig, seed: int) -> None:
        """Raises ValueError where thresholds and groups differ in number."""
        names = [s.name for s in strategies]
        assert len(set(names)) == len(names), f"expected strategies of different names, got {names}"
        self.config = config
        self._candidates = _by_bucket(strategies, config)  # S_i of bucket i
        self._seed, self._draws = seed, 0
        self._num_chosen = collections.Counter[str]()  # by name, since `take_chosen`
        # R_s: tokens a second of the batch
        self._rewards = {
            (bucket, s.name): collections.deque[float](maxlen=config.window)
            for bucket, candidates in enumerate(self._candidates)
            for s in candidates
        }

    def candidates(self, batch_size: int) -> tuple[Strategy, ...]:
        """Return V, the strategies for this many requests."""
        return self._candidates[self._bucket(batch_size)]

    def select(self, batch_size: int) -> Strategy:
        """Choose the strategy of the next round of `batch_size` requests."""
        chosen = self._select(batch_size)
        self._num_chosen[chosen.name] += 1
        return chosen

    def _select(self, batch_size: int) -> Strategy:
        candidates = self.candidates(batch_size)
        bucket = self._bucket(batch_size)
        untried = [s for s in candidates if not self._rewards[bucket, s.name]]
        if len(candidates) == 1 or untried:
            return (untried or candidates)[0]
        # a generator for each draw, so that the state is a number
        bits = np.random.Philox(key=self._seed, counter=self._draws * _WORDS)
        self._draws += 1
        rng = np.random.Generator(bits)
        if rng.random() < self.config.epsilon:
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
        """Record a round: its reward is (Σ accept_lens + batch_size) / elapsed_s, tokens a second.

        `accept_lens` are the accepted draft tokens by request (0 for plain decoding), `batch_size`
        is that of `select`.
        """
        assert strategy in self.candidates(batch_size), (
            f"expected one of {[s.name for s in self.candidates(batch_size)]} for {batch_size} "
            f"requests, got {strategy.name!r}: record the batch size that it was selected for"
        )
        assert elapsed_s > 0, f"expected elapsed_s above 0, got {elapsed_s}"
        tokens = float(np.sum(accept_lens)) + batch_size
        rewards = self._rewards[self._bucket(batch_size), strategy.name]
        rewards.append(tokens / float(elapsed_s))

    def median_reward(self, strategy: Strategy, batch_size: int) -> float | None:
        """Return the median tokens per second in this range's window; None if it is empty."""
        rewards = self._rewards[self._bucket(batch_size), strategy.name]
        return statistics.median(rewards) if rewards else None

    def best(self, batch_size: int) -> Strategy | None:
        """Return the candidate of the largest median reward; None before any round."""
        medians = [(self.median_reward(s, batch_size), s) for s in self.candidates(batch_size)]
        known = [(median, s) for median, s in medians if median is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    def take_chosen(self) -> collections.Counter[str]:
        """Return how often each strategy was chosen since the last call, by name."""
        chosen, self._num_chosen = self._num_chosen, collections.Counter()
        return chosen

    def rewards(self) -> dict[str, list[float]]:
        """Return the rewards in the windows of all ranges, by name, of those that have some."""
        found = dict[str, list[float]]()
        for (_, name), rewards in self._rewards.items():
            if rewards:
                found.setdefault(name, []).extend(rewards)
        return found

    def state(self) -> dict[str, Any]:
        """Return plain data, from which later decisions are the same."""
        windows = [
            {"bucket": bucket, "strategy": name, "rewards": list(rewards)}
            for (bucket, name), rewards in self._rewards.items()
        ]
        return {"seed": self._seed, "draws": self._draws, "windows": windows}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned: strategies that it does not have are untried."""
        found = {(w["bucket"], w["strategy"]): w["rewards"] for w in state["windows"]}
        self._seed, self._draws = state["seed"], state["draws"]
        for key, rewards in self._rewards.items():
            rewards.clear()
            rewards.extend(found.get(key, ()))

    def _bucket(self, batch_size: int) -> int:
        """Return i with batch_size in B_i = [t_i, t_{i+1} − 1], the last without an end; from 0."""
        assert batch_size >= 1, f"expected a batch of at least 1 request, got {batch_size}"
        return bisect.bisect_right(self.config.thresholds, batch_size) - 1


def _by_bucket(
    strategies: Sequence[Strategy], config: BanditConfig
) -> tuple[tuple[Strategy, ...], ...]:
    """Return the candidates of each range: groups by `verify_tokens`, the most first."""
    sizes = {s.verify_tokens for s in strategies}
    plain = tuple(s for s in strategies if not s.verify_tokens) if config.everywhere else ()
    if plain and len(sizes) != len(config.thresholds):
        sizes.discard(0)  # it has no range of its own
    groups = [
        tuple(s for s in strategies if s.verify_tokens == size or s in plain)
        for size in sorted(sizes, reverse=True)
    ]
    if len(groups) != len(config.thresholds):
        raise ValueError(
            "expected as many thresholds as groups of strategies by verify_tokens, got thresholds "
            f"{config.thresholds} and verify_tokens {sorted(sizes, reverse=True)}"
        )
    return tuple(groups)
