"""The counts of a session's workers by step, and the timeline of the workers in it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from reprise.rl.engine.stats import EngineStats, joined
from reprise.rl.engine.worker_record import WorkerPart, fitted


class _Part(NamedTuple):
    """One rollout of a worker's engine."""

    whole: WorkerPart  # its span covers its calls
    stats: EngineStats

    def part(self) -> WorkerPart:
        rounds = [(r.began_s, r.ended_s) for r in self.stats.timeline]
        [span] = self.whole.busy_s
        return dataclasses.replace(self.whole, busy_s=tuple(fitted(rounds, *span) or [span]))


class StepCounts:
    """Counts by step. One thread adds, others read."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, _Part]] = {}  # by step, and by the rollout's counts

    def begin(self, step: int, oldest: int) -> None:
        """Begin a step; nothing is kept of steps before `oldest`."""
        self._steps = {s: parts for s, parts in self._steps.items() if s >= oldest}
        self._steps.setdefault(step, {})

    def add(self, step: int, stats: EngineStats, part: WorkerPart) -> None:
        """Note the counts of a rollout of a worker, and its last call."""
        parts = self._steps.get(step)
        if parts is None:
            return
        if (known := parts.get(id(stats))) is not None:  # a worker may open a step again
            span = known.whole.busy_s[0][0], part.busy_s[0][1]
            part = dataclasses.replace(known.whole, busy_s=(span,))
        parts[id(stats)] = _Part(part, stats)

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
