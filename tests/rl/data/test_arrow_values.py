"""Columns of every type: read as the number or text that they state, or refused by name."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from reprise.rl.data.arrow_values import num_values, values
from reprise.rl.data.rows import open_rows

DAY = datetime.date(2026, 1, 2)
MAP = pa.map_(pa.string(), pa.int64())
HALF = np.float16(0.1)
STATED = {
    "int8": (pa.array([-5], pa.int8()), -5),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "float16": (pa.array([HALF], pa.float16()), 0.1),
    "float32": (pa.array([0.1], pa.float32()), 0.1),
    "float64": (pa.array([0.1]), 0.1),
    "float32 in a struct": (pa.array([{"a": 0.1}], pa.struct([("a", pa.float32())])), {"a": 0.1}),
    "float32 in a list": (pa.array([[0.1, None]], pa.list_(pa.float32())), [0.1, None]),
    "float32 in two": (pa.array([[[0.1], None]], pa.list_(pa.list_(pa.float32()))), [[0.1], None]),
    "float16 in a list": (pa.array([[HALF]], pa.large_list(pa.float16())), [0.1]),
    "float32 in a fixed list": (pa.array([[0.1, 0.2]], pa.list_(pa.float32(), 2)), [0.1, 0.2]),
    "float32 in a view": (pa.array([[0.1]], pa.list_view(pa.float32())), [0.1]),
    "float32 as a dictionary": (pa.array([0.1], pa.float32()).dictionary_encode(), 0.1),
    "decimal": (pa.array([Decimal("-0.050")], pa.decimal128(10, 3)), "-0.050"),
    "small decimal": (pa.array([Decimal("1e-7")], pa.decimal256(50, 7)), "0.0000001"),
    "decimal of thousands": (pa.array([Decimal(15000)], pa.decimal128(10, -3)), "15000"),
    "decimal as a dictionary": (
        pa.array([Decimal("1.50")], pa.decimal128(9, 2)).dictionary_encode(),
        "1.50",
    ),
    "bool": (pa.array([True]), True),
    "null": (pa.nulls(1), None),
    "date": (pa.array([DAY]), "2026-01-02"),
    "date of milliseconds": (pa.array([DAY], pa.date64()), "2026-01-02"),
    "timestamp": (pa.array([1], pa.timestamp("s")), "1970-01-01 00:00:01"),
    "nanoseconds": (pa.array([1000], pa.timestamp("ns")), "1970-01-01 00:00:00.000001"),
    "one nanosecond": (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    "time": (pa.array([61], pa.time32("s")), "00:01:01"),
    "time of nanoseconds": (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
    "duration": (pa.array([61], pa.duration("s")), "0:01:01"),
    "duration of nanoseconds": (pa.array([61 * 10**9], pa.duration("ns")), "0:01:01"),
    "large text": (pa.array(["x"], pa.large_string()), "x"),
    "text view": (pa.array(["x"], pa.string_view()), "x"),
    "map": (pa.array([[("k", 1), ("l", None)]], MAP), {"k": 1, "l": None}),
    "map that is absent": (pa.array([None], MAP), None),
    "map of numbers": (pa.array([[(1, 0.1)]], pa.map_(pa.int64(), pa.float32())), {"1": 0.1}),
    "map in a list": (pa.array([[[("k", 1)]]], pa.list_(MAP)), [{"k": 1}]),
    "map in a struct": (pa.array([{"m": [("k", 1)]}], pa.struct([("m", MAP)])), {"m": {"k": 1}}),
}
REFUSED = {
    "key that comes twice": (pa.array([[("k", 1), ("k", 2)]], MAP), "has a key twice"),
    "far year": (pa.array([10**12], pa.timestamp("s")), "cannot be read"),
    "nanoseconds of a duration": (pa.array([1], pa.duration("ns")), "would lose data"),
    "interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "not supported"),
    "union": (
        pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
        "not supported",
    ),
}


def read(tmp_path, column, form):
    table = pa.table({"prompt": ["q"], "more": column, "answer": ["a"]})
    if form == "parquet":
        parquet.write_table(table, tmp_path / form)
    else:
        with ipc.new_stream(str(tmp_path / form), table.schema) as writer:
            writer.write_table(table)
    return open_rows(form, [tmp_path / form])[0]


@pytest.mark.parametrize("name", STATED)
def test_a_column_is_read_as_the_number_or_text_that_it_states(tmp_path, name):
    column, wanted = STATED[name]
    has_parquet = name != "decimal of thousands"
    for form in ("datasets", "parquet") if has_parquet else ("datasets",):
        row = read(tmp_path, column, form)
        assert row == {"prompt": "q", "more": wanted, "answer": "a"}
        assert type(row["more"]) is type(wanted)
        assert json.loads(json.dumps(row, allow_nan=False)) == row


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_that_states_neither_is_named(tmp_path, name):
    column, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"row 0: column 'more' \(.*{reason}.*: leave it out"):
        read(tmp_path, column, "datasets")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([["q"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    with ipc.new_stream(str(tmp_path / "a"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match="row 0: two columns have one name"):
        open_rows("datasets", [tmp_path / "a"])[0]


def test_maps_of_a_slice_are_counted_and_read_by_themselves():
    column = pa.array([[("a", 1)] * 5, [("b", 2)], None, [("c", 3), ("d", 4)]], MAP)
    assert values(column.slice(1, 3)) == [{"b": 2}, None, {"c": 3, "d": 4}]
    assert [num_values(column.slice(i, 1)) for i in range(4)] == [11, 3, 1, 5]
