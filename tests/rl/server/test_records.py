"""Records outlive their process; only their own paths lead to folders."""

from __future__ import annotations

import pytest

from rl.server.records import FILE, CheckpointPath, Records


def test_records_are_read_back_up_to_a_line_that_was_cut(tmp_path):
    records = Records(tmp_path)
    records.put("sessions", "s", {"finished": False})
    records.change("sessions", "s", finished=True)
    for name in ("one", "two"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        path = f"tinker://r/weights/{name}"
        records.put("checkpoints", path, {"run": "r", "folder": name, "path": path})
    records.drop_checkpoint("tinker://r/weights/one")
    assert not (tmp_path / "checkpoints" / "one").exists()
    records.close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"table": "sessions", "key": "t", "rec')  # a kill
    again = Records(tmp_path)
    assert again.sessions == {"s": {"finished": True}}
    assert [c["folder"] for c in again.run_checkpoints("r")] == ["two"]
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
