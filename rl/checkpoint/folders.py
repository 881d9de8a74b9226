"""The step folders of a checkpoint directory: naming, committing, retiring.

    step_00000020/            counts, if its manifest says it is whole
    .working-step_00000040/   being filled; becomes step_00000040 by one rename
    .replaced-step_00000020/  an older save of step 20, until the new one is in place
    .trash-step_00000000/     being deleted
    abandoned-step_00000060/  later than a step that was saved again

Invariant: a kill at any moment leaves the newest committed step in its place or, between the two
renames of a replacement, under a name that `recover` puts back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from models.folder import Folder
from rl.checkpoint import manifest

_STEP = re.compile(r"step_(\d{8,})")
_WORKING, _REPLACED, _TRASH = ".working-", ".replaced-", ".trash-"
_log = logging.getLogger(__name__)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def working_folder(directory: Path, step: int) -> Path:
    return directory / f"{_WORKING}step_{step:08d}"


def list_steps(directory: Path | Folder) -> list[int]:
    """Return the steps that have a folder (a link does not count), whole or not, newest first."""
    if isinstance(directory, Folder):
        names = [name for name in directory.names() if directory.is_folder(name)]
    else:
        if not directory.is_dir():
            return []
        names = [e.name for e in directory.iterdir() if stat.S_ISDIR(e.lstat().st_mode)]
    matches = [_STEP.fullmatch(name) for name in names]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def written_bytes(directory: Path) -> int:
    """Return the bytes in the folders that are being filled, whose files may come and go."""
    total = 0
    for folder, _, names in os.walk(directory):
        if _WORKING in folder:
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total


def recover(directory: Folder) -> None:
    """Tidy up after a killed run: delete unfinished folders, undo half a replacement."""
    for name in directory.names():
        if name.startswith(_REPLACED):
            original = name.removeprefix(_REPLACED)
            if not directory.exists(original):
                _log.warning("%s: put back after an interrupted save", directory.path / original)
                directory.rename(name, original)
                continue
        if name.startswith((_WORKING, _REPLACED, _TRASH)):
            _log.info("%s: deleting what an interrupted save left", directory.path / name)
            directory.remove(name)
    directory.sync()


def publish(directory: Folder, step: int) -> None:
    """Make the working folder of `step` its checkpoint; set later steps aside."""
    for later in list_steps(directory):
        if later > step:
            name, tries = step_folder(directory.path, later).name, 1
            aside = f"abandoned-{name}"
            while directory.exists(aside):
                tries += 1
                aside = f"abandoned-{name}-{tries}"
            _log.warning("%s: set aside as %s", directory.path / name, aside)
            directory.rename(name, aside)
    target = step_folder(directory.path, step).name
    replaced = f"{_REPLACED}{target}"
    if directory.exists(target):
        directory.rename(target, replaced)
    directory.rename(working_folder(directory.path, step).name, target)
    directory.sync()
    directory.remove(replaced, missing_ok=True)


def retire(directory: Folder, keep: int, spared: Collection[int] = ()) -> None:
    """Delete steps older than the `keep` newest that are whole by names and sizes, but no `spared`.

    Call it only once the newest step is whole: it is kept whatever its state.
    """
    saved = 0
    for step in list_steps(directory):
        folder = step_folder(directory.path, step)
        if saved >= keep:
            if step not in spared:
                directory.rename(folder.name, f"{_TRASH}{folder.name}")
                directory.remove(f"{_TRASH}{folder.name}")
        elif saved == 0 or not manifest.verify(folder, contents=False):
            saved += 1
