"""The steps of a checkpoint directory whose checkpoints are whole."""

from __future__ import annotations

from pathlib import Path

from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.folders import list_steps
from reprise.rl.checkpoint.reader import problems_of


def whole_steps(where: Path | Checkpointer) -> list[int]:
    """Return them, newest first; waits for the save in progress of a Checkpointer."""
    if isinstance(where, Checkpointer):
        where.wait()
    directory = where.directory if isinstance(where, Checkpointer) else where
    return [step for step in list_steps(directory) if not problems_of(directory, step)[0]]
