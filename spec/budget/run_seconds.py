"""The seconds of a run's own rounds, step by step: what they make of its table and of its drafts.

Both are functions of the recorded steps alone, so that a run that replays its record decides as it
did. n = rounds, t = seconds of the table, m = measured ones.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from spec.round_times import RoundTimes, monotone

Bucket = tuple[int, int, int]  # slots, nodes, positions
PRIOR_ROUNDS = 32.0  # that the table counts as
DECAY = 0.7  # of the rounds of earlier steps, a step
LOSS = 0.01  # of the seconds in rounds: a step that loses less does not count


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """One step: seconds in rounds and those that drafts saved, and (n, m) of each bucket."""

    rollout_s: float
    saved_s: float
    rounds: Mapping[Bucket, tuple[int, float]]

    @property
    def loses(self) -> bool:
        return self.saved_s < -LOSS * self.rollout_s


class RunSeconds:
    """Sums up the steps of a run so far; drafts are off after `losing_steps` in a row that lose.

    0 never turns them off.
    """

    def __init__(self, losing_steps: int = 0) -> None:
        self.is_off = False
        self._lost = collections.deque[StepSeconds](maxlen=losing_steps)  # the last ones
        self._rounds: dict[Bucket, tuple[float, float]] = {}  # n and m

    def played(self, step: StepSeconds) -> None:
        """Take in the step after those so far."""
        if step.loses:
            self._lost.append(step)
        else:
            self._lost.clear()
        self.is_off = self.is_off or 0 < len(self._lost) == self._lost.maxlen
        self._rounds = {b: (DECAY * n, m) for b, (n, m) in self._rounds.items()}
        for bucket, (more, mean_s) in step.rounds.items():
            n, m = self._rounds.get(bucket, (0.0, 0.0))
            self._rounds[bucket] = n + more, (n * m + more * mean_s) / (n + more)

    @property
    def lost(self) -> tuple[float, float]:
        """The seconds that drafts lost in the losing steps that came last, and those in rounds."""
        return -sum(s.saved_s for s in self._lost), sum(s.rollout_s for s in self._lost)

    def corrected(self, times: RoundTimes) -> RoundTimes:
        """Return the table as this run's rounds correct it; of a bucket

            (prior · k · t + n · m) / (prior + n),   k = Σ n m / Σ n t

        so that rounds that were not run are as much slower as the others are, and never cheaper
        with more nodes. A draft's seconds are times k.
        """
        table = times.rounds
        seen = {b: n_m for b, n_m in self._rounds.items() if b in table}
        if not seen:
            return times
        k = sum(n * m for n, m in seen.values()) / sum(n * table[b] for b, (n, _) in seen.items())
        found = dict[Bucket, float]()
        for bucket, t in table.items():
            n, m = seen.get(bucket, (0.0, 0.0))
            found[bucket] = (PRIOR_ROUNDS * k * t + n * m) / (PRIOR_ROUNDS + n)
        return times.scaled(k, monotone(found))
