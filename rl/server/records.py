"""Persistent records of the sessions, samplers, training runs and checkpoints of a server.

Each change appends one line of JSON to a file; replaying all lines gives the current tables. A
start rewrites the file with only the live records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reprise.rl.http.account import Busy
from reprise.rl.runtime.progress import say

SCHEME = "tinker://"
TRAINING = "weights"
SAMPLER = "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}
FILE = "records.jsonl"
LOCK = "server.lock"
CHECKPOINTS = "checkpoints"
DELETED = ".deleted"  # suffix for the folder name of a deleted checkpoint
FOLDER = re.compile(r"[0-9a-f]{32}")
FIELDS: Mapping[str, set[str]] = {
    "sessions": {"finished"},
    "samplers": {"session", "path"},
    "runs": {"session", "rank", "targets", "last_s", "user_metadata"},
    "checkpoints": {
        *("path", "run", "kind", "name", "folder", "time_s", "public", "bytes", "expires_s"),
        "user_metadata",
    },
}
MAX_BYTES = 2**26  # of the lines of live records
SLACK_BYTES = 2**24  # of old lines before the file is rewritten
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Record = dict[str, Any]
Change = tuple[str, str, Record | None]  # table, key, and record (None: deleted)


def no_space(error: BaseException | None, folder: Path) -> str | None:
    """Return an error message if a full disk caused `error`, directly or indirectly, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return (
                f"the server has no space left ({os.strerror(error.errno)}): delete checkpoints, "
                f"or make room at its --folder {folder.name}"
            )
        error = error.__cause__ or error.__context__
    return None


