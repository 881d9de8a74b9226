"""Section `Checkpoint`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept.

    `every_steps` of 0 means only at the end of a run. `asynchronous` false waits
    for the disk at every save.
    """

    every_steps: int = 20
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(
                f"Checkpoint.every_steps: expected 0 (only at the end) or more, "
                f"got {self.every_steps}"
            )
        if self.keep < 1:
            raise ValueError(
                f"Checkpoint.keep: expected at least 1, got {self.keep}: "
                "the newest checkpoint is never deleted"
            )

    def due(self, step: int) -> bool:
        """Return whether a run saves after `step`, regardless of its last step."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0
