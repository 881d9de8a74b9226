"""Records outlive their process; only their own paths lead to folders."""

from __future__ import annotations

import uuid

import pytest

from rl.server.records import FILE, CheckpointPath, Records


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