@dataclasses.dataclass(frozen=True)
class CheckpointPath:
    """The parts of `tinker://run/kind/name`."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Return the parts of a path. Raises ValueError."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise ValueError(
                f"expected tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME, got "
                f"{text!r:.200}"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Records:
    """Tables of records by id: `sessions`, `samplers`, `runs`, and `checkpoints` by path.

    Folder names come only from records, so that clients cannot name other folders. Any thread may
    call; to iterate over a table, copy it to a list first. A table changes after the line is on
    disk. `now_s` returns the time, for checkpoints that expire.
    """

    def __init__(
        self,
        folder: Path,
        now_s: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.folder = folder
        self.now_s = now_s
        self._max_bytes = max_bytes
        self._mutex = threading.RLock()
        self.sessions: dict[str, Record] = {}
        self.samplers: dict[str, Record] = {}
        self.runs: dict[str, Record] = {}
        self.checkpoints: dict[str, Record] = {}
        self._of_runs: dict[str, dict[str, Record]] = {}  # by run: checkpoints by path
        self.live_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file = -1
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--folder: another server has {self.folder}") from None
        path = self.folder / FILE
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._sync_folder()
        self._file_bytes = self._read(path)
        self._is_torn = False
        os.ftruncate(self._file, self._file_bytes)  # drop a line that a kill truncated
        self._sweep()
        self._compact_above = 2 * self.live_bytes + SLACK_BYTES
        if self._file_bytes != self.live_bytes:
            self._compact()

    @property
    def is_nearly_full(self) -> bool:
        return self.live_bytes > self._max_bytes * 3 // 4

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def put(self, table: str, key: str, record: Mapping[str, Any]) -> None:
        """Add or replace a record. Raises Busy or OSError without changing anything."""
        self.write([(table, key, dict(record))])

    def change(self, table: str, key: str, **fields: Any) -> None:
        """Change fields of a record."""
        with self._mutex:
            self.put(table, key, getattr(self, table)[key] | fields)

    def write(self, changes: Sequence[Change]) -> None:
        """Apply changes with one write. Raises Busy or OSError without changing anything."""
        lines = [_line(*change) for change in changes]
        with self._mutex:
            growth = sum(map(self._growth, changes))
            if growth > 0 and self.live_bytes + growth > self._max_bytes:
                raise Busy("the server's records are full: delete checkpoints, finish sessions")
            self._append(b"".join(lines))
            for change in changes:
                self._apply(change)
            if self._file_bytes > self._compact_above:
                self._compact()

    def drop_checkpoint(self, path: str) -> None:
        """Delete a checkpoint and its folder, even on a full disk.

        The folder is renamed first, because a start drops records without a folder.
        """
        tombstones: list[Change] = [("checkpoints", path, None)]
        with self._mutex:
            record = self.checkpoints.get(path)
            if record is None:
                return
            if (sampler := record.get("sampling_session")) in self.samplers:
                tombstones.append(("samplers", sampler, None))
            lines = b"".join(_line(*change) for change in tombstones)
            folder = self.folder / CHECKPOINTS / record["folder"]
            gone = folder.with_name(folder.name + DELETED)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(gone)
            is_written = self._try_append(lines)
            for change in tombstones:
                self._apply(change)
        shutil.rmtree(gone, ignore_errors=True)
        with self._mutex:
            if not is_written and path not in self.checkpoints:
                self._try_append(lines)

    def checkpoint(self, path: str) -> Record:
        """Return the record of a checkpoint. Raises ValueError if it is missing or expired."""
        record = self.checkpoints.get(path)
        if record is None or is_over(record, self.now_s()):
            raise ValueError(f"found no checkpoint {path!r:.200}")
        return record

    def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint. Raises ValueError if it is missing or expired."""
        return self.folder / CHECKPOINTS / self.checkpoint(path)["folder"]

    def expire(self) -> None:
        """Delete expired checkpoints."""
        now_s = self.now_s()
        for path in [path for path, c in list(self.checkpoints.items()) if is_over(c, now_s)]:
            self.drop_checkpoint(path)

    def run_checkpoints(self, run: str) -> list[Record]:
        return list(self._of_runs.get(run, {}).values())

    def of_session(self, table: str, session: str) -> list[str]:
        """Return the keys of the samplers or runs of a session."""
        return [k for k, r in list(getattr(self, table).items()) if r["session"] == session]

    # -- the file --------------------------------------------------------------------------

    def _growth(self, change: Change) -> int:
        """Return the number of bytes that a change adds to the live lines."""
        table, key, record = change
        old = getattr(self, table).get(key)
        added = len(_line(*change)) if record is not None else 0
        return added - (len(_line(table, key, old)) if old is not None else 0)

    def _apply(self, change: Change) -> None:
        table, key, record = change
        self.live_bytes += self._growth(change)
        records = getattr(self, table)
        old = records.get(key)
        if record is None:
            records.pop(key, None)
        else:
            records[key] = record
        if table == "checkpoints":
            run = (record or old or {"run": ""})["run"]
            own = self._of_runs.setdefault(run, {})
            own.pop(key, None)
            if record is not None:
                own[key] = record
            elif not own:
                del self._of_runs[run]

    def _append(self, lines: bytes) -> None:
        """Write all lines, or raise OSError and leave the file unchanged."""
        if self._is_torn:
            os.ftruncate(self._file, self._file_bytes)
        self._is_torn = True
        try:
            _write(self._file, lines)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._file_bytes)
                self._is_torn = False
            raise
        self._is_torn = False
        self._file_bytes += len(lines)

    def _try_append(self, lines: bytes) -> bool:
        try:
            self._append(lines)
        except OSError as error:
            say(f"warning: {self.folder / FILE}: {error.strerror}: a deletion waits", sys.stderr)
            return False
        return True

    def _read(self, path: Path) -> int:
        """Apply the changes in a file; return the bytes in complete lines. Raises ValueError."""
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    say(f"warning: {path}, line {number}: cut by a kill, left out", sys.stderr)
                    break
                self._apply(_parsed(line, path, number))
                whole += len(line)
        return whole

    def _sweep(self) -> None:
        """Delete folders without a record, and records without a folder."""
        folder = self.folder / CHECKPOINTS
        wanted = set[str]()
        if self.checkpoints and not folder.is_dir():
            raise ValueError(
                f"{folder}: expected the folder of {len(self.checkpoints)} checkpoints, found "
                f"none: restore it, or delete {self.folder / FILE}"
            )
        for path, record in list(self.checkpoints.items()):
            if (folder / record["folder"]).is_dir():
                wanted.add(record["folder"])
            else:
                say(f"warning: {path}: its folder is gone, and so is its record", sys.stderr)
                self._apply(("checkpoints", path, None))
        for found in folder.iterdir() if folder.is_dir() else ():
            is_own = FOLDER.fullmatch(found.name.removesuffix(DELETED))
            if is_own and found.name not in wanted:
                shutil.rmtree(found, ignore_errors=True)

    def _compact(self) -> None:
        """Rewrite the file with only the live records; keep the old file if this fails."""
        path = self.folder / FILE
        new = self.folder / f"{FILE}.new"
        changes = [(table, *entry) for table in FIELDS for entry in getattr(self, table).items()]
        file = -1
        try:
            file = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            _write(file, b"".join(_line(*change) for change in changes))
            os.replace(new, path)
        except OSError as error:
            say(f"warning: {new}: {error.strerror}: {FILE} stays as it is", sys.stderr)
            with contextlib.suppress(OSError):
                os.close(file)
                new.unlink(missing_ok=True)
        else:
            os.close(self._file)
            self._file = file
            self._is_torn = False
            self._file_bytes = self.live_bytes = os.fstat(file).st_size
            with contextlib.suppress(OSError):  # renamed, so this file is current
                self._sync_folder()
        self._compact_above = 2 * self._file_bytes + SLACK_BYTES

    def _sync_folder(self) -> None:
        """Make the names of new files survive a power loss."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write(file: int, data: bytes) -> None:
    """Write and sync all of `data`. Raises OSError, possibly after a partial write."""
    if os.write(file, data) < len(data):  # if space is left, Linux writes up to 2 GiB in one call
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def is_over(checkpoint: Record, now_s: float) -> bool:
    """Return whether a checkpoint has expired."""
    return checkpoint["expires_s"] is not None and checkpoint["expires_s"] < now_s


def _line(table: str, key: str, record: Record | None) -> bytes:
    return json.dumps({"table": table, "key": key, "record": record}).encode() + b"\n"


def _parsed(line: bytes, path: Path, number: int) -> Change:
    """Return the change in a line. Raises ValueError with the line number."""
    try:
        change = json.loads(line)
        table = change["table"]
        key = change["key"]
        record = change["record"]
        missing = FIELDS[table] - record.keys() if record is not None else set()
        if missing or not isinstance(key, str):
            raise ValueError(f"expected {', '.join(sorted(missing)) or 'a key'}")
        if table == "checkpoints" and record and not FOLDER.fullmatch(record["folder"]):
            raise ValueError("expected the name of a folder")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}: expected a record, got {line!r:.80} ({error}): restore the "
            "file from a copy, or delete the line"
        ) from None
    return table, key, record
