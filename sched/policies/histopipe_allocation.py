"""The number of workers of each ranking group: HistoPipe's second tier (RhymeRL, section 6.4).

    target time of group n:  t(n) = t0 + d·n,   with the least d that the workers allow

Times then grow evenly from the shortest group to the longest, and two consecutive steps in
opposite orders fill each other's gaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Tau = Callable[[float, int], float]  # (representative length, workers) → seconds


def allocate(
    lengths: Sequence[float],
    num_workers: int,
    tau: Tau,
    *,
    train_s: float = 0.0,
    precision_s: float = 1.0,
) -> list[int]:
    """Return the workers of each ranking group, by binary search over d (the paper's figure 12).

    `lengths` are the groups' mean lengths, shortest first. t0 is the shortest group's time with
    one worker (the figure has the most workers, which gives short groups many, against its
    text), and at least `train_s`, so that it is not done before the weights of the next step can
    be. Workers that the search leaves over go to the longest groups. Raises ValueError where
    there are fewer workers than groups.
    """
    N = len(lengths)
    if num_workers < N:
        raise ValueError(
            f"expected at least 1 of the workers for each of {N} ranking groups, got "
            f"{num_workers} workers; mend: fewer ranking groups"
        )
    most = num_workers - (N - 1)
    t0 = max(tau(lengths[0], 1), train_s)

    def affordable(d: float) -> list[int] | None:
        """Return the fewest workers that meet every target, or None if there are too few."""
        plan = []
        for n, length in enumerate(lengths):
            target_s = t0 + n * d
            workers = next((k for k in range(1, most + 1) if tau(length, k) <= target_s), None)
            if workers is None:
                return None
            plan.append(workers)
        return plan if sum(plan) <= num_workers else None

    low, high = 0.0, max(tau(lengths[-1], 1) - t0, 0.0) / max(N - 1, 1)
    while (plan := affordable(high)) is None:  # groups between the ends may need a larger d
        low, high = high, 2 * high + precision_s
    while high - low > precision_s:
        middle = (low + high) / 2
        found = affordable(middle)
        if found is None:
            low = middle
        else:
            plan, high = found, middle
    for i in range(num_workers - sum(plan)):
        plan[N - 1 - i % N] += 1
    return plan


def evenly(num_groups: int, num_workers: int) -> list[int]:
    """Return the first tier's allocation: equal parts, one worker more for the first groups."""
    whole, rest = divmod(num_workers, num_groups)
    if not whole:
        raise ValueError(f"expected a worker for each of {num_groups} ranking groups")
    return [whole + (i < rest) for i in range(num_groups)]


def ranking_groups(keys: Sequence[float], num_groups: int) -> list[list[int]]:
    """Return the indices of `keys` in `num_groups` parts of equal size, lowest keys first."""
    order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
    edges = [math.ceil(len(order) * n / num_groups) for n in range(num_groups + 1)]
    return [order[a:b] for a, b in itertools.pairwise(edges)]
