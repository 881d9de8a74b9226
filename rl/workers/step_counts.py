"""The counts of a session's workers by step, and the timeline of the workers in it."""

from __future__ import annotations

import dataclasses

from rl.engine.stats import EngineStats, joined
from rl.engine.worker_record import WorkerPart, fitted


@dataclasses.dataclass(eq=False)
class _Part:
    """One rollout of a worker's engine."""

    name: str
    place: str
    version: int
    began_s: float
    ended_s: float
    stats: EngineStats

    def part(self) -> WorkerPart:
        whole = self.began_s, max(self.began_s, self.ended_s)
        rounds = [(r.began_s, r.ended_s) for r in self.stats.timeline]
        spans = fitted(rounds, *whole) or [whole]
        return WorkerPart(self.name, self.place, self.version, tuple(spans))


class StepCounts:
    """Counts by step. One thread adds, others read."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, _Part]] = {}  # by step, and by the rollout's counts

    def begin(self, step: int, oldest: int) -> None:
        """Begin a step; nothing is kept of steps before `oldest`."""
        self._steps = {s: parts for s, parts in self._steps.items() if s >= oldest}
        self._steps.setdefault(step, {})

    def add(
        self,
        step: int,
        stats: EngineStats,
        names: tuple[str, str, int],
        began_s: float,
        now_s: float,
    ) -> None:
        """Note the counts of a rollout of a worker, by its (name, place, version of weights)."""
        parts = self._steps.get(step)
        if parts is None:
            return
        if id(stats) not in parts:  # a worker may open a step again
            parts[id(stats)] = _Part(*names, began_s, now_s, stats)
        parts[id(stats)].ended_s = now_s

    def num_tokens(self, step: int) -> int:
        return sum(part.stats.tokens for part in self._parts(step))

    def stats(self, step: int) -> EngineStats:
        """Return the counts of all workers in a step so far, with their timeline."""
        parts = self._parts(step)
        stats = joined([EngineStats(), *(part.stats for part in parts)])
        stats.parts = [part.part() for part in parts]
        return stats

    def _parts(self, step: int) -> list[_Part]:
        return list(self._steps.get(step, {}).values())
