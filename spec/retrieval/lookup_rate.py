"""What looking draft tokens up brings: an estimate from the calls and probes so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec.drafter import LiveSlots
from spec.per_request import PerRequest, RequestIndex
from spec.retrieval.device_lookup import LookupOutcome


class LookupRate:
    """How many tokens a round brings whose draft tokens the device looks up, in the mean of A
    requests.

    tokens(N) = 1 + mean_a Σ_{0<j<N} Π_{i≤j} min(1, h_i · h_a / h)

    with h_i = right / reached at place i of a chain (Kaplan and Meier's estimate), h_a the
    same of a request, h that of all. Each is drawn towards h, as if `PRIOR` draft tokens more had
    fared like the others; and h itself towards 0, at first: a few right draft tokens prove little.
    """

    FORGET = 0.8  # a call
    PRIOR = 4.0
    CAUTION = 8.0

    def __init__(self) -> None:
        index = RequestIndex()
        self._accepted, self._reached = PerRequest(index, 0.0), PerRequest(index, 0.0)
        self._accepted_J = self._reached_J = np.zeros(0)
        self._caution = self.CAUTION
        self.mean = 0.0  # h
        self._odds_J = np.zeros(0)  # h_i / h

    def observe(self, live: LiveSlots, acceptance: LookupOutcome) -> None:
        """What became of looked-up draft tokens; of a probe whose requests are gone that is
        nothing.
        """
        accepted_AJ, reached_AJ = acceptance.accepted_AJ, acceptance.reached_AJ
        if not reached_AJ.any():
            return
        self._accepted.set(live, self.FORGET * self._accepted.get(live) + accepted_AJ.sum(axis=1))
        self._reached.set(live, self.FORGET * self._reached.get(live) + reached_AJ.sum(axis=1))
        self._accepted_J = _add(self.FORGET * self._accepted_J, accepted_AJ.sum(axis=0))
        self._reached_J = _add(self.FORGET * self._reached_J, reached_AJ.sum(axis=0))
        self._caution *= self.FORGET
        self.mean = float(self._accepted_J.sum() / (self._reached_J.sum() + self._caution))
        if self.mean:
            relative_J = self._accepted_J / self.mean
            self._odds_J = (relative_J + self.PRIOR) / (self._reached_J + self.PRIOR)

    def tokens_per_round(self, live: LiveSlots, sizes: Sequence[int]) -> list[float]:
        """Of rounds of each of `sizes` nodes, ascending, for these requests."""
        prior, J = self.PRIOR * self.mean, sizes[-1] - 1
        own_A = (self._accepted.get(live) + prior) / (self._reached.get(live) + self.PRIOR)
        odds_J = np.ones(J)
        odds_J[: len(self._odds_J)] = self._odds_J[:J]
        prob_AJ = np.minimum(1.0, own_A[:, None] * odds_J)
        more_J = np.cumprod(prob_AJ, axis=1).sum(axis=0).cumsum() / len(live)
        return [1.0 + float(more_J[n - 2]) for n in sizes]


def _add(a_I: np.ndarray, b_J: np.ndarray) -> np.ndarray:
    """The sum, the shorter one filled up with zeros."""
    out = np.zeros(max(len(a_I), len(b_J)))
    out[: len(a_I)] = a_I
    out[: len(b_J)] += b_J
    return out
