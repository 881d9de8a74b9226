"""When a learned drafter is asked beside the others: where its guesses pay for its seconds."""

from __future__ import annotations

import numpy as np

from spec.drafter import Drafts, LiveSlots, Source
from spec.round_seconds import RoundTimes

LEARNED = "learned"  # its name among the drafters
SHORTEST_WAIT, LONGEST_WAIT = 8, 64  # rounds


class LearnedTurns:
    """Compares a round with the learned drafter's guesses to one without, by tokens a second.

        (A + Σ s_a chance) / (round + draft)   against   (A + Σ s_a chance of others) / round

    A guess that others have too, with a lower chance, counts as the learned drafter's. After a
    round that it did not pay for it is left out for 8, 16, … `LONGEST_WAIT` rounds.
    """

    def __init__(self) -> None:
        self._wait = self._left = 0

    def skips(self) -> frozenset[str]:
        """Counts as a round."""
        self._left = max(self._left - 1, 0)
        return frozenset([LEARNED]) if self._left else frozenset()

    def judge(
        self,
        times: RoundTimes,
        live: LiveSlots,
        drafts: Drafts,
        scale_A: np.ndarray,
        bucket: tuple[int, int, int],
    ) -> None:
        """What a round of this (slots, nodes, positions) and its guesses say."""
        num_slots, num_nodes, num_positions = bucket
        round_s, depths = times(*bucket), times.draft_depths
        learned_AN = drafts.sources_AN == Source.LEARNED
        real_AN = np.arange(drafts.max_nodes) < np.minimum(drafts.count_A, num_nodes - 1)[:, None]
        if self._left or not depths or round_s is None or not (learned_AN & real_AN).any():
            return
        worth_AN = np.where(real_AN, drafts.chance_AN, 0.0) * scale_A[:, None]
        others = float(worth_AN[~learned_AN].sum())
        draft_s = times.draft(num_slots, depths[-1], num_positions)
        with_it = (len(live) + float(worth_AN.sum())) / (round_s + draft_s)
        if with_it >= (len(live) + others) / round_s:
            self._wait = 0
            return
        self._wait = min(max(2 * self._wait, SHORTEST_WAIT), LONGEST_WAIT)
        self._left = self._wait
