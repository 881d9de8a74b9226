"""The costs of a worker from engine measurements, instead of a roofline.

    round(requests, nodes, positions) = a + b · 2 · positions / requests

The line comes from the smallest sufficient bucket of slots and nodes, at several cache lengths;
caches are half full on average. Prefill and copies take the time of the smallest measured size that
holds the tokens, scaled in proportion beyond the largest size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from reprise.sched.simulator.roofline import Costs, RoundCost

RoundSeconds = Mapping[tuple[int, int, int], float]  # (slots, nodes, positions of a slot)
MoveSeconds = Mapping[int, tuple[float, float]]  # tokens → (copy from the host, forward pass)


@dataclasses.dataclass(frozen=True)
class MeasuredCosts(Costs):
    """The `Costs` of a worker from tables. Raises ValueError for empty tables."""

    rounds: RoundSeconds
    moves: MoveSeconds
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not any(nodes == slots for slots, nodes, _ in self.rounds) or not self.moves:
            raise ValueError(
                f"expected seconds of plain rounds and of moves, got {len(self.rounds)} rounds and "
                f"{len(self.moves)} moves"
            )

    @property
    def kv_tokens(self) -> int:
        """Return the number of positions in the rows of the engine."""
        return max(slots * positions for slots, _, positions in self.rounds)

    def round_cost(
        self, num_requests: float, num_nodes: float = 1.0, other_requests: float | None = None
    ) -> RoundCost:
        slots = _least({s for s, _, _ in self.rounds}, num_requests)
        nodes = _least({n for s, n, _ in self.rounds if s == slots}, slots * num_nodes)
        points = sorted((p, t) for (s, n, p), t in self.rounds.items() if (s, n) == (slots, nodes))
        first, first_s = points[0]
        last, last_s = points[-1]
        slope = max(0.0, (last_s - first_s) / (last - first)) if last > first else 0.0
        # requests beyond the largest bucket take turns
        turns = max(1.0, num_requests / slots)
        fixed_s = turns * max(0.0, first_s - slope * first)
        return RoundCost(fixed_s, turns * slope * 2 / max(num_requests, 1))

    def prefill_seconds(self, tokens: int) -> float:
        return self._moved(tokens)[1]

    def copy_seconds(self, tokens: int) -> float:
        return self._moved(tokens)[0]

    def _moved(self, tokens: int) -> tuple[float, float]:
        size = _least(set(self.moves), tokens)
        copy_s, pass_s = self.moves[size]
        times = max(1.0, tokens / size)
        return times * copy_s, times * pass_s


def _least(sizes: set[int], wanted: float) -> int:
    """Return the smallest sufficient size, else the largest."""
    return min((n for n in sizes if n >= wanted), default=max(sizes))
