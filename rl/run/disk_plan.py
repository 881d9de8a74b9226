"""The disk space that the checkpoints of a run need, against the free space."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from reprise.rl.preflight.memory import num_bytes
from reprise.rl.run.run_checkpoint import saved_shapes
from reprise.rl.runtime import disk
from reprise.rl.runtime.run_files import CHECKPOINTS
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs

FIX = (
    "free some, lower Checkpoint.keep, or name a folder on another disk with --gin.Run.directory=…"
)


@dataclasses.dataclass(frozen=True)
class DiskPlan:
    """Bytes of one checkpoint, of all checkpoints at the peak, of present ones, and free bytes."""

    folder: Path
    each_bytes: int
    total_bytes: int
    held_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"checkpoints take up to {_size(self.total_bytes)}, {_size(self.each_bytes)} each; "
            f"{_size(self.free_bytes)} are free in {self.folder}"
        )

    @property
    def warning(self) -> str | None:
        """A warning if the disk will be full, else None."""
        if self.total_bytes - self.held_bytes <= self.free_bytes:
            return None
        return f"the disk will be full: {self}: {FIX}"


def disk_plan(config: TrainConfig, inputs: Inputs, folder: Path) -> DiskPlan:
    """Return the most that a run stores: `keep` states, one being written, and the best policy.

    The policy exported at the end takes the room of the state being written. No device is opened.
    """
    shapes = saved_shapes(config, inputs)
    each_bytes = num_bytes(shapes)
    best_bytes = num_bytes(shapes.params) if config.eval.num_prompts else 0
    checkpoints = folder / CHECKPOINTS
    return DiskPlan(
        folder,
        each_bytes,
        (config.checkpoint.keep + 1) * each_bytes + best_bytes,
        sum(
            os.lstat(os.path.join(parent, name)).st_size
            for parent, _, names in os.walk(checkpoints)
            for name in names
        ),
        disk.free_bytes(folder),
    )


def _size(num_bytes: int) -> str:
    """Return bytes as text with three digits: 1.25 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"
