"""A manifest with size and SHA-256 of all files of a folder, which is *whole* if all files match.

`write_manifest` is the last write into a folder, so a folder without a manifest is unfinished.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reprise.models.folder import Folder, read_plain, replace_file

MANIFEST_NAME = "manifest.json"
FORMAT = 1
DROPPED = "dropped"  # key in `extra`: prefixes of files that `drop` removed
Entry = dict[str, Any]  # size and SHA-256 of a file
MAX_MANIFEST_BYTES = 2**26  # a file takes some 150 bytes
_HASH_THREADS = 4
_SELF_HASH = "sha256_of_the_rest"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with a folder; `file` is relative to the folder."""

    folder: Path
    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.folder / self.file}: {self.what}"


class ManifestError(ValueError):
    """The manifest itself is missing or damaged."""


@dataclasses.dataclass(frozen=True)
class Content:
    """Size and hash of a file."""

    num_bytes: int
    sha256: str


def write_manifest(
    folder: Path,
    extra: dict[str, Any] | None = None,
    known: Mapping[str, Content] | None = None,
    done: Mapping[str, Entry] | None = None,
) -> None:
    """Record every file of `folder` durably; `extra` is JSON stored with the list.

    Files with `known` content, by relative name, are not read. Files in `done`, the entries of
    other processes, are not touched. Each file and folder is flushed to the disk first, then the
    manifest is renamed into place. Raises OSError, and ValueError for links.
    """
    names = list_files(folder)
    done = done or {}
    linked = [name for name in names if (folder / name).is_symlink()]
    if linked:
        raise ValueError(f"expected plain files in {folder}, got the link {linked[0]!r}: remove it")
    own = durable_entries(folder, [name for name in names if name not in done], known or {})
    files = {name: own[name] if name in own else done[name] for name in names}
    for parent, _, _ in os.walk(folder):
        inner = Folder(parent)
        inner.sync()
        inner.close()
    payload = {"format": FORMAT, "extra": extra or {}, "files": files}
    replace_file(folder / MANIFEST_NAME, _encode(payload))


def durable_entries(
    folder: Path, names: Sequence[str], known: Mapping[str, Content] | None = None
) -> dict[str, Entry]:
    """Flush files to the disk, and return their entries; files of `known` content are not read."""
    contents = known or {}
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        entries = pool.map(lambda name: _durable(folder / name, contents.get(name)), names)
        return dict(zip(names, entries, strict=True))


def drop(folder: Path, prefixes: Sequence[str]) -> None:
    """Remove files with these prefixes from the manifest, after which they may be deleted."""
    payload = read_manifest(folder)
    if payload["extra"].get(DROPPED) != list(prefixes):
        files = {n: x for n, x in payload["files"].items() if not n.startswith(tuple(prefixes))}
        extra = payload["extra"] | {DROPPED: list(prefixes)}
        replace_file(folder / MANIFEST_NAME, _encode(payload | {"files": files, "extra": extra}))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return `format`, `extra` and `files`. Raises ManifestError if missing or damaged."""
    try:
        raw = read_plain(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except OSError as error:
        why = error.strerror or str(error)
        raise ManifestError(f"cannot be read ({why}); the folder is unfinished") from error
    try:
        payload = json.loads(raw)
        claimed = payload.pop(_SELF_HASH)
        # Encoding again catches blanks and repeated keys, which parsing accepts.
        intact = _encode(payload) == raw and payload["format"] == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"is damaged: {type(error).__name__} while parsing it") from error
    if not intact:
        raise ManifestError(f"is damaged: its own SHA-256 does not match the recorded {claimed}")
    match payload:
        case {"files": dict(files), "extra": dict()}:
            for name, entry in files.items():
                match entry:
                    case {"bytes": int(), "sha256": str()}:
                        continue
                raise ManifestError(f"is damaged: no size and SHA-256 of {name}, got {entry!r}")
            return payload
    raise ManifestError("is damaged: expected a list of files")


def verify(folder: Path, *, contents: bool = True, part: tuple[int, int] = (0, 1)) -> list[Problem]:
    """Compare a folder with its manifest, and return the problems; [] if whole.

    Without `contents`, only names and sizes are compared. `part` (i, n) compares every n-th file,
    from the i-th on. Dropped files do not count.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [Problem(folder, "", "expected a folder, found none")]
    try:
        payload = read_manifest(folder)
    except ManifestError as error:
        return [Problem(folder, MANIFEST_NAME, str(error))]
    listed = payload["files"]
    dropped = tuple(payload["extra"].get(DROPPED, ()))
    present = {name for name in list_files(folder) if not name.startswith(dropped)}
    names = sorted({*listed, *present})[part[0] :: part[1]]

    def fault(name: str) -> str | None:
        if name not in listed:
            return "not listed in the manifest"
        if name not in present:
            return "listed in the manifest, but missing"
        return _fault(folder / name, listed[name], contents)

    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        faults = pool.map(fault, names)
        return [
            Problem(folder, n, result) for n, result in zip(names, faults, strict=True) if result
        ]


def list_files(folder: Path) -> list[str]:
    """Return the sorted relative names of files and links below `folder`, except its manifest."""
    names = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        names += [Path(parent, name).relative_to(folder).as_posix() for name in files + links]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _durable(path: Path, known: Content | None) -> Entry:
    """Flush a file to the disk and return its entry."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _entry(path) if known is None else {"bytes": known.num_bytes, "sha256": known.sha256}


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _fault(path: Path, expected: Entry, contents: bool) -> str | None:
    try:
        if path.is_symlink():
            return "expected a plain file, found a link"
        if not path.is_file():
            return "expected a plain file, found something else"
        if (size_bytes := path.stat().st_size) != expected["bytes"]:
            return f"expected {expected['bytes']} bytes, found {size_bytes}"
        if contents and (result := _entry(path)["sha256"]) != expected["sha256"]:
            return f"expected SHA-256 {expected['sha256']}, found {result}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _encode(payload: dict[str, Any]) -> bytes:
    plain = json.dumps(payload, sort_keys=True).encode()
    sealed = payload | {_SELF_HASH: hashlib.sha256(plain).hexdigest()}
    return (json.dumps(sealed, sort_keys=True, indent=1) + "\n").encode()
