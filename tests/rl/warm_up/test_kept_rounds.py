"""Tables of round seconds for other runs: whose they are, and what is ignored."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from reprise.rl.warm_up import kept_rounds
from reprise.spec.round_times import RoundTimes

TIMES = RoundTimes({(4, 4, 64): 1.0, (4, 16, 64): 2.5})
SHAPE = {"model": "small", "buckets": [[4, 4, 64], [4, 16, 64]]}


def read(folder, shape=SHAPE):
    said = []
    return kept_rounds.read(folder, shape, said.append), said


@pytest.fixture
def kept(tmp_path):
    """A folder with one table, and its file."""
    kept_rounds.write(tmp_path / "cache", TIMES, SHAPE, pytest.fail)
    [file] = (tmp_path / "cache").iterdir()
    return tmp_path / "cache", file


def test_a_table_is_found_by_the_settings_it_was_made_for(kept, monkeypatch):
    folder, _ = kept
    table, said = read(folder)
    assert table.rows() == TIMES.rows() and not said
    assert read(folder, SHAPE | {"model": "large"}) == (None, [])
    assert read(folder / "missing") == (None, [])
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert read(folder) == (None, [])


def test_a_new_table_replaces_the_old_one_and_leaves_nothing_else(kept):
    folder, file = kept
    kept_rounds.write(folder, RoundTimes(TIMES.rounds | {(4, 4, 64): 9.0}), SHAPE, pytest.fail)
    assert [*folder.iterdir()] == [file] and read(folder)[0](4, 4, 64) == 9.0


def test_runs_that_write_at_once_tear_nothing(kept):
    folder, file = kept

    def write(i):
        more = RoundTimes(TIMES.rounds | {(4, 4, 64): 1.0 + i})
        kept_rounds.write(folder, more, SHAPE, pytest.fail)
        return read(folder)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(write, range(64)))
    assert all(table is not None and not said for table, said in found)
    assert [*folder.iterdir()] == [file]


def changed(file, **more):
    return json.dumps(json.loads(file.read_text()) | more)


@pytest.mark.parametrize(
    "rows",
    [
        *([], None, 7, {"rows": 1}, [[1]], [["packed round", 4, 4, 64, "x"]]),
        *([["packed round", 4, 4, 64, -1.0]], [["packed round", 4, 0, 64, 1.0]]),
    ],
)
def test_impossible_seconds_are_ignored_with_a_line(kept, rows):
    folder, file = kept
    file.write_text(changed(file, rows=rows))
    table, [line] = read(folder)
    assert table is None and "rounds are measured anew" in line and file.name in line


@pytest.mark.parametrize("text", ["", "{", "[" * 99_999, "\x00", '{"settings": {}, "rows": []}'])
def test_a_damaged_or_foreign_file_is_ignored_with_a_line(kept, text):
    folder, file = kept
    file.write_text(text)
    table, [line] = read(folder)
    assert table is None and line.startswith(f"ignoring {file}")


def test_a_large_file_and_a_link_are_not_read(kept, tmp_path):
    folder, file = kept
    content = file.read_bytes()
    file.write_bytes(content + b" " * kept_rounds.MAX_BYTES)
    assert read(folder)[0] is None
    file.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    os.symlink(tmp_path / "elsewhere", file)
    table, [line] = read(folder)
    assert table is None and "ignoring" in line


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    kept_rounds.write(tmp_path / "file", TIMES, SHAPE, said.append)
    assert len(said) == 1 and "not kept for other runs" in said[0]


def test_there_is_a_folder_only_where_programs_are_kept(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for value, found in ((None, None), ("gs://bucket/cache", None), (tmp_path, tmp_path)):
            jax.config.update("jax_compilation_cache_dir", None if value is None else str(value))
            assert kept_rounds.folder() == found
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
