"""Rows by number: what the writers wrote, in any order; and files that are broken."""

import datetime
import decimal
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from reprise.models.child import Child
from reprise.rl.data import rows
from reprise.rl.data.files import find
from reprise.rl.data.rows import open_rows, parse_json

ROWS = [
    {"prompt": f"é{i}", "answer": str(i), "more": {"n": i, "list": [i, None]}} for i in range(25)
]


def found(target, split, form):
    return open_rows(*find(target, split, (form,)))


def read(opened):
    """All rows, the last one first."""
    return [opened[i] for i in reversed(range(len(opened)))][::-1]


# --- JSON lines -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b" \t", b'{"a": 1}', b' {"a": "\xc3\xa9"}\r', b"{}"])),
    st.booleans(),
)
def test_lines_are_found_and_blank_ones_skipped(tmp_path_factory, lines, ends):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    opened = open_rows("jsonl", [path])
    wanted = [(i, json.loads(line)) for i, line in enumerate(lines, 1) if line.strip()]
    assert read(opened) == [row for _, row in wanted]
    assert [opened.where(i) for i in range(len(opened))] == [f"{path}:{i}" for i, _ in wanted]


def test_several_files_are_one(tmp_path):
    for name, part in (("a", ROWS[:3]), ("b", []), ("c", ROWS[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    opened = found(str(tmp_path), None, "jsonl")
    assert read(opened) == ROWS
    assert opened.where(3).endswith("c.jsonl:1")


def test_a_line_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    path = tmp_path / "a.jsonl"
    for before in (b"", b'{"a": 1}\n{"b": 2}\n'):
        path.write_bytes(before + b"x" * 99 + b"\n" + before)
        open_rows("jsonl", [path])
        path.write_bytes(before + b"x" * 100 + b"\n" + before)
        line = before.count(b"\n") + 1
        with pytest.raises(ValueError, match=rf"a.jsonl:{line}: expected at most 100 b"):
            open_rows("jsonl", [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": NaN}', "finite numbers, got NaN"),
        (b'{"a": -Infinity}', "finite numbers, got -Infinity"),
        (b'{"a": 1e999}', "finite numbers, got 1e999"),
        (b'{"a": -0.1e-999}', "that a float can hold, got -0.1e-999"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is in it twice"),
        (b'{"a": "\xff"}', "utf-8"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b"[" * 100_000, "recursion|Recursion|one JSON object"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "at most 100 nested lists and objects"),
        (b"[1, 2]", "got list; a list is read by json:FILE"),
        (b'[\n{"a": 1}]', "one JSON object a line; a list is read by json:FILE"),
        (b'[{"a": 1},\n{"a": 2}]', "one JSON object a line; a list is read by json:FILE"),
    ],
)
def test_what_is_not_a_row_is_refused(tmp_path, text, message):
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(ValueError, match=f"a:1: .*({message})"):
        open_rows("jsonl", [tmp_path / "a"])[0]


def test_a_byte_order_mark_is_no_error():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "a:1", "") == {"a": 1}


def test_many_names_of_which_one_is_there_twice_are_refused_at_once():
    names = ",".join(f'"{i}": 1' for i in range(300_000))
    with pytest.raises(ValueError, match="a:1: .*'7' is in it twice"):
        parse_json(f'{{{names}, "7": 1}}'.encode(), "a:1", "")


def test_a_file_for_each_row(tmp_path):
    for i, row in enumerate(ROWS):
        (tmp_path / f"{i:02d}.json").write_text(json.dumps(row))
    opened = found(str(tmp_path), None, "json")
    assert read(opened) == ROWS and opened.where(2) == str(tmp_path / "02.json")
    (tmp_path / "02.json").write_bytes(b" " * (rows.MAX_ROW_BYTES + 1))
    with pytest.raises(ValueError, match="02.json: expected one JSON object a file of at most"):
        opened[2]


def test_a_list_of_rows_in_one_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(" \n" + json.dumps(ROWS, indent=1))
    opened = found(str(path), None, "json")
    assert read(opened) == ROWS and opened.where(3) == f"{path} row 3"
    path.write_text("[{}, 3, " + '{"a":' * 102 + "1" + "}" * 102 + "]")
    opened = open_rows("json", [path])
    assert opened[0] == {}
    with pytest.raises(ValueError, match="a.json row 1: expected a JSON object, got int"):
        opened[1]
    with pytest.raises(ValueError, match="a.json row 2: .*at most 100 nested lists and objects"):
        opened[2]
    path.write_text("[{}")
    with pytest.raises(ValueError, match="a.json: expected a list .*: "):
        open_rows("json", [path])
    monkeypatch.setattr(rows, "MAX_LIST_BYTES", 2)
    with pytest.raises(
        ValueError, match="a.json: expected a list .write a longer one .* of at most 2 bytes"
    ):
        open_rows("json", [path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{}, {}, {}]", "at most 2 rows of at most 40 bytes"),
        ('[{"a": "' + "x" * 50 + '"}]', "at most 2 rows of at most 40 bytes"),
        ('[{"a": 1}] {}', "more than one value: b'{}' after it"),
        ('[{"a": "]"}, "' + '\\"' * 9, "no ] at its end"),
    ],
)
def test_a_list_is_bounded(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(rows, "MAX_LIST_ROWS", 2)
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 40)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"a.json: expected a list .*: {message}"):
        open_rows("json", [tmp_path / "a.json"])


def test_items_of_a_list_are_found_by_structure_alone(tmp_path):
    wanted = [{"a": '"],{[\\', "b": [[1, {"c": []}], {}]}, {"é": "}"}, {}]
    for text in (json.dumps(wanted), json.dumps(wanted, indent=2) + "\n", "[ ]"):
        (tmp_path / "a.json").write_text(text)
        opened = open_rows("json", [tmp_path / "a.json"])
        assert read(opened) == (wanted if len(text) > 3 else [])
    (tmp_path / "a.json").write_text("[{},]")
    with pytest.raises(ValueError, match="a.json row 1: expected a JSON object: "):
        open_rows("json", [tmp_path / "a.json"])[1]


def test_rows_are_bounded_in_number(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROWS", 3)
    for name, count in (("a", 3), ("b", 1), ("c", 4)):
        (tmp_path / f"{name}.jsonl").write_text("{}\n\n" * count)
    assert len(open_rows("jsonl", [tmp_path / "a.jsonl"])) == 3
    for names in ("ab", "c"):
        with pytest.raises(ValueError, match=f"{names[-1]}.jsonl: expected at most 3 rows"):
            open_rows("jsonl", [tmp_path / f"{name}.jsonl" for name in names])


# --- Arrow ------------------------------------------------------------------------------


def test_parquet_by_row_groups(tmp_path, monkeypatch):
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table.slice(0, 12), tmp_path / "a.parquet", row_group_size=5)
    parquet.write_table(table.slice(12), tmp_path / "b.parquet", row_group_size=4)
    monkeypatch.setattr(rows, "CACHE_BYTES", 1000)  # two or three of seven groups
    cache = rows._GroupCache()
    monkeypatch.setattr(rows, "_GroupCache", lambda: cache)
    opened = found(str(tmp_path), None, "parquet")
    assert read(opened) == ROWS
    order = np.random.default_rng(0).permutation(25).tolist()
    assert [opened[i] for i in order] == [ROWS[i] for i in order]
    assert 1 <= len(cache._tables) < 7
    assert opened.where(11) == f"{tmp_path}/a.parquet row 11"
    assert opened.where(17) == f"{tmp_path}/b.parquet row 5"


def test_parquet_after_the_folder_of_the_process_changed(tmp_path, monkeypatch):
    for name in "ab":  # the child process starts in the first folder
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        parquet.write_table(pyarrow.Table.from_pylist([{"name": name}]), "rows.parquet")
        assert read(found("rows.parquet", None, "parquet")) == [{"name": name}]


@pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file])
def test_arrow_files_and_streams(tmp_path, new):
    table = pyarrow.Table.from_pylist(ROWS)
    with new(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    opened = open_rows("datasets", [tmp_path / "a.arrow"])
    assert read(opened) == ROWS and opened.where(24) == f"{tmp_path}/a.arrow row 24"


def test_what_datasets_saves_is_read(tmp_path):
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[::-1])
    train.save_to_disk(tmp_path / "one", num_shards=3)
    both = datasets.DatasetDict(train=train, test=test.shuffle(seed=0).select(range(7)))
    both.save_to_disk(tmp_path / "both")

    def saved(name, split=None):
        return read(found(str(tmp_path / name), split, "datasets"))

    assert len(find(str(tmp_path / "one"), None, ("datasets",))[1]) == 3
    assert saved("one") == saved("both") == saved("both", "train") == saved("both/train") == ROWS
    assert saved("both", "test") == both["test"].to_list()
    with pytest.raises(ValueError, match="splits train, test: choose with .split="):
        saved("both", "dev")
    with pytest.raises(ValueError, match="is one data set .* not 'test'"):
        saved("one", "test")


