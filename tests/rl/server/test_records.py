"""Records outlive their process; only their own paths lead to folders."""

from __future__ import annotations

import errno
import os
import shutil
import uuid

import pytest

from reprise.rl.http.account import Busy
from reprise.rl.server.records import FILE, CheckpointPath, Records, no_space


def path_of(name):
    return f"tinker://r/weights/{name}"


def folder_of(name):
    return uuid.uuid5(uuid.NAMESPACE_URL, name).hex


def put_checkpoint(records, name, expires_s=None):
    """Write a folder and its record."""
    folder = records.folder / "checkpoints" / folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    record = {
        **{"path": path_of(name), "run": "r", "kind": "weights", "name": name},
        **{"folder": folder.name, "time_s": 1.0, "public": False, "bytes": 1000},
        **{"expires_s": expires_s, "user_metadata": {}},
    }
    records.put("checkpoints", path_of(name), record)


def folders(records):
    return [path.name for path in (records.folder / "checkpoints").iterdir()]


def test_records_are_read_back_up_to_a_line_that_was_cut(tmp_path):
    records = Records(tmp_path)
    records.put("sessions", "s", {"finished": False})
    records.change("sessions", "s", finished=True)
    for name in ("one", "two"):
        put_checkpoint(records, name)
    records.drop_checkpoint(path_of("one"))
    assert folders(records) == [folder_of("two")]
    records.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"table": "sessions", "key": "t", "rec')  # a kill
    again = Records(tmp_path)
    assert again.sessions == {"s": {"finished": True}}
    assert [c["name"] for c in again.run_checkpoints("r")] == ["two"]
    again.put("sessions", "u", {"finished": False})
    again.close()
    assert list(Records(tmp_path).sessions) == ["s", "u"]


def test_a_folder_has_one_server(tmp_path):
    records = Records(tmp_path)
    with pytest.raises(ValueError, match="another server has"):
        Records(tmp_path)
    records.close()
    Records(tmp_path).close()


@pytest.mark.parametrize(
    "text",
    ["", "tinker://", "tinker://a/b", "tinker://a/other/b", "file://a/weights/b", "a/weights/b"]
    + ["tinker://a/weights/../b", "tinker://a/weights/b/c"],
)
def test_other_paths_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match="expected tinker://RUN/weights/NAME"):
        CheckpointPath.parse(text)
    records = Records(tmp_path)
    with pytest.raises(ValueError, match="found no checkpoint"):
        records.checkpoint_folder("tinker://../weights/x")


def test_a_path_reads_back():
    path = CheckpointPath("s:train:0", "sampler_weights", "a.b")
    assert CheckpointPath.parse(str(path)) == path


class Disk:
    """Writes of this process's records, of which some fail; `room` bytes are left."""

    def __init__(self, monkeypatch, room=None):
        self.room = room
        self._write = os.write
        self._sync = os.fsync
        self.fails_to_sync = False
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.sync)

    def write(self, file, data):
        if self.room is None:
            return self._write(file, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.room])
        self.room -= written
        return written

    def sync(self, file):
        if self.fails_to_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(file)


def tables(records):
    return {t: dict(getattr(records, t)) for t in ("sessions", "samplers", "runs", "checkpoints")}


@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_full_disk_changes_nothing_and_later_writes_are_whole(tmp_path, monkeypatch, room):
    records = Records(tmp_path)
    records.put("sessions", "a", {"finished": False})
    disk, size = Disk(monkeypatch, room), (tmp_path / FILE).stat().st_size
    for change in (
        lambda: records.put("sessions", "b", {"finished": False}),
        lambda: records.change("sessions", "a", finished=True),
    ):
        with pytest.raises(OSError, match="No space left") as caught:
            change()
        assert "delete checkpoints" in no_space(caught.value, tmp_path)
    assert records.sessions == {"a": {"finished": False}}
    assert (tmp_path / FILE).stat().st_size == size
    disk.room = None
    records.put("sessions", "c", {"finished": False})
    before = tables(records)
    records.close()
    assert tables(Records(tmp_path)) == before


def test_a_record_that_did_not_reach_the_disk_is_taken_back(tmp_path, monkeypatch):
    records = Records(tmp_path)
    disk = Disk(monkeypatch)
    disk.fails_to_sync = True
    with pytest.raises(OSError, match="Input/output"):
        records.put("sessions", "a", {"finished": False})
    assert not records.sessions and (tmp_path / FILE).stat().st_size == 0


def test_a_torn_line_that_could_not_be_cut_is_cut_before_the_next_one(tmp_path, monkeypatch):
    records, truncate = Records(tmp_path), os.ftruncate
    disk = Disk(monkeypatch, 10)

    def refused(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refused)
        with pytest.raises(OSError, match="No space left"):
            records.put("sessions", "a", {"finished": False})
    assert os.ftruncate is truncate
    disk.room = None
    records.put("sessions", "b", {"finished": False})
    records.close()
    assert list(Records(tmp_path).sessions) == ["b"]


