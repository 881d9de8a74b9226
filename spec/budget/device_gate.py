"""Drafters that draft on the device, and the gate that asks them only where it pays.

Other drafters read texts on the host while the device is at work; these take device time.
A = live requests, N = draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from spec.budget.budget import Backoff
from spec.budget.config import LEARNED, MODEL
from spec.drafter import Drafter, Drafts, LiveSlots, Program, RoundsDrafter, Source
from spec.round_times import RoundTimes

DEVICE_SOURCES = {LEARNED: Source.LEARNED, MODEL: Source.MODEL}


class DeviceDrafter(Drafter, RoundsDrafter, Protocol):
    """A drafter whose seconds grow with its depth.

    That is the most draft tokens on a path; it may be set between two rounds.
    """

    def programs(self, num_slots: int, num_positions: int) -> Iterator[Program]:
        """Yield the jitted steps for an engine in this bucket, and makers of their arguments."""
        ...


class DeviceDraftGate:
    """Compares a round with a drafter's draft tokens to one without them, by tokens a second.

        (A + Σ s_a probability) / (round + drafts)
            against   (A + Σ s_a probability of others) / (round + drafts of others)

    A draft token that others have too, with a lower probability, counts as the drafter's. After a
    round for which it did not pay it is left out for a `Backoff`.
    """

    def __init__(self) -> None:
        self._waits = {name: Backoff() for name in DEVICE_SOURCES}
        self._left = dict.fromkeys(DEVICE_SOURCES, 0)  # rounds of the present wait

    def skips(self) -> frozenset[str]:
        """Return the drafters to leave out of the round that begins now."""
        self._left = {name: max(left - 1, 0) for name, left in self._left.items()}
        return frozenset(name for name, left in self._left.items() if left)

    def observe(
        self,
        times: RoundTimes,
        live: LiveSlots,
        drafts: Drafts,
        taken_A: np.ndarray,
        scale_A: np.ndarray,
        bucket: tuple[int, int, int],
    ) -> None:
        """Compare for a round of this (slots, nodes, positions), with the draft tokens taken."""
        num_slots, _, num_positions = bucket
        depths_of = {name: times.draft_depths(name) for name in DEVICE_SOURCES}
        round_s = times(*bucket)
        if round_s is None or not any(depths_of.values()):
            return
        taken_AN = np.arange(drafts.max_nodes) < taken_A[:, None]
        worth_AN = np.where(taken_AN, drafts.prob_AN, 0.0) * scale_A[:, None]
        draft_s, own_worth = dict[str, float](), dict[str, float]()
        for name, source in DEVICE_SOURCES.items():
            own_AN, depths = drafts.sources_AN == source, depths_of[name]
            if depths and not self._left[name] and (own_AN & taken_AN).any():
                draft_s[name] = times.draft(name, num_slots, depths[-1], num_positions)
                own_worth[name] = float(worth_AN[own_AN].sum())
        all_s, tokens = round_s + sum(draft_s.values()), len(live) + float(worth_AN.sum())
        for name in draft_s:
            if tokens / all_s >= (tokens - own_worth[name]) / (all_s - draft_s[name]):
                self._waits[name] = Backoff()
            else:
                self._left[name] = self._waits[name].lengthen()