def test_values_become_plain_json(tmp_path):
    day = datetime.date(2026, 1, 2)
    row = {
        "day": day,
        "at": datetime.datetime(2026, 1, 2, 3, 4),
        "price": decimal.Decimal("1.50"),
        "scores": [1.5, float("nan"), float("inf")],
        "deep": [{"day": day}],
        "flag": True,
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (got,) = read(open_rows("parquet", [tmp_path / "a.parquet"]))
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert got == {
        "day": "2026-01-02",
        "at": "2026-01-02 03:04:00",
        "price": "1.50",
        "scores": [1.5, None, None],
        "deep": [{"day": "2026-01-02"}],
        "flag": True,
    }
    parquet.write_table(pyarrow.table({"image": [{"bytes": b"\x89PNG"}]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="b.parquet row 0: image: bytes: holds bytes"):
        read(open_rows("parquet", [tmp_path / "b.parquet"]))


def test_numbers_of_single_precision_stay_as_they_were_written(tmp_path):
    table = pyarrow.table({"x": pyarrow.array([0.1, None, 5.0], pyarrow.float32())})
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for form, path in (("parquet", "a.parquet"), ("datasets", "a.arrow")):
        rows = read(open_rows(form, [tmp_path / path]))
        assert [row["x"] for row in rows] == [0.1, None, 5.0]


@pytest.mark.parametrize("form", ["parquet", "datasets"])
@pytest.mark.parametrize("size", [0, 3, 40, -20])
def test_a_file_that_is_cut_off_is_named(tmp_path, form, size):
    path = tmp_path / "a"
    table = pyarrow.Table.from_pylist(ROWS)
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{path}.*(not a readable|Parquet)"):
        read(open_rows(form, [path]))


def test_a_parquet_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 100)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: .*row group 0 has .*row_group_size"):
        open_rows("parquet", [tmp_path / "a.parquet"])


@pytest.mark.parametrize("form", ["parquet", "datasets"])
def test_a_small_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, form):
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 2**24)
    path, table = tmp_path / "a", pyarrow.table({"prompt": ["a" * 2**12] * 2**14})
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(
            str(path), table.schema, options=ipc.IpcWriteOptions(compression="zstd")
        ) as writer:
            writer.write_table(table, max_chunksize=1000)
    assert path.stat().st_size < 2**16
    with pytest.raises(ValueError, match=f"{path}: .*expected at most 16,777,216"):
        open_rows(form, [path])[0]