def test_checkpoints_are_deleted_on_a_full_disk(tmp_path, monkeypatch):
    """The record follows once there is room; a start drops one whose folder is gone."""
    records = Records(tmp_path)
    for name in ("one", "two"):
        put_checkpoint(records, name)
    disk = Disk(monkeypatch, 0)
    records.drop_checkpoint(path_of("one"))
    assert list(records.checkpoints) == [path_of("two")] and folders(records) == [folder_of("two")]
    records.close()
    disk.room = None
    again = Records(tmp_path)
    assert list(again.checkpoints) == [path_of("two")]
    assert b"one" not in (tmp_path / FILE).read_bytes()


def test_a_late_line_of_a_deletion_spares_the_checkpoint_saved_meanwhile(tmp_path, monkeypatch):
    records = Records(tmp_path)
    put_checkpoint(records, "one")
    disk, remove = Disk(monkeypatch, 0), shutil.rmtree

    def slowly(folder, **options):
        remove(folder, **options)
        disk.room = None
        put_checkpoint(records, "one")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", slowly)
        records.drop_checkpoint(path_of("one"))
    records.close()
    assert list(Records(tmp_path).checkpoints) == [path_of("one")]


def test_a_start_sweeps_what_a_kill_has_left(tmp_path):
    """Folders without a record go, but no folder of another name; so do records without one."""
    records = Records(tmp_path)
    for name in ("one", "two"):
        put_checkpoint(records, name)
    records.close()
    kept = tmp_path / "checkpoints" / "mine"
    for folder in (folder_of("partial"), folder_of("half") + ".deleted", kept.name):
        (tmp_path / "checkpoints" / folder).mkdir()
    shutil.rmtree(tmp_path / "checkpoints" / folder_of("two"))
    again = Records(tmp_path)
    assert list(again.checkpoints) == [path_of("one")]
    assert sorted(folders(again)) == sorted([folder_of("one"), "mine"])
    again.close()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="expected the folder of 1 checkpoints, found none"):
        Records(tmp_path)


def test_the_file_is_written_anew_with_the_live_records(tmp_path, monkeypatch):
    monkeypatch.setattr("reprise.rl.server.records.SLACK_BYTES", 1000)
    records = Records(tmp_path)
    records.put("sessions", "a", {"finished": False})
    for i in range(200):
        records.change("sessions", "a", finished=bool(i % 2))
        assert (tmp_path / FILE).stat().st_size < 2500
    records.put("sessions", "b", {"finished": False})
    records.close()
    again = Records(tmp_path)
    assert (tmp_path / FILE).stat().st_size == again.live_bytes < 200
    assert again.sessions == {"a": {"finished": True}, "b": {"finished": False}}
    for i in range(50):
        again.put("sessions", f"{i}", {"finished": False})
    again.close()
    assert len(Records(tmp_path).sessions) == 52


def test_without_room_for_a_new_file_the_old_one_stays(tmp_path, monkeypatch):
    records = Records(tmp_path)
    for i in range(20):
        records.put("sessions", "a", {"finished": bool(i % 2)})
    records.close()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    again = Records(tmp_path)
    again.put("sessions", "b", {"finished": False})
    again.close()
    assert list(Records(tmp_path).sessions) == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE, "server.lock"]


def test_records_after_a_compaction_whose_folder_cannot_be_synced_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("reprise.rl.server.records.SLACK_BYTES", 100)
    records = Records(tmp_path)
    records.put("sessions", "a", {"finished": False})
    failed = []

    def fail(self):
        failed.append(self)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(Records, "_sync_folder", fail)
    for i in range(50):
        records.change("sessions", "a", finished=bool(i % 2))
    records.put("sessions", "b", {"finished": False})
    assert failed, "it has been compacted"
    records.close()
    monkeypatch.undo()
    assert list(Records(tmp_path).sessions) == ["a", "b"]


def test_live_records_have_a_bound_of_bytes(tmp_path):
    records = Records(tmp_path, max_bytes=1000)
    with pytest.raises(Busy, match="records are full"):
        for i in range(100):
            records.put("sessions", f"{i}", {"finished": False})
    assert records.is_nearly_full and records.live_bytes <= 1000
    records.write([("sessions", key, None) for key in list(records.sessions)])
    records.put("sessions", "a", {"finished": False})
    assert len(records.sessions) == 1 and records.live_bytes < 100


@pytest.mark.parametrize(
    "line",
    [b"xxx", bytes(50), b'{"table": "_mutex", "key": "a", "record": {}}', b'{"a": 1}', b"[1]"]
    + [b'{"table": "sessions", "key": "a", "record": {}}', b"[" * 10_000, b"1" * 5000, b"null"]
    + [b'{"table": "sessions", "key": 1, "record": {"finished": true}}', b"\xff\xfe", b'"a"'],
)
def test_a_damaged_line_is_named_with_its_file(tmp_path, line):
    good = b'{"table": "sessions", "key": "a", "record": {"finished": false}}\n'
    (tmp_path / FILE).write_bytes(good + line + b"\n" + good)
    with pytest.raises(ValueError, match=rf"{FILE}, line 2: expected a record, got .*delete the"):
        Records(tmp_path)
    (tmp_path / FILE).write_bytes(good + line)  # cut by a kill
    assert list(Records(tmp_path).sessions) == ["a"]


def test_a_record_leads_to_no_other_folder(tmp_path):
    records = Records(tmp_path)
    put_checkpoint(records, "one")
    records.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(folder_of("one").encode(), b"../../elsewhere"))
    with pytest.raises(ValueError, match="expected the name of a folder"):
        Records(tmp_path)
