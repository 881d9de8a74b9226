"""The step folders of a checkpoint directory: naming, committing, retiring.

    step_00000020/            a checkpoint, if it is whole by its manifest
    .working-step_00000040/   being written; becomes step_00000040 by one rename
    .replaced-step_00000020/  an older save of step 20, until the new save is in place
    .trash-step_00000000/     being deleted
    abandoned-step_00000060/  later than a step that was saved again; deleted once step 60 is passed

Invariant: a kill at any moment leaves the newest committed step in its place or, between the two
renames of a replacement, under a name that `recover` puts back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from reprise.models.folder import Folder
from reprise.rl.checkpoint import manifest

_STEP = re.compile(r"step_(\d{8,})")
_ABANDONED = re.compile(r"abandoned-step_(\d{8,})")
_WORKING = ".working-"
_REPLACED = ".replaced-"
_TRASH = ".trash-"
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


def has_step(directory: Folder, step: int) -> bool:
    """Return whether an entry with the name of the step folder exists."""
    return directory.exists(step_folder(directory.path, step).name)


def written_bytes(directory: Path) -> int:
    """Return the bytes in folders that are being written; files may appear and disappear."""
    total = 0
    for folder, _, names in os.walk(directory):
        if _WORKING in folder:
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total


def recover(directory: Folder) -> None:
    """Clean up after a killed run: delete unfinished folders, undo half a replacement."""
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


def publish(directory: Folder, step: int, *, sets_aside: bool = True) -> None:
    """Rename the working folder of `step` to its checkpoint; `sets_aside` renames later steps."""
    for later in list_steps(directory) if sets_aside else ():
        if later > step:
            name = step_folder(directory.path, later).name
            tries = 1
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


def retire(
    directory: Folder, keep: int, spared: Collection[int] = (), light: Sequence[str] = ()
) -> None:
    """Delete steps older than the `keep` newest steps that are whole by names and sizes.

    Older `spared` steps lose only files with a prefix in `light`. Abandoned steps are deleted up to
    the newest step. Call this only if the newest step is whole, as it is kept in any state.
    """
    whole = list[int]()
    for step in list_steps(directory):
        name = step_folder(directory.path, step).name
        if len(whole) < keep:
            if not whole or not manifest.verify(directory.path / name, contents=False):
                whole.append(step)
        elif step not in spared:
            _delete(directory, name)
        elif light:
            _lighten(directory, name, light)
    for name in directory.names():
        aside = _ABANDONED.match(name)
        if aside and whole and int(aside[1]) <= whole[0]:
            _delete(directory, name)


def _delete(directory: Folder, name: str) -> None:
    directory.rename(name, f"{_TRASH}{name}")
    directory.remove(f"{_TRASH}{name}")


def _lighten(directory: Folder, name: str, prefixes: Sequence[str]) -> None:
    """Delete entries with these path prefixes from the subfolders of a checkpoint."""
    with contextlib.suppress(manifest.ManifestError):  # a damaged checkpoint stays unchanged
        manifest.drop(directory.path / name, prefixes)
        step = directory.folder(name, create=False)
        for parent in filter(step.is_folder, step.names()):
            inner = step.folder(parent, create=False)
            for entry in inner.names():
                if f"{parent}/{entry}".startswith(tuple(prefixes)):
                    inner.remove(entry)
            inner.close()
        step.close()