def test_a_dictionary_is_unpacked_within_the_limit_of_a_child(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_UNPACKED_BYTES", 2**24)
    monkeypatch.setattr(rows.unpack, "_child", lambda _: Child("reprise.rl.data.unpack", 2**28, 60))
    text = pyarrow.array(["x" * 2**22])
    notes = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(255, np.int32)), text)
    parquet.write_table(
        pyarrow.table({"a": notes}), tmp_path / "a", compression="zstd", store_schema=False
    )
    assert (tmp_path / "a").stat().st_size < 2**16
    with pytest.raises(ValueError, match="a: .*row group 0: expected at most 16,777,216 bytes"):
        open_rows("parquet", [tmp_path / "a"])[0]


def test_values_that_take_no_bytes_are_counted(tmp_path):
    length = rows.MAX_ROW_VALUES
    offsets = pyarrow.array([0, 3, length + 3], pyarrow.int32())
    nothing = pyarrow.ListArray.from_arrays(offsets, pyarrow.nulls(length + 3))
    with ipc.new_stream(str(tmp_path / "a"), pyarrow.schema({"a": nothing.type})) as writer:
        writer.write_batch(pyarrow.record_batch({"a": nothing}))
    opened = open_rows("datasets", [tmp_path / "a"])
    assert opened[0] == {"a": [None] * 3}
    with pytest.raises(ValueError, match="a row 1: expected at most .* values, got 4 and"):
        opened[1]


def test_arrow_offsets_that_lie_are_refused(tmp_path):
    """A column of text that is said to end far behind its characters."""
    path, length = tmp_path / "a.arrow", 0x1234
    table = pyarrow.table({"prompt": ["a" * length]})
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    right, lie = (np.array([0, end], "<i4").tobytes() for end in (length, 2**30))
    before, found, after = path.read_bytes().rpartition(right)
    assert found
    path.write_bytes(before + lie + after)
    opened = open_rows("datasets", [path])
    with pytest.raises(ValueError, match="a.arrow: not a readable Arrow"):
        opened[0]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
def test_damaged_files_give_rows_or_a_sentence(tmp_path, form):
    """Bytes changed, numbers made huge, pieces cut out: 150 files of each format."""
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    table = pyarrow.Table.from_pylist(ROWS)
    if form == "jsonl":
        whole.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif form == "parquet":
        parquet.write_table(table, whole, row_group_size=10)
    else:
        with ipc.new_stream(str(whole), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        data = bytearray(whole.read_bytes())
        place = int(rng.integers(len(data)))
        change = [bytes([rng.integers(256)]), b"\xff\xff\xff\x7f", b"\0\0\0\x40", b""]
        data[place : place + int(rng.integers(1, 9))] = change[rng.integers(4)]
        damaged.write_bytes(data)
        try:
            for row in read(open_rows(form, [damaged])):
                assert isinstance(row, dict)
        except ValueError as error:
            assert str(damaged) in str(error)
            refused += 1
    assert refused > 20


def test_a_row_that_a_file_counts_and_does_not_have_is_refused():
    part = rows._arrow_part(Path("x"), "parquet", 3, 1, lambda: pyarrow.table({"a": []}))
    with pytest.raises(ValueError, match="x row 3 is missing, although the file counts it"):
        part.read(0)
