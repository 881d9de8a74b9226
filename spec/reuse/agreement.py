"""The expected agreement of cached responses with new ones, when noise repeats from epoch to epoch.

A token differs from the cached one with a miss rate h. It is estimated from the last agreement of
responses with those before them: the sample's, its siblings', the run's, each shrunk towards the
next.

    h = (differing tokens + PRIOR · h of the next) / (decided tokens + PRIOR)

The rates are functions of tokens alone, so that a resumed run estimates alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FIRST_RATE = 0.1  # without any evidence
PRIOR_TOKENS = 32.0  # decided tokens that the prior of a rate weighs
PRIOR_MISSES = 2.0  # expected misses that the prior of a correction weighs


class Agreement(NamedTuple):
    """Cached tokens that were drawn again, and how many were decided on: one more that differs."""

    kept_tokens: int
    decided_tokens: int


def agreement(cached_T: np.ndarray, drawn_T: np.ndarray) -> Agreement:
    """Compare a cached response with the one that replaced it."""
    n = min(len(cached_T), len(drawn_T))
    differs_T = np.append(cached_T[:n] != drawn_T[:n], True)
    kept = int(differs_T.argmax())
    return Agreement(kept, kept + (kept < n))


def miss_rate(counts: Sequence[Agreement], prior: float) -> float:
    """Return the share of decided tokens that differed, shrunk towards a prior rate."""
    kept, decided = (float(sum(some)) for some in zip(*counts, strict=True)) if counts else (0, 0)
    return (decided - kept + PRIOR_TOKENS * prior) / (decided + PRIOR_TOKENS)


def miss_rates(last: Mapping[int, Agreement], of_run: float) -> dict[int, float]:
    """Return the rate of each sample of a group, given the last agreement of its responses."""
    of_group = miss_rate(list(last.values()), of_run)
    return {sample: miss_rate([one], of_group) for sample, one in last.items()}


class RunMisses:
    """The miss rate of a run's last steps."""

    DECAY = 0.7  # of earlier steps, a step

    def __init__(self, different: float = 0.0, decided: float = 0.0) -> None:
        self.different, self.decided = different, decided

    def played(self, counts: Sequence[Agreement]) -> None:
        """Add the responses of a step."""
        decided = sum(c.decided_tokens for c in counts)
        different = decided - sum(c.kept_tokens for c in counts)
        self.different = self.DECAY * self.different + different
        self.decided = self.DECAY * self.decided + decided

    @property
    def rate(self) -> float:
        prior = PRIOR_TOKENS * FIRST_RATE
        return (self.different + prior) / (self.decided + PRIOR_TOKENS)


class Correction:
    """Corrects the expected rates of a rollout by its tokens so far.

    factor = (differing tokens + prior) / (expected differing tokens + prior)
    """

    def __init__(self) -> None:
        self._different = self._expected = 0.0

    def observe(self, different: float, expected: float) -> None:
        self._different += different
        self._expected += expected

    @property
    def factor(self) -> float:
        return (self._different + PRIOR_MISSES) / (self._expected + PRIOR_MISSES)


def expected_tokens(rate: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return the tokens that verifying the next `num_tokens` cached ones brings.

        1 + (1 − h) + … + (1 − h)^(n − 1) = (1 − (1 − h)^n) / h

    The draw in place of the first token that differs counts.
    """
    rate = np.clip(rate, 1e-6, 1.0)
    return (1 - (1 - rate) ** num_tokens) / rate
