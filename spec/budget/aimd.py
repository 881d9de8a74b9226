"""HistoSpec's draft windows: additive increase, reset on a rejection (RhymeRL, section 5.4).

A = live requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec.acceptance import longest_paths
from spec.budget.budget import Budget, DraftDecision, all_that_fit, plain
from spec.drafter import Acceptance, Drafts, LiveSlots
from spec.per_request import PerRequest, RequestIndex
from spec.round_times import RoundTimes

START_TOKENS, STEP_TOKENS, MOST_TOKENS = 2, 2, 32  # of windows
DECAY = 0.9  # of the mean tokens a request, a round


def next_windows(window_A: np.ndarray, longest_A: np.ndarray, accepted_A: np.ndarray) -> np.ndarray:
    """Return the windows after a round: one step more if the whole longest path was accepted.

    Otherwise the window starts again. A request without draft tokens keeps its window.
    """
    grown_A = np.minimum(window_A + STEP_TOKENS, MOST_TOKENS)
    changed_A = np.where(accepted_A >= longest_A, grown_A, START_TOKENS)
    return np.where(longest_A > 0, changed_A, window_A)


class Aimd(Budget):
    """HistoSpec's windows, with its gate on the batch size (RhymeRL, section 5.4).

    A window is the most draft tokens of a request. The paper drafts chains; a tree of other
    drafters counts as accepted if its longest path is. A round is plain where the table says
    that, at the acceptance seen so far, trees of the wanted size bring fewer tokens per second.
    Every `PROBE` rounds the gate opens once, to observe the acceptance again.
    """

    PROBE = 32

    def __init__(self, times: RoundTimes | None = None) -> None:
        self._times = times
        self._windows = PerRequest(RequestIndex(), START_TOKENS)
        self._tokens_per_request = 0.0  # of a round of trees, decayed mean
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
        all_of_them = all_that_fit(drafts, sizes, num_slots)
        if self._times is None or all_of_them.taken_A is None or not self._tokens_per_request:
            return all_of_them
        plain_s = self._times(num_slots, num_slots, num_positions)
        round_s = self._times(num_slots, all_of_them.num_nodes, num_positions)
        # of cached responses that go on windows say nothing
        expected_A = 1 + drafts.prob_AN.sum(axis=1)
        tokens = np.where(drafts.cached_A, expected_A, self._tokens_per_request).mean()
        if plain_s is None or round_s is None or round_s < tokens * plain_s:
            self._closed = 0
            return all_of_them
        self._closed += 1
        return plain(num_slots) if self._closed % self.PROBE else all_of_them

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        if not acceptance.verified:
            return
        longest_A = longest_paths(drafts, acceptance.observed_AN)
        accepted_A = acceptance.accepted_AN.sum(axis=1)
        windows_A = next_windows(self._windows.get(live), longest_A, accepted_A)
        self._windows.set(live, windows_A)
        mean = 1.0 + float(accepted_A.mean())
        old = self._tokens_per_request or mean
        self._tokens_per_request = DECAY * old + (1 - DECAY) * mean
