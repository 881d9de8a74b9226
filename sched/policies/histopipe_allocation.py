"""How many workers each ranking group gets: HistoPipe's second tier (RhymeRL, section 6.4).

    target time of group n:  t(n) = t0 + d·n,   the least d that the workers allow

so that times grow evenly from the shortest group to the longest, which is what two
consecutive steps in opposite orders fill up.
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
    least: int = 1,
    most: int | None = None,
    train_s: float = 0.0,
    precision_s: float = 1.0,
) -> list[int]:
    """Workers of each ranking group, by binary search over d (the paper's figure 12).

    `lengths` are the groups' mean lengths, shortest first; each gets `least` to `most`
    workers. t0 is the shortest group's time with the fewest workers (the figure has the most,
    which gives short groups many, against its text), and at least `train_s`, so that it is not
    done before the weights of the next step can be. What the search leaves over goes to the
    longest groups. Raises ValueError where not every group can get `least`.
    """
    N = len(lengths)
    if num_workers < N * least:
        raise ValueError(
            f"expected at least {least} of the workers for each of {N} ranking groups, got "
            f"{num_workers} workers; mend: fewer ranking groups"
        )
    most = num_workers - (N - 1) * least if most is None else most
    t0 = max(tau(lengths[0], least), train_s)
    plan, low, high = None, 0.0, max(tau(lengths[-1], least) - t0, 0.0) / max(N - 1, 1)
    while plan is None:  # the figure's upper end may ask for too much of the groups between
        plan = _affordable(high, lengths, num_workers, tau, t0, least, most)
        if plan is None:
            low, high = high, 2 * high + precision_s
    while high - low > precision_s:
        middle = (low + high) / 2
        found = _affordable(middle, lengths, num_workers, tau, t0, least, most)
        if found is None:
            low = middle
        else:
            plan, high = found, middle
    for i in range(num_workers - sum(plan)):
        plan[N - 1 - i % N] += 1
    return plan


def _affordable(
    d: float,
    lengths: Sequence[float],
    num_workers: int,
    tau: Tau,
    t0: float,
    least: int,
    most: int,
) -> list[int] | None:
    """The fewest workers with which every group meets its target; None where they do not do."""
    plan = []
    for n, length in enumerate(lengths):
        target_s = t0 + n * d
        workers = next((k for k in range(least, most + 1) if tau(length, k) <= target_s), None)
        if workers is None:
            return None
        plan.append(workers)
    return plan if sum(plan) <= num_workers else None


def evenly(num_groups: int, num_workers: int) -> list[int]:
    """The first tier alone: workers in equal parts, the first groups one more if need be."""
    whole, rest = divmod(num_workers, num_groups)
    if not whole:
        raise ValueError(f"expected a worker for each of {num_groups} ranking groups")
    return [whole + (i < rest) for i in range(num_groups)]


def ranking_groups(keys: Sequence[float], num_groups: int) -> list[list[int]]:
    """Indices of `keys` in `num_groups` parts of equal size, lowest keys first."""
    order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
    edges = [math.ceil(len(order) * n / num_groups) for n in range(num_groups + 1)]
    return [order[a:b] for a, b in itertools.pairwise(edges)]
