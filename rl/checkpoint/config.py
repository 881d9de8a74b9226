"""Configuration of checkpoints (section `Checkpoint`)."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    A step is saved if it is a multiple of `every_steps`, or if it finishes `every_minutes` or more
    after the last save; 0 turns either rule off, and the last step of a run is always saved.
    Besides the `keep` newest steps, the best step by evaluation is kept, without optimizer state.
    With `asynchronous` false, every save waits for the disk.
    """

    every_steps: int = 20
    every_minutes: float = 30.0
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(
                f"Checkpoint.every_steps: expected 0 (only at the end) or more, "
                f"got {self.every_steps}"
            )
        if not 0 <= self.every_minutes < math.inf:
            raise ValueError(
                f"Checkpoint.every_minutes: expected 0 (by steps alone) or more, "
                f"got {self.every_minutes}"
            )
        if self.keep < 1:
            raise ValueError(
                f"Checkpoint.keep: expected at least 1, got {self.keep}: "
                "the newest checkpoint is never deleted"
            )

    def due(self, step: int) -> bool:
        """Return whether a run saves after `step`, regardless of its last step and the time."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0
