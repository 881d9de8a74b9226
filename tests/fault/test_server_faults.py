"""Servers that are killed, half of them with a full disk, lose nothing that they answered."""

from __future__ import annotations

import collections
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import child_environment

from benchmarks.soak import server
from reprise.rl.server.records import Records

ROOT = Path(__file__).parents[2]


@pytest.mark.fault
def test_kills_and_full_disks_lose_no_record():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "server_faults", "--count", "6", "--json"],
        cwd=ROOT,
        env=child_environment(1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["states"] == 6 and found["answers_compared"] > 6 and found["saves"] > 0
    assert not any(found[kind] for kind in (*server.LOST, "failures", "tracebacks"))


def saved(records, path, version, folder):
    place = records.folder / "checkpoints" / folder
    place.mkdir(parents=True)
    (place / "weights").write_bytes(bytes(server.CHECKPOINT_BYTES))
    record = {
        **{"path": path, "run": "r", "kind": "weights", "name": "0", "folder": folder},
        **{"time_s": 1.0, "public": False, "bytes": 1, "expires_s": None},
        "user_metadata": {"v": str(version)},
    }
    records.put("checkpoints", path, record)


@pytest.mark.parametrize(
    ("versions", "sessions", "lost"),
    [
        ({1, 2}, {"s"}, {}),
        ({2}, {"s"}, {"answers_that_differ": 1}),
        ({None}, {"s"}, {"answers_that_differ": 1}),
        ({1}, {"s", "t"}, {"answers_that_differ": 1}),
    ],
)
def test_a_lost_answer_is_found(tmp_path, versions, sessions, lost):
    with contextlib.closing(Records(tmp_path)) as records:
        records.put("sessions", "s", {"finished": False})
        saved(records, "tinker://r/weights/0", 1, "a" * 32)
    writer = SimpleNamespace(versions={"tinker://r/weights/0": versions}, sessions=sessions)
    found = server._compared(tmp_path, [writer])
    assert {k: found[k] for k in server.LOST if found[k]} == lost


def test_a_folder_that_is_not_whole_is_found(tmp_path):
    with contextlib.closing(Records(tmp_path)) as records:
        saved(records, "tinker://r/weights/0", 1, "a" * 32)
    place = tmp_path / "checkpoints" / ("a" * 32)
    (place / "weights").write_bytes(b"")
    found = collections.Counter(server._compared(tmp_path, []))
    assert found["folders_that_differ"] == 1
    shutil.copytree(place, place.with_name("mine"))
    assert server._compared(tmp_path, [])["folders_that_differ"] == 2
