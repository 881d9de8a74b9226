"""The folder of compiled programs is its user's alone, and stays within bounds."""

from __future__ import annotations

import os
import stat

import jax
import pytest

from reprise.rl.runtime import parallel_compile


@pytest.fixture
def unset(tmp_path, monkeypatch):
    """No cache is set, as for a user; the home is ours."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_one_folder_for_all_runs_of_a_user(unset):
    assert parallel_compile.keep_programs() is None
    folder = jax.config.jax_compilation_cache_dir
    assert folder == str(parallel_compile.own_folder()) and folder.startswith(str(unset))
    for path in (folder, unset / "reprise"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


def test_the_users_settings_win(unset, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "set"))
    assert parallel_compile.keep_programs() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "set")
    assert not unset.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("level", ["cache", "reprise", "compiled"])
def test_a_folder_that_others_can_write_to_is_not_used(unset, mode, level):
    own = parallel_compile.own_folder()
    {"cache": unset, "reprise": unset / "reprise", "compiled": own}[level].chmod(mode)
    warning = parallel_compile.keep_programs()
    assert "can be written by others" in warning and "JAX_COMPILATION_CACHE_DIR" in warning
    assert jax.config.jax_compilation_cache_dir is None


def test_another_users_folder_a_link_and_a_file_are_not_used(unset, tmp_path, monkeypatch):
    own = parallel_compile.own_folder()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert "can be written by others" in parallel_compile.keep_programs()
    own.rmdir()
    own.symlink_to(tmp_path)
    assert "is no folder" in parallel_compile.keep_programs()
    own.unlink()
    own.write_text("")
    assert "is no folder" in parallel_compile.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_run_works_without_a_program_cache(unset, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert "every run compiles them again" in parallel_compile.keep_programs()


def test_the_oldest_programs_are_pruned_first(tmp_path):
    for i in range(5):
        (tmp_path / str(i)).write_bytes(bytes(100))
        os.utime(tmp_path / str(i), (0, i))
    parallel_compile.prune(tmp_path, 350)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "4"]
    parallel_compile.prune(tmp_path, 350)
    assert len(os.listdir(tmp_path)) == 3
