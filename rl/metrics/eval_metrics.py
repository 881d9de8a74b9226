"""Figures of an evaluation, with 95% intervals: mean reward, pass@k, length.

Every figure is a mean of one value per question, since responses to one question are not
independent. If all values are 0 or 1 (greedy accuracy), the interval is a Wilson score interval,
otherwise a bootstrap over the questions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Z_95 = 1.959963984540054  # standard deviations that enclose 95% of a normal distribution
RESAMPLES = 1000
_SEED = 20211  # of the resamples


@dataclasses.dataclass(frozen=True)
class EvalResponse:
    """The figures of one response; `prompt` is the index of the question in the set."""

    prompt: int
    reward: float | None
    is_correct: bool
    num_tokens: int
    truncated: bool
    failed: bool


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 − C(n−c, k) / C(n, k): the probability that k of n responses include a correct one.

    Here c of the n responses are correct. Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    Source: arXiv 2107.03374, section 2.1.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"expected 0 ≤ correct ≤ samples and 1 ≤ k ≤ samples, got correct={num_correct}, "
            f"k={k}, samples={num_samples}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of one value per question, and its 95% interval."""
    values_Q = np.asarray(values, np.float64)
    if np.isin(values_Q, (0.0, 1.0)).all():
        return _wilson(int(values_Q.sum()), len(values_Q))
    n = len(values_Q)
    rng = np.random.Generator(np.random.Philox(_SEED))
    counts_RQ = rng.multinomial(n, np.full(n, 1 / n), RESAMPLES)
    low, high = np.quantile(counts_RQ @ values_Q / n, (0.025, 0.975))
    return Interval(math.fsum(values_Q) / n, float(low), float(high))


def _wilson(successes: int, n: int) -> Interval:
    """Return a share and Wilson's score interval. Source: Wilson, JASA 22 (1927), 209-212."""
    share = successes / n
    z2 = Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def mean_of(parts: Sequence[Interval]) -> Interval:
    """Return the mean over independent sets with equal weights (MOVER: Zou and Donner 2008)."""
    mean = math.fsum(p.mean for p in parts) / len(parts)
    below = math.hypot(*(p.mean - p.low for p in parts)) / len(parts)
    above = math.hypot(*(p.high - p.mean for p in parts)) / len(parts)
    return Interval(mean, mean - below, mean + above)


def set_metrics(
    responses: Sequence[EvalResponse], samples: int, ks: Sequence[int]
) -> dict[str, float]:
    """Return the figures of one set by name, with the bounds as `…_low` and `…_high`.

    Responses without a reward are left out of the mean reward, which is missing without rewards.
    """
    by_prompt: dict[int, list[EvalResponse]] = {}
    for r in responses:
        by_prompt.setdefault(r.prompt, []).append(r)
    rewards = [[r.reward for r in rs if r.reward is not None] for rs in by_prompt.values()]
    means = [math.fsum(known) / len(known) for known in rewards if known]
    correct = [sum(r.is_correct for r in rs) for rs in by_prompt.values()]
    figures = {"mean_reward": interval(means)} if means else {}
    for k in ks:
        figures[f"pass@{k}"] = interval([pass_at_k(samples, c, k) for c in correct])
    return _flat(figures) | {
        "mean_length": math.fsum(r.num_tokens for r in responses) / len(responses),
        "truncated": sum(r.truncated for r in responses) / len(responses),
        "failures": sum(r.failed for r in responses),
        "questions": len(by_prompt),
    }


def overall_metrics(sets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of all sets together: means with equal weights, counts as sums."""
    means = [name.removesuffix("_low") for name in sets[0] if name.endswith("_low")]
    figures = {
        name: mean_of([Interval(s[name], s[f"{name}_low"], s[f"{name}_high"]) for s in sets])
        for name in means
        if all(name in s for s in sets)
    }
    sums = {name: math.fsum(s[name] for s in sets) for name in ("mean_length", "truncated")}
    shares = {name: total / len(sets) for name, total in sums.items()}
    counts = {name: sum(s[name] for s in sets) for name in ("failures", "questions")}
    return _flat(figures) | shares | counts


def _flat(figures: Mapping[str, Interval]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in figures.items():
        flat |= {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}
    return flat
