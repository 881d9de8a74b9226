"""The bandit as a budget: which drafters are asked, how deep they search, how much is verified.

A round's reward is tokens a second, its seconds those of the measured table: unlike the paper's
they do not come from the clock, so that decisions are a function of the tokens and of that
table, and a resumed run decides as the first one did. Source: TLT sections 5.2 and 5.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec.bandit import BanditConfig, BegMab, Strategy
from spec.budget import Decision, OnHost, size_for
from spec.drafter import Drafts, LiveSlots
from spec.eagle_drafter import EagleDrafter
from spec.learned_turns import LEARNED
from spec.merge import Union
from spec.outcome import Outcome
from spec.round_seconds import RoundTimes

PLAIN = Strategy("plain", (), 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class TunerConfig:
    """What `Speculation.budget = "bandit"` chooses among, and how.

    Range i of batch sizes begins with `thresholds[i]` and verifies `verify_tokens[i]` guesses a
    request; a last threshold without such has plain decoding alone. In each range the arms are
    every drafter by itself, all that look guesses up, all of them, and plain decoding; with a
    learned drafter once for each of its `depths`. With chance `epsilon` any of them is taken, else
    the one with the best median of its last `window` rewards.
    """

    thresholds: tuple[int, ...] = (1, 9, 33)
    verify_tokens: tuple[int, ...] = (15, 7)
    depths: tuple[int, ...] = (3, 6)
    epsilon: float = 0.1
    window: int = 32

    def __post_init__(self) -> None:
        BanditConfig(self.thresholds, self.epsilon, self.window, everywhere=True)
        descends = all(
            a > b for a, b in zip(self.verify_tokens, self.verify_tokens[1:], strict=False)
        )
        if not self.verify_tokens or min(self.verify_tokens) < 1 or not descends:
            raise ValueError(f"expected verify_tokens that descend, got {self.verify_tokens}")
        if len(self.thresholds) - len(self.verify_tokens) not in (0, 1):
            raise ValueError(
                f"expected a threshold for each of verify_tokens, and at most one more, got "
                f"{self.thresholds} and {self.verify_tokens}"
            )
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"expected depths of at least 1, got {self.depths}")


def strategies(config: TunerConfig, sources: Sequence[str], top_k: int) -> list[Strategy]:
    """The arms for these drafters."""
    found = tuple(s for s in sources if s != LEARNED)
    together = [found, tuple(sources)] if len(found) > 1 else [tuple(sources)]
    choices = list(dict.fromkeys([*((s,) for s in sources), *together]))
    arms = [PLAIN]
    for tokens in config.verify_tokens:
        for chosen in choices:
            learns = LEARNED in chosen
            for depth in config.depths if learns else (0,):
                name = "+".join(chosen) + (f" depth {depth}" if learns else "") + f" × {tokens}"
                arms.append(Strategy(name, chosen, depth, top_k if learns else 0, tokens))
    return arms


def make_bandit(config: TunerConfig, sources: Sequence[str], top_k: int, seed: int) -> BegMab:
    """A worker's tuner; it lives as long as the run."""
    bandit = BanditConfig(config.thresholds, config.epsilon, config.window, everywhere=True)
    return BegMab(strategies(config, sources, top_k), bandit, seed)


class Tuned(OnHost):
    """One phase's budget by a bandit that goes on from phase to phase."""

    def __init__(self, bandit: BegMab, times: RoundTimes, union: Union) -> None:
        self._bandit, self._times, self._union = bandit, times, union
        self._strategy, self._size = PLAIN, 1
        self._bucket = (0, 0)  # slots, positions

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        self._bucket = num_slots, num_positions
        strategy = self._strategy = self._bandit.select(len(live))
        if not strategy.verify_tokens:  # what it brings is known
            self._record(np.zeros(len(live)), 1)
        learned = self._union.named(LEARNED)
        if isinstance(learned, EagleDrafter) and strategy.depth:
            learned.depth = strategy.depth
        return frozenset(self._union.names) - frozenset(strategy.sources)

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        return np.full(len(live), self._strategy.verify_tokens, np.int32)

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> Decision:
        self._size = size_for(int(drafts.count_A.max(initial=0)), sizes)
        return Decision(self._size)

    def observe(self, live: LiveSlots, drafts: Drafts, outcome: Outcome) -> None:
        accepted_A = outcome.right_AN.sum(axis=1) if outcome.tried else np.zeros(len(live))
        self._record(accepted_A, self._size)

    def _record(self, accepted_A: np.ndarray, num_nodes: int) -> None:
        (num_slots, num_positions), strategy = self._bucket, self._strategy
        round_s = self._times(num_slots, num_nodes, num_positions)
        if round_s is None:  # a bucket that was not measured teaches nothing
            return
        if LEARNED in strategy.sources:
            round_s += self._times.draft(num_slots, strategy.depth, num_positions)
        self._bandit.record(strategy, round_s, accepted_A.tolist(), len(accepted_A))
