"""The expected agreement of cached and new responses when noise repeats from epoch to epoch.

A new token differs from the cached token with a miss rate h. The rate is estimated from the last
agreement of responses with their predecessors, at the level of a sample, of its group and of the
run. The rate of each level is shrunk towards the rate of the next level.

    h = (differing tokens + PRIOR · h of the next level) / (decided tokens + PRIOR)

The rates depend only on tokens, so that a resumed run computes the same estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FIRST_RATE = 0.1  # without any evidence
PRIOR_TOKENS = 32.0  # weight of the prior of a rate, in decided tokens
PRIOR_MISSES = 2.0  # weight of the prior of a correction, in expected misses


class Agreement(NamedTuple):
    """Counts of cached tokens: kept (drawn again), and decided (kept + 1 if a token differs)."""

    kept_tokens: int
    decided_tokens: int


def agreement(cached_T: np.ndarray, drawn_T: np.ndarray) -> Agreement:
    """Compare a cached response with its replacement."""
    n = min(len(cached_T), len(drawn_T))
    differs_T = np.append(cached_T[:n] != drawn_T[:n], True)
    kept = int(differs_T.argmax())
    return Agreement(kept, kept + (kept < n))


def miss_rate(counts: Sequence[Agreement], prior: float) -> float:
    """Return the share of decided tokens that differed, shrunk towards a prior rate."""
    kept, decided = (float(sum(some)) for some in zip(*counts, strict=True)) if counts else (0, 0)
    return (decided - kept + PRIOR_TOKENS * prior) / (decided + PRIOR_TOKENS)


def miss_rates(last: Mapping[int, Agreement], of_run: float) -> dict[int, float]:
    """Return the miss rate of each sample of a group, given the last agreement of each sample."""
    of_group = miss_rate(list(last.values()), of_run)
    return {sample: miss_rate([one], of_group) for sample, one in last.items()}


class RunMisses:
    """The miss rate over the last steps of a run."""

    DECAY = 0.7  # of earlier steps, per step

    def __init__(self, different: float = 0.0, decided: float = 0.0) -> None:
        self.different = different
        self.decided = decided

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
    """A correction of the expected miss rates of a rollout by its tokens so far.

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
    """Return the expected tokens from verifying the next `num_tokens` cached tokens.

        1 + (1 − h) + … + (1 − h)^(n − 1) = (1 − (1 − h)^n) / h

    This counts the draw that replaces the first differing token.
    """
    rate = np.clip(rate, 1e-6, 1.0)
    return (1 - (1 - rate) ** num_tokens) / rate
