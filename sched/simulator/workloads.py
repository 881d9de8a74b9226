"""Response lengths with the distribution that the papers describe.

    length = clip(exp(μ + σ·(√ρ·z_group + √(1−ρ)·z_response)), 1, limit)

ρ is the share of the variance of log-lengths between groups, and μ is fitted to the mean of the
drawn lengths. If the share q of responses that reach the limit is given, σ follows from the mean,
the limit and q: with Φ(x) = 1 − q,

    μ = log(limit) − σ·x,   mean = exp(μ + σ²/2) · Φ(x − σ) + limit · q
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from reprise.sched.request import RequestSpec


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of one rollout.

    With the default ρ, 16% of responses exceed the median of their prompt in the last epoch by at
    least one of eight ranks (RhymeRL, figure 9: math). The default σ was fitted to SpecActor's
    share of idle time.
    """

    num_groups: int
    """The number of prompts."""
    group_size: int
    """Responses to each prompt."""
    mean_tokens: float
    """The mean length of a response."""
    limit_tokens: int
    """The maximum length of a response."""
    prompt_tokens: int = 512
    """The length of each prompt."""
    sigma: float = 0.7
    """σ of the log-normal lengths; unused if `limit_share` is set."""
    group_share: float = 0.97
    """ρ, the share of the variance of log-lengths between prompts."""
    limit_share: float | None = None
    """q, the share of responses that reach the limit; None: by σ."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens < self.limit_tokens:
            raise ValueError(
                f"expected 1 <= mean_tokens < limit_tokens, got {self.mean_tokens}, "
                f"{self.limit_tokens}"
            )
        share = self.limit_share
        if share is not None and not 0 < share < self.mean_tokens / self.limit_tokens:
            raise ValueError(
                "expected 0 < limit_share < mean_tokens / limit_tokens, got "
                f"{share}, {self.mean_tokens} / {self.limit_tokens}"
            )
        if self.sigma < 0 or not 0 <= self.group_share <= 1:
            raise ValueError(
                "expected sigma >= 0 and group_share in 0 … 1, got "
                f"{self.sigma}, {self.group_share}"
            )


@functools.cache
def sigma_of(mean_tokens: float, limit_tokens: int, limit_share: float) -> float:
    """Return the σ for this mean length and this share of lengths at the limit."""
    normal = statistics.NormalDist()
    x = normal.inv_cdf(1 - limit_share)
    below = mean_tokens / limit_tokens - limit_share
    low = 0.0
    high = 20.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = math.exp(middle * (middle / 2 - x)) * normal.cdf(x - middle) > below
        low, high = (middle, high) if is_low else (low, middle)
    return high


def draw_lengths(workload: Workload, *, seed: int) -> np.ndarray:
    """Return the length of every response in tokens; int [groups, group size]."""
    return draw_epochs(workload, [workload.mean_tokens], seed=seed)[0]


def draw_epochs(workload: Workload, means: Sequence[float], *, seed: int) -> np.ndarray:
    """Return lengths in epochs of these means, with one z_group; int [epochs, groups, size]."""
    rng = np.random.default_rng(seed)
    share = workload.group_share
    shape = (workload.num_groups, workload.group_size)
    between = rng.standard_normal((workload.num_groups, 1))
    epochs = []
    for mean in means:
        z = np.sqrt(share) * between + np.sqrt(1 - share) * rng.standard_normal(shape)
        epochs.append(_lengths_of_mean(z, mean, workload))
    return np.stack(epochs)


def _lengths_of_mean(z: np.ndarray, mean_tokens: float, workload: Workload) -> np.ndarray:
    """Return the lengths for the normal deviates `z`, with μ found by bisection."""
    sigma = workload.sigma
    share = workload.limit_share
    limit = workload.limit_tokens
    if share is not None:
        sigma = sigma_of(mean_tokens, limit, share)

    def lengths(mu: float) -> np.ndarray:
        raw = np.exp(np.minimum(mu + sigma * z, 40.0))
        return np.clip(np.rint(raw), 1, limit).astype(np.int64)

    low = -20.0
    high = float(np.log(limit)) + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean_tokens else (low, middle)
    return lengths(high)


def make_requests(
    workload: Workload, lengths: np.ndarray, *, known: bool = False
) -> tuple[list[RequestSpec], dict[int, int]]:
    """Return the requests, first samples first, and their lengths by request number.

    With `known`, the requests carry their lengths.
    """
    requests = []
    by_number = {}
    for sample in range(workload.group_size):
        for group in range(workload.num_groups):
            number = group * workload.group_size + sample
            length = int(lengths[group, sample])
            requests.append(
                RequestSpec(
                    number,
                    group,
                    workload.prompt_tokens,
                    workload.limit_tokens,
                    length if known else None,
                )
            )
            by_number[number] = length
    return requests, by_number
