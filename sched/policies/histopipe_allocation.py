"""HistoPipe's two tiers: from prompts to ranking groups, and from these to workers.

RhymeRL, section 6.4. The first tier cuts the ranked prompts into groups of equal size
(`ranking_groups`), the second gives each group its workers (`allocate`):

    target time of group n:  t(n) = t0 + d·n,   with the least d that the workers allow

Times then grow evenly from the shortest group to the longest, and two consecutive steps in
opposite orders fill each other's gaps. `evenly` is the first tier alone, which `two_tiers` keeps
where it is going to be faster: if a group has so many workers that some have it in both orders,
nothing fills the gaps of the others (the paper's groups are small against its cluster).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

# τ: (mean length, requests of a worker) → the seconds until the worker has answered them
Tau = Callable[[float, float], float]
PRECISION_S, PRECISION = 1.0, 0.01  # of d: the paper's, and as a share of the longest time
RoundSeconds = Callable[[float, float, float], float]  # of (requests, positions, nodes of each)


@dataclasses.dataclass(frozen=True)
class Pace:
    """The nodes that speculation gives a request in a round, and the tokens that it brings."""

    nodes: float = 1.0
    tokens: float = 1.0


def tau_of(round_seconds: RoundSeconds, kv_tokens: float, prompt_tokens: float, pace: Pace) -> Tau:
    """Return τ for rounds of these seconds: as many as the mean length takes, caches half full.

    Requests whose positions exceed a worker's `kv_tokens` take turns.
    """

    def tau(length: float, requests: float) -> float:
        held = prompt_tokens + length / 2
        running = min(requests, kv_tokens / held)
        rounds = length / pace.tokens * requests / running
        return rounds * round_seconds(running, running * held, pace.nodes)

    return tau


def allocate(
    lengths: Sequence[float],
    sizes: Sequence[int],
    num_workers: int,
    tau: Tau,
    *,
    train_s: float = 0.0,
    precision_s: float = PRECISION_S,
) -> list[int]:
    """Return the workers of each ranking group, by binary search over d (the paper's figure 12).

    `lengths` are the groups' mean lengths, shortest first, `sizes` their requests, which the
    workers of a group share. t0 is the shortest group's time with one worker (the figure has the
    most workers, which gives short groups many, against its text), and at least `train_s`, so
    that it is not done before the weights of the next step can be. Workers that the search
    leaves over go to the longest groups. Raises ValueError where there are fewer workers than
    groups.
    """
    N = len(lengths)
    if num_workers < N:
        raise ValueError(
            f"expected at least 1 of the workers for each of {N} ranking groups, got "
            f"{num_workers} workers; mend: fewer ranking groups"
        )
    most = num_workers - (N - 1)
    t0 = max(tau(lengths[0], sizes[0]), train_s)

    def affordable(d: float) -> list[int] | None:
        """Return the fewest workers that meet every target, or None if there are too few."""
        plan = []
        for n, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            target_s, counts = t0 + n * d, range(1, most + 1)
            workers = next((k for k in counts if tau(length, size / k) <= target_s), None)
            if workers is None:
                return None
            plan.append(workers)
        return plan if sum(plan) <= num_workers else None

    longest_s = tau(lengths[-1], sizes[-1])
    low, high = 0.0, max(longest_s - t0, 0.0) / max(N - 1, 1)
    precision_s = min(precision_s, PRECISION * longest_s)
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


def two_tiers(
    lengths: Sequence[float],
    sizes: Sequence[int],
    num_workers: int,
    tau: Tau,
    *,
    train_s: float = 0.0,
    precision_s: float = PRECISION_S,
) -> list[int]:
    """Return `allocate`'s plan, or equal parts where two steps in opposite orders end sooner."""
    even = evenly(len(lengths), num_workers)
    options = {"train_s": train_s, "precision_s": precision_s}
    plan = allocate(lengths, sizes, num_workers, tau, **options)
    times = [seconds_of_two_steps(lengths, sizes, p, tau) for p in (plan, even)]
    return plan if times[0] < times[1] else even


def seconds_of_two_steps(
    lengths: Sequence[float], sizes: Sequence[int], plan: Sequence[int], tau: Tau
) -> float:
    """Return when the last worker is done with two steps of these groups in opposite orders."""
    times = [
        tau(length, size / workers)
        for length, size, workers in zip(lengths, sizes, plan, strict=True)
        for _ in range(workers)
    ]
    return max(map(sum, zip(times, reversed(times), strict=True)))


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
