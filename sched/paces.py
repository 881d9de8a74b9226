"""Rounds with guesses, for the simulator: what a window costs, and what it brings.

A window of k guesses that are right with probability p each brings (1 − p^{k+1}) / (1 − p)
tokens. Which window a worker takes is decided anew whenever who runs there has changed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from sched.cost_model import Instance
from sched.simulated_worker import Plan
from sched.specactor import coupled_tokens


def chance_of(mean_tokens: float, window: int) -> float:
    """The p at which a window of so many guesses brings `mean_tokens`; by bisection."""
    if not 1 <= mean_tokens <= window + 1:
        raise ValueError(f"expected 1 … {window + 1} tokens of {window} guesses, got {mean_tokens}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if coupled_tokens(middle, window) < mean_tokens else (low, middle)
        )
    return high


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A way to draft: `paths` chains side by side, the chance of a guess by lane."""

    paths: int
    chances: tuple[float, ...]
    seconds: Callable[[float, int], float] = lambda batch, window: 0.0  # (requests, window)


class Windows:
    """The way and the window with the most tokens per second; plain rounds are one of them.

    Lanes are by how many siblings have finished: lane i from `siblings[i]` on. `fixed` keeps
    one window whatever the load; above `most_requests` running ones rounds are plain.
    """

    def __init__(
        self,
        instance: Instance,
        siblings: Sequence[int],
        ways: Sequence[Drafting],
        *,
        windows: Sequence[int] = (1, 2, 3, 4, 6, 8),
        fixed: int | None = None,
        most_requests: float = float("inf"),
    ) -> None:
        self.num_lanes = len(siblings)
        self._instance, self._siblings, self._ways = instance, list(siblings), ways
        self._windows = windows if fixed is None else (fixed,)
        self._fixed, self._most_requests = fixed, most_requests
        self._tokens: Mapping[tuple[int, int], tuple[float, ...]] = {
            (w, k): tuple(coupled_tokens(p, k) for p in way.chances)
            for w, way in enumerate(ways)
            for k in self._windows
        }

    def lane(self, request_id: int, finished_siblings: int) -> int:
        return bisect.bisect_right(self._siblings, finished_siblings) - 1

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> Plan:
        batch = sum(counts)
        plain = self._instance.round_cost(batch)
        best = Plan(plain, (1.0,) * self.num_lanes)
        if batch > self._most_requests:
            return best
        best_rate = batch / plain(positions) if self._fixed is None else 0.0
        for (w, k), tokens in self._tokens.items():
            way = self._ways[w]
            cost = self._instance.round_cost(batch, 1 + way.paths * k)
            draft_s = way.seconds(batch, k)
            brought = sum(n * a for n, a in zip(counts, tokens, strict=True))
            rate = brought / (cost(positions) + draft_s)
            if rate > best_rate:
                cost = dataclasses.replace(cost, fixed_s=cost.fixed_s + draft_s)
                best, best_rate = Plan(cost, tokens), rate
        return best
