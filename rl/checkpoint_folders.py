"""The step folders of a checkpoint directory: naming, committing, retiring.

    step_00000020/            counts, if its manifest says it is whole
    .working-step_00000040/   being filled; becomes step_00000040 by one rename
    .replaced-step_00000020/  an older try at step 20, until the new one is in
    .trash-step_00000000/     being deleted
    abandoned-step_00000060/  past the point from which a run went on differently

Invariant: a kill at any moment leaves the newest committed step in its place or,
between the two renames of a replacement, under a name that `recover` puts back.
Nothing outside of the directory is ever renamed or deleted.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from rl import checkpoint_manifest

_STEP = re.compile(r"step_(\d{8,})")
_WORKING, _REPLACED, _TRASH = ".working-", ".replaced-", ".trash-"
_log = logging.getLogger(__name__)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def working_folder(directory: Path, step: int) -> Path:
    return directory / f"{_WORKING}step_{step:08d}"


def list_steps(directory: Path) -> list[int]:
    """Steps that have a folder, whole or not, newest first."""
    if not directory.is_dir():
        return []
    matches = [_STEP.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def recover(directory: Path) -> None:
    """Tidies up after a killed run: deletes unfinished folders, undoes half a replacement."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(_REPLACED):
            original = directory / entry.name.removeprefix(_REPLACED)
            if not original.exists():
                _log.warning("%s: put back after an interrupted save", original)
                os.rename(entry, original)
                continue
        if entry.name.startswith((_WORKING, _REPLACED, _TRASH)):
            _log.info("%s: deleting what an interrupted save left behind", entry)
            _delete(entry)
    checkpoint_manifest.sync_folder(directory)


def publish(directory: Path, step: int) -> None:
    """Makes the working folder of `step`, manifest included, its checkpoint.

    Later steps belong to a past that this save departs from; they are set aside,
    so that the newest step is always that of the newest save.
    """
    for later in list_steps(directory):
        if later > step:
            _set_aside(step_folder(directory, later))
    target = step_folder(directory, step)
    replaced = directory / f"{_REPLACED}{target.name}"
    if target.exists():
        os.rename(target, replaced)
    os.rename(working_folder(directory, step), target)
    checkpoint_manifest.sync_folder(directory)
    if replaced.exists():
        _delete(replaced)


def retire(directory: Path, keep: int) -> None:
    """Deletes all steps older than the `keep` newest that look whole.

    Call it only once the newest step is whole: that one is kept whatever its
    state. The look is at names and sizes, not contents.
    """
    kept = 0
    for step in list_steps(directory):
        folder = step_folder(directory, step)
        if kept >= keep:
            trash = directory / f"{_TRASH}{folder.name}"
            os.rename(folder, trash)
            _delete(trash)
        elif kept == 0 or not checkpoint_manifest.verify(folder, contents=False):
            kept += 1


def _set_aside(folder: Path) -> None:
    target = folder.with_name(f"abandoned-{folder.name}")
    tries = 1
    while target.exists():
        tries += 1
        target = folder.with_name(f"abandoned-{folder.name}-{tries}")
    _log.warning("%s is later than the step being saved: renamed to %s", folder, target.name)
    os.rename(folder, target)


def _delete(entry: Path) -> None:
    """Deletes a child of the directory; of a link only the link."""
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink()
    else:
        shutil.rmtree(entry)
