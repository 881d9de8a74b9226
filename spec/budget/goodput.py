"""The budget that buys the most tokens per second, by a table of measured round times.

A round of M nodes costs what the table says; it brings each request one token and its accepted
draft tokens. A = live requests, B = slots, M = nodes of a round, S = cache positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec.acceptance import sums
from spec.budget.budget import (
    Budget,
    DraftDecision,
    PlainSpell,
    best_by_size,
    best_trees,
)
from spec.budget.device_gate import DeviceDraftGate
from spec.drafter import Acceptance, Drafts, LiveSlots
from spec.per_request import PerRequest, RequestIndex
from spec.round_times import RoundTimes

BETTER = 1.03  # a mode is left only for one that promises this much more
DECAY, ALL_DECAY = 0.9, 0.99  # of the acceptance counts of a request, and of all, a round
REFUSED_ROUNDS = 16, 256  # shortest and longest time until refused drafts are asked for again
REPEATS = 8  # fetches of rounds that draft on the device, before drafts are looked at again,
MOST_OF_THEM = 0.75  # and the share of the requests that have to be there
PRIOR_NODES = 2.0  # expected draft tokens that the prior of a request weighs


class Goodput(Budget):
    """Takes the best draft tokens of all requests, as many as bring the most tokens a second.

    tokens(M) = A + Σ s_a probability of the M − B best
    M = argmax tokens(M) / seconds(B, M, S)

    The best are those of `spec.budget.budget.best`. `s_a` is the ratio of accepted to expected
    draft tokens of a request so far, shrunk towards that of all requests; draft tokens that were
    not verified are compared with what was then drawn. Cached responses have a factor of 1. A
    mode is left only for one that promises `BETTER`. Drafts cost the host's time: while plain
    decoding wins, they are asked for after a `PlainSpell`.
    """

    def __init__(self, times: RoundTimes) -> None:
        self._times = times
        index = RequestIndex()
        self._accepted, self._expected = PerRequest(index, 0.0), PerRequest(index, 0.0)
        self._all_accepted = self._all_expected = 0.0
        self._speculating = False
        self._repeats = 0  # fetches to come of rounds that draft on the device
        self._chosen = 0, 0, 0  # slots and nodes of their rounds, and the requests at that time
        self._refused = PlainSpell(index, *REFUSED_ROUNDS)
        self._gate = DeviceDraftGate()

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        return self._gate.skips()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        lasts = self._refused.lasts(live, num_slots)
        return np.full(len(live), 0 if lasts else 2**30, np.int32)

    def scale(self, live: LiveSlots) -> np.ndarray:
        """s_a = (accepted + prior · s) / (expected + prior), with s that of all requests."""
        overall = (self._all_accepted + PRIOR_NODES) / (self._all_expected + PRIOR_NODES)
        accepted_A, expected_A = self._accepted.get(live), self._expected.get(live)
        return (accepted_A + PRIOR_NODES * overall) / (expected_A + PRIOR_NODES)

    def unseen(
        self, live: LiveSlots, most_tokens: int, sizes: Sequence[int], num_slots: int
    ) -> DraftDecision | None:
        """Repeat what was chosen last, some fetches long and while most requests are there."""
        slots, num_nodes, requests = self._chosen
        if not self._repeats or num_slots != slots or len(live) < MOST_OF_THEM * requests:
            return None
        self._repeats -= 1
        return best_trees(num_nodes, num_slots, most_tokens, self.scale(live))

    def choose(
        self,
        live: LiveSlots,
        drafts: Drafts,
        sizes: Sequence[int],
        num_slots: int,
        num_positions: int,
    ) -> DraftDecision:
        plain_s = self._times(num_slots, num_slots, num_positions)
        if plain_s is None:
            raise KeyError(
                f"no measured time of a plain round of {num_slots} slots and {num_positions} "
                "positions: measure the engine's rounds (rl.warm_up.round_times) before the rollout"
            )
        scale_A, self._repeats = self.scale(live), 0
        scale_A[drafts.cached_A] = 1.0  # the share that is kept is no drafter's acceptance
        seconds = {num_slots: plain_s}
        for size in sizes if drafts.count_A.any() else ():
            round_s = self._times(num_slots, size, num_positions)
            if round_s is not None:
                seconds[size] = round_s
        taken_SA, accepted_S = best_by_size(drafts, scale_A, num_slots, list(seconds))
        rate_S = (1 + accepted_S / len(live)) * plain_s / np.fromiter(seconds.values(), float)
        s = int(rate_S.argmax())
        best, best_rate, taken_A = list(seconds)[s], float(rate_S[s]), taken_SA[s]
        bucket = num_slots, best, num_positions
        self._gate.observe(self._times, live, drafts, taken_A, scale_A, bucket)
        self._speculating = best > num_slots and (self._speculating or best_rate > BETTER)
        if self._speculating:
            self._refused.end()
            self._repeats, self._chosen = REPEATS, (num_slots, best, len(live))
            return DraftDecision(best, taken_A)
        return self._refused.begin(live, num_slots)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        accepted_A, expected_A = sums(drafts, acceptance)
        self._accepted.set(live, DECAY * self._accepted.get(live) + accepted_A)
        self._expected.set(live, DECAY * self._expected.get(live) + expected_A)
        self._all_accepted = ALL_DECAY * self._all_accepted + float(accepted_A.sum())
        self._all_expected = ALL_DECAY * self._all_expected + float(expected_A.sum())
