"""The sessions, samplers, training runs and checkpoints of a server, in a file that outlives it.

Each change is one line of JSON, appended; reading them in turn gives the tables of now.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}
FILE = "records.jsonl"
Record = dict[str, Any]


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

    Only paths of the table lead to a folder, so that no text of a client names another one. Any
    thread may call.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.RLock()
        self.sessions: dict[str, Record] = {}
        self.samplers: dict[str, Record] = {}
        self.runs: dict[str, Record] = {}
        self.checkpoints: dict[str, Record] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        whole = self._read(path)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--folder: another server has {folder}") from None
        self._file.truncate(whole)  # a line that a kill has cut

    def close(self) -> None:
        self._file.close()

    def put(self, table: str, key: str, record: Mapping[str, Any]) -> None:
        """Add a record or replace it."""
        self._write({"table": table, "key": key, "record": dict(record)})

    def change(self, table: str, key: str, **fields: Any) -> None:
        """Change fields of a record."""
        with self._lock:
            self.put(table, key, getattr(self, table)[key] | fields)

    def drop_checkpoint(self, path: str) -> None:
        """Delete a checkpoint with its folder."""
        folder = self.checkpoint_folder(path)
        self._write({"table": "checkpoints", "key": path, "record": None})
        shutil.rmtree(folder, ignore_errors=True)

    def checkpoint_folder(self, path: str) -> Path:
        """Return the folder of a checkpoint. Raises ValueError if there is none."""
        if path not in self.checkpoints:
            raise ValueError(f"found no checkpoint {path!r:.200}")
        return self.folder / "checkpoints" / self.checkpoints[path]["folder"]

    def run_checkpoints(self, run: str) -> list[Record]:
        return [r for r in self.checkpoints.values() if r["run"] == run]

    def _write(self, change: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(change).encode() + b"\n")
            self._file.flush()
            name = change["table"]
            changed = dict(getattr(self, name))  # another thread may read the old table
            _apply(changed, change)
            setattr(self, name, changed)

    def _read(self, path: Path) -> int:
        """Apply the changes of a file; return the bytes of its whole lines."""
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                change = json.loads(line)
                _apply(getattr(self, change["table"]), change)
                whole += len(line)
        return whole


def _apply(table: dict[str, Record], change: Mapping[str, Any]) -> None:
    key, record = change["key"], change["record"]
    if record is None:
        table.pop(key, None)
    else:
        table[key] = record
