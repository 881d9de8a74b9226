"""Configuration of checkpoints (section `Checkpoint`)."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    The last step of a run is always saved. Besides the newest steps, the best step by evaluation is
    kept, without optimizer state.
    """

    every_steps: int = 20
    """Save the multiples of this number of steps; 0 is off."""
    every_minutes: float = 30.0
    """Save a step that finishes this long after the last save; 0 is off."""
    keep: int = 2
    """The number of newest steps that are kept."""
    asynchronous: bool = True
    """Write during the next step; False waits for the disk."""

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
