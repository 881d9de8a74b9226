"""HistoSpec's draft windows: additive increase, reset on a rejection (RhymeRL, section 5.4).

A = live requests.
"""

from __future__ import annotations

import numpy as np

from reprise.spec.budget.budget import Budget, DraftDecision, PlainSpell, Sizes, all_that_fit
from reprise.spec.drafter import (
    Acceptance,
    Drafts,
    LiveSlots,
    PerRequest,
    RequestIndex,
    longest_paths,
)
from reprise.spec.round_times import RoundTimes

START_TOKENS = 2
STEP_TOKENS = 2
MAX_TOKENS = 32  # first window, step, largest window
DECAY = 0.9  # per round, of the mean tokens per request
CLOSED_ROUNDS = 32, 256  # min and max rounds before a closed gate checks again


def next_windows(window_A: np.ndarray, longest_A: np.ndarray, accepted_A: np.ndarray) -> np.ndarray:
    """Return the windows after a round, a step larger if the whole longest path was accepted.

    Otherwise the window resets.
    """
    grown_A = np.minimum(window_A + STEP_TOKENS, MAX_TOKENS)
    changed_A = np.where(accepted_A >= longest_A, grown_A, START_TOKENS)
    return np.where(longest_A > 0, changed_A, window_A)


class Aimd(Budget):
    """HistoSpec's windows and its gate on the batch size (RhymeRL, section 5.4).

    A window limits the draft tokens of a request. A tree (the paper uses chains) counts as accepted
    if its longest path is accepted. The gate switches to plain rounds if, by the measured times and
    the acceptance so far, trees yield fewer tokens per second. A closed gate requests no drafts
    until it checks again; it then compares refused drafts with the tokens drawn instead.
    """

    def __init__(self, times: RoundTimes | None = None) -> None:
        self._times = times
        index = RequestIndex()
        self._windows = PerRequest(index, START_TOKENS)
        self._tokens_per_request = 0.0  # per round with drafts, a decayed mean
        self._closed = PlainSpell(index, *CLOSED_ROUNDS)

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        if self._closed.lasts(live, num_slots):
            return np.zeros(len(live), np.int32)
        return self._windows.get(live).astype(np.int32)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        decision = all_that_fit(drafts, sizes, num_slots)
        bucket = num_slots, decision.num_nodes, num_positions
        live_tokens = float(live.total_tokens_A.mean())
        if decision.taken_A is not None and not self._pays(drafts, bucket, live_tokens):
            return self._closed.begin(live, num_slots)
        self._closed.end()
        return decision

    def _pays(self, drafts: Drafts, bucket: tuple[int, int, int], live_tokens: float) -> bool:
        """Return whether the round should yield more tokens per second than plain rounds."""
        if self._times is None or not self._tokens_per_request:
            return True
        num_slots, _, num_positions = bucket
        plain_s = self._times(num_slots, num_slots, num_positions, live_tokens)
        round_s = self._times(*bucket, live_tokens)
        # windows do not limit chains that continue cached responses
        expected_A = 1 + drafts.prob_AN.sum(axis=1)
        tokens = np.where(drafts.cached_A, expected_A, self._tokens_per_request).mean()
        return plain_s is None or round_s is None or round_s < tokens * plain_s

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        accepted_A = acceptance.accepted_AN.sum(axis=1)
        if acceptance.verified:
            max_length_A = longest_paths(drafts, acceptance.observed_AN)
            before_A = self._windows.get(live)
            windows_A = next_windows(before_A, max_length_A, accepted_A)
            self._windows.set(live, windows_A)
        elif not drafts.count_A.any():
            return
        mean = 1.0 + float(accepted_A.mean())
        old = self._tokens_per_request or mean
        self._tokens_per_request = DECAY * old + (1 - DECAY) * mean
