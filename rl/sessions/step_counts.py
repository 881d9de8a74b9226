"""Statistics and timelines of the workers of a session, by step."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from reprise.rl.records.stats import EngineStats, joined
from reprise.rl.records.worker_record import WorkerPart, fitted


class _Part(NamedTuple):
    """One rollout on the engine of a worker."""

    whole: WorkerPart  # with one span over all calls
    stats: EngineStats

    def part(self) -> WorkerPart:
        rounds = [(r.began_s, r.ended_s) for r in self.stats.timeline]
        [span] = self.whole.busy_s
        return dataclasses.replace(self.whole, busy_s=tuple(fitted(rounds, *span) or [span]))


class StepCounts:
    """Statistics by step. One thread adds, others read."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, _Part]] = {}  # by step, then by `id` of the stats

    def begin(self, step: int, oldest: int) -> None:
        """Start a step, and forget steps before `oldest`."""
        self._steps = {s: parts for s, parts in self._steps.items() if s >= oldest}
        self._steps.setdefault(step, {})

    def add(self, step: int, stats: EngineStats, part: WorkerPart) -> None:
        """Record the statistics of a worker rollout, and the span of its last call."""
        parts = self._steps.get(step)
        if parts is None:
            return
        if (known := parts.get(id(stats))) is not None:  # a reopened step has new stats
            span = known.whole.busy_s[0][0], part.busy_s[0][1]
            part = dataclasses.replace(known.whole, busy_s=(span,))
        parts[id(stats)] = _Part(part, stats)

    def num_tokens(self, step: int) -> int:
        return sum(part.stats.tokens for part in self._parts(step))

    def stats(self, step: int) -> EngineStats:
        """Return the statistics of all workers in a step so far, with their timelines."""
        parts = self._parts(step)
        stats = joined([EngineStats(), *(part.stats for part in parts)])
        stats.parts = [part.part() for part in parts]
        return stats

    def _parts(self, step: int) -> list[_Part]:
        return list(self._steps.get(step, {}).values())
