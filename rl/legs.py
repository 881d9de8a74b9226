"""The legs of a run: each start of its process, with the date, the device and the versions."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import rl
from models.folder import Folder, held
from rl.runtime import environment
from rl.runtime.run_files import LEGS_FILE

MAX_BYTES = 2**20  # of the file that is read: a leg takes 400 bytes


@dataclasses.dataclass(frozen=True)
class Leg:
    """One start of a run: the step after which it began, and where and with what."""

    after_step: int
    began: str  # the date, in UTC
    device: str
    versions: dict[str, str]


def note(folder: Path, after_step: int) -> None:
    """Add this process's leg to the run folder. Raises OSError."""
    leg = Leg(
        after_step,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        environment.device(),
        {"reprise": rl.__version__} | environment.versions(),
    )
    run = Folder(folder)
    with contextlib.closing(run), run.append(LEGS_FILE) as file:
        file.write(json.dumps(dataclasses.asdict(leg)).encode() + b"\n")


def read(folder: Path) -> list[Leg]:
    """Return the legs of a run folder; none if it has no file of them.

    Rows that no run writes are left out: the folder may come from somebody else.
    """
    with held(folder) as run:
        if not run.is_file(LEGS_FILE) or run.size_bytes(LEGS_FILE) > MAX_BYTES:
            return []
        lines = run.read(LEGS_FILE).splitlines()
    return [leg for leg in map(_leg, lines) if leg is not None]


def _leg(line: bytes) -> Leg | None:
    row: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict) or row.keys() != {f.name for f in dataclasses.fields(Leg)}:
        return None
    texts = [row["began"], row["device"]]
    if isinstance(row["versions"], dict):
        texts += row["versions"].values()
    fits = type(row["after_step"]) is int and all(isinstance(text, str) for text in texts)
    return Leg(**row) if fits and isinstance(row["versions"], dict) else None
