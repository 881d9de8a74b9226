"""A folder by its handle: what is written lands in it, whatever links lie there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from reprise.models.folder import Folder, LinkError, held, replace_file


@pytest.fixture
def victim(tmp_path):
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("precious")
    (outside / "inner" / "file").write_text("precious")
    return outside


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "folder", create=True)


def unharmed(outside) -> bool:
    files = sorted(p for p in outside.rglob("*") if p.is_file())
    return len(files) == 2 and all(p.read_text() == "precious" for p in files)


def test_files_are_written_read_listed_and_removed(folder):
    folder.replace("a", "text")
    folder.replace("a", b"bytes")
    with folder.append("b") as file:
        file.write(b"1")
    with folder.append("b") as file:
        file.write(b"2")
    assert folder.read("a") == b"bytes" and folder.read("b") == b"12"
    assert folder.names() == ["a", "b"] and folder.size_bytes("b") == 2
    inner = folder.folder("inner")
    inner.replace("c", "3")
    folder.rename("inner", "moved")
    assert folder.folder("moved", create=False).read("c") == b"3"
    folder.remove("moved")
    folder.remove("a")
    assert folder.names() == ["b"]
    replace_file(folder.path / "d", "4")
    with held(folder.path) as again:
        assert again.read("d") == b"4"


OPENED = {
    "read": lambda f: f.read("x"),
    "append": lambda f: f.append("x"),
    "lock": lambda f: f.lock("x"),
    "folder": lambda f: f.folder("x"),
    "inner": lambda f: f.folder("x", create=False),
}


@pytest.mark.parametrize("target", ["file", "missing", "inner", "."])
@pytest.mark.parametrize("call", OPENED.values(), ids=OPENED)
def test_nothing_is_opened_through_a_link(folder, victim, call, target):
    (folder.path / "x").symlink_to(victim / target)
    with pytest.raises(LinkError, match="got a link"):
        call(folder)
    assert unharmed(victim)


@pytest.mark.parametrize("target", ["file", "missing", "inner"])
@pytest.mark.parametrize("name", ["x", ".x.tmp"])
def test_replacing_a_link_replaces_the_link(folder, victim, name, target):
    (folder.path / name).symlink_to(victim / target)
    folder.replace("x", "mine")
    assert folder.read("x") == b"mine" and folder.names() == ["x"]
    assert unharmed(victim)


def test_removing_a_link_leaves_what_it_points_to(folder, victim):
    (folder.path / "x").symlink_to(victim)
    inner = folder.folder("inner")
    (inner.path / "link").symlink_to(victim)
    folder.remove("x")
    folder.remove("inner")
    assert folder.names() == [] and unharmed(victim)


def test_a_hard_link_is_not_appended_to(folder, victim):
    os.link(victim / "file", folder.path / "x")
    with folder.append("x") as file:
        file.write(b"!")
    assert folder.read("x") == b"precious!" and unharmed(victim)


@pytest.mark.parametrize("call", [OPENED["read"], OPENED["append"]], ids=["read", "append"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(folder, call):
    os.mkfifo(folder.path / "x")
    with pytest.raises(LinkError, match="got something else"):
        call(folder)
    os.unlink(folder.path / "x")
    (folder.path / "x").mkdir()
    with pytest.raises(LinkError, match="got something else"):
        call(folder)


def test_names_with_a_path_are_refused(folder):
    for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b"):
        with pytest.raises(ValueError, match="name of an entry"):
            folder.replace(name, "x")
        with pytest.raises(ValueError, match="name of an entry"):
            folder.folder(name)


def test_a_folder_that_was_moved_away_is_not_written_by_its_path(folder, victim):
    folder.check_in_place()
    folder.path.rename(folder.path.with_name("moved"))
    with pytest.raises(LinkError, match="no longer"):
        folder.check_in_place()
    folder.path.symlink_to(victim)
    with pytest.raises(LinkError, match="no longer"):
        folder.check_in_place()
    folder.replace("x", "here")  # by its handle it is still the folder
    assert (folder.path.with_name("moved") / "x").read_text() == "here" and unharmed(victim)


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    folder.replace("x", "old")

    def full_disk(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        folder.replace("x", "new")
    assert folder.names() == ["x"] and folder.read("x") == b"old"


def test_a_file_is_linked_or_copied(folder, tmp_path, monkeypatch):
    source = Folder(tmp_path / "source", create=True)
    source.replace("x", "content")
    folder.link(source, "x")
    assert os.stat(folder.path / "x").st_nlink == 2

    def no_links(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    folder.link(source, "x", "y")
    assert folder.read("y") == b"content" and os.stat(folder.path / "y").st_nlink == 1


def test_only_one_process_holds_a_lock(folder):
    script = "import sys\nfrom reprise.models.folder import Folder\n"
    script += "print(Folder(sys.argv[1]).lock('x'))"

    def other() -> str:
        command = [sys.executable, "-c", script, str(folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with folder.lock("x"):
        assert other() == "None"
    assert other() != "None"


def test_handles_are_closed(tmp_path):
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        Folder(tmp_path).folder("inner").replace("x", "y")
    assert len(os.listdir("/dev/fd")) <= before + 1


def test_new_files_follow_the_umask(folder):
    before = os.umask(0o027)
    try:
        folder.replace("x", "y")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(folder.path / "x").st_mode) == 0o640
