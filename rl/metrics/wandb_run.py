"""The Weights & Biases run of a run folder, which shows the rows of metrics.jsonl.

The service drops rows of steps that it already has. So if a run goes back to a checkpoint, the
service truncates the W&B run there (`resume_from`). If the service refuses, or offline, a new W&B
run gets all rows of metrics.jsonl, and the old W&B run keeps the undone rows.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from reprise.models.folder import Folder
from reprise.rl.runtime.run_files import WANDB_FOLDER, WANDB_ID_FILE


class WandbRun:
    """The W&B run with the id that the folder stores, or a new W&B run with `rows`.

    Raises ModuleNotFoundError if wandb is missing, OSError if no run can be opened.
    """

    def __init__(self, folder: Folder, project: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._folder = folder
        self._project = project
        self._wandb = package()
        folder.folder(WANDB_FOLDER)  # must be no link, since wandb writes there by path
        if folder.exists(WANDB_ID_FILE):
            self._id = folder.read(WANDB_ID_FILE).decode().strip()
            self._run = self._open(id=self._id, resume="allow")
        else:
            self._begin(rows)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics.jsonl; values that are not finite are left out."""
        finite = {name: x for name, x in row.items() if name != "step" and x is not None}
        self._run.log(finite, step=row["step"])

    def go_back(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep only `rows`, which are the first of the logged rows."""
        self._run.finish()
        if rows:
            moment = f"{self._id}?_step={rows[-1]['step']}"
            try:
                self._run = self._open(id=self._id, resume_from=moment)
            except OSError:
                pass  # not available to all users, and a kill may have lost rows
            else:
                if not getattr(self._run, "offline", False):
                    return
                self._run.finish()
        self._begin(rows)

    def finish(self) -> None:
        self._run.finish()

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Open a new W&B run with these rows."""
        self._id = uuid.uuid4().hex[:16]
        self._run = self._open(id=self._id, resume="allow")
        for row in rows:
            self.log(row)
        self._folder.replace(
            WANDB_ID_FILE, self._id
        )  # if killed before this line, the next leg opens another W&B run

    def _open(self, **how: str) -> Any:
        name = self._folder.path.name
        place = str(self._folder.path)
        try:
            return self._wandb.init(project=self._project, name=name, dir=place, **how)
        except Exception as error:  # from the service, the network or the login
            raise OSError(
                f"Metrics.wandb_project={self._project!r}: Weights & Biases opened no run "
                f"({type(error).__name__}: {error}); fix: log in (wandb login), set "
                "WANDB_MODE=offline, or Metrics.wandb_project=None"
            ) from error


def package() -> Any:
    """Return the module wandb. Raises ModuleNotFoundError, with the fix."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Metrics.wandb_project needs wandb: install it (pip install wandb) or set "
            "Metrics.wandb_project = None"
        ) from error
