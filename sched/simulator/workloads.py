"""Lengths of responses: drawn like those that the papers describe, or recorded.

    length = clip(exp(μ + σ·(√ρ·z_group + √(1−ρ)·z_response)), 1, limit)

with ρ the share of the variance of log-lengths that lies between groups, and μ such that
the mean of what is drawn is the one asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sched.request import RequestSpec


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of one rollout. `sigma` and `group_share` are σ and ρ.

    ρ is the one at which 16% of responses come to a higher one of eight ranks than the median
    of their prompt's last epoch does (RhymeRL, figure 9: math); σ was fitted to SpecActor's
    share of idle time and to Seer's Moonlight.
    """

    num_groups: int
    group_size: int
    mean_tokens: float
    limit_tokens: int
    prompt_tokens: int = 512
    sigma: float = 0.7
    group_share: float = 0.97

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens < self.limit_tokens:
            raise ValueError(
                f"expected 1 <= mean_tokens < limit_tokens, got {self.mean_tokens}, "
                f"{self.limit_tokens}"
            )
        if self.sigma < 0 or not 0 <= self.group_share <= 1:
            raise ValueError(
                "expected sigma >= 0 and group_share in 0 … 1, got "
                f"{self.sigma}, {self.group_share}"
            )


def draw_lengths(workload: Workload, *, seed: int) -> np.ndarray:
    """Tokens of every response; int [groups, group size]."""
    rng = np.random.default_rng(seed)
    shape = (workload.num_groups, workload.group_size)
    between = rng.standard_normal((workload.num_groups, 1))
    share = workload.group_share
    z = np.sqrt(share) * between + np.sqrt(1 - share) * rng.standard_normal(shape)
    return _with_mean(z, workload)


def _with_mean(z: np.ndarray, workload: Workload) -> np.ndarray:
    """Lengths of the scores `z`, with the workload's mean."""
    low, high = -20.0, float(np.log(workload.limit_tokens)) + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = _lengths(z, middle, workload).mean()
        low, high = (middle, high) if mean < workload.mean_tokens else (low, middle)
    return _lengths(z, high, workload)


def draw_epochs(
    workload: Workload,
    means: Sequence[float],
    *,
    seed: int,
) -> np.ndarray:
    """Lengths over epochs of these means, z_group kept; int [epochs, groups, group size]."""
    rng = np.random.default_rng(seed)
    share, shape = workload.group_share, (workload.num_groups, workload.group_size)
    between = rng.standard_normal((workload.num_groups, 1))
    epochs = []
    for mean in means:
        z = np.sqrt(share) * between + np.sqrt(1 - share) * rng.standard_normal(shape)
        epochs.append(_with_mean(z, dataclasses.replace(workload, mean_tokens=mean)))
    return np.stack(epochs)


def _lengths(z: np.ndarray, mu: float, workload: Workload) -> np.ndarray:
    raw = np.exp(np.minimum(mu + workload.sigma * z, 40.0))
    return np.clip(np.rint(raw), 1, workload.limit_tokens).astype(np.int64)


def asks_for(
    workload: Workload, lengths: np.ndarray, *, known: bool = False
) -> tuple[list[RequestSpec], dict[int, int]]:
    """Requests, first samples first, and their lengths by number; `known`: told to schedulers."""
    asks, by_number = [], {}
    size = workload.group_size
    for sample in range(size):
        for group in range(workload.num_groups):
            number, length = group * size + sample, int(lengths[group, sample])
            expected = length if known else None
            asks.append(
                RequestSpec(number, group, workload.prompt_tokens, workload.limit_tokens, expected)
            )
            by_number[number] = length
    return asks, by_number


def recorded(lengths_by_group: Sequence[Sequence[int]]) -> np.ndarray:
    """Lengths of a real run, groups of one size. Raises ValueError where sizes differ."""
    sizes = {len(group) for group in lengths_by_group}
    if len(sizes) != 1:
        raise ValueError(f"expected groups of one size, got sizes {sorted(sizes)}")
    return np.asarray(lengths_by_group, np.int64)
