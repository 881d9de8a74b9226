"""Rows of data files by number, without holding the files in memory.

JSON lines are read at their offsets, parquet by row group (the latest groups are cached), Arrow
files through a memory map. A row is plain JSON: text, finite numbers, lists, dicts.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextlib
import dataclasses
import decimal
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from reprise.rl.data import arrow_values, unpack

MAX_ROW_BYTES = 2**24  # of a line, or of a file with one JSON object
MAX_ROW_VALUES = 2**21
MAX_LIST_BYTES = 2**28  # of a file with a JSON list, which is held in memory as text
MAX_LIST_ROWS = 2**22
MAX_ROWS = 2**25  # of the files of a task; the places of rows are held in memory
MAX_UNPACKED_BYTES = 2**30  # of a parquet row group, and of compressed Arrow data
MAX_DEPTH = 100  # of nested lists and objects
CACHE_BYTES = 2**29  # of unpacked row groups


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive rows of one file: `read(i)` returns row i, `where(i)` names it in messages."""

    num_rows: int
    read: Callable[[int], Any]
    where: Callable[[int], str]


class Rows:
    """The rows of all parts in order; each row is checked when it is read."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(part.num_rows for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = self._place(index)
        row = part.read(inner)
        where = part.where(inner)
        if not isinstance(row, dict):
            hint = "; a list is read by json:FILE" if isinstance(row, list) else ""
            raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}{hint}")
        return _plain(row, where)

    def where(self, index: int) -> str:
        """Return the file and the line or row, for messages."""
        part, inner = self._place(index)
        return part.where(inner)

    def _place(self, index: int) -> tuple[Part, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def open_rows(form: str, paths: Sequence[Path]) -> Rows:
    """Open the files of one task, all of one format. Raises ValueError that names the file."""
    if form == "parquet":
        return Rows(_parquet_groups(paths))
    if form == "datasets":
        return Rows([part for path in paths for part in _arrow_batches(path)])
    is_list = form == "json" and len(paths) == 1 and _holds_list(paths[0])
    open_json = {"jsonl": _json_lines, "json": _json_list if is_list else _json_file}
    parts = list[Part]()
    num_rows = 0
    for path in paths:
        parts.append(open_json[form](path))
        num_rows += parts[-1].num_rows
        if num_rows > MAX_ROWS:
            raise ValueError(f"{path}: expected at most {MAX_ROWS:,} rows in all: name fewer files")
    return Rows(parts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return plain JSON, with dates and decimals as text, and NaN and infinities as None.

    Raises ValueError for bytes and for lists that are nested too deeply.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: expected at most {MAX_DEPTH} nested lists and objects")
    if isinstance(value, dict):
        return {str(k): _plain(v, f"{where}: {k!s:.80}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        raise ValueError(f"{where}: holds bytes (an image?), expected text: leave the column out")
    return str(value)


# --- JSON -------------------------------------------------------------------------------


def _json_lines(path: Path) -> Part:
    """Return the lines of a file, without blank lines."""
    starts = array.array("q")
    numbers = array.array("q")
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_ROW_BYTES + 1), b""), 1):
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(f"{path}:{number}: expected at most {MAX_ROW_BYTES:,} bytes")
            if not line.isspace():
                if len(starts) == MAX_ROWS:
                    raise ValueError(f"{path}: expected at most {MAX_ROWS:,} rows: split the file")
                starts.append(start)
                numbers.append(number)
            start += len(line)

    def read(index: int) -> Any:
        with path.open("rb") as file:
            file.seek(starts[index])
            line = file.readline(MAX_ROW_BYTES)
        is_list = line.lstrip()[:1] == b"["
        expected = "one JSON object a line" + "; a list is read by json:FILE" * is_list
        return parse_json(line, where(index), expected)

    def where(index: int) -> str:
        return f"{path}:{numbers[index]}"

    return Part(len(starts), read, where)


def _json_file(path: Path) -> Part:
    def read(_: int) -> Any:
        return read_json(path, MAX_ROW_BYTES, "one JSON object a file")

    return Part(1, read, lambda _: str(path))


def _json_list(path: Path) -> Part:
    """Return the rows of a file with one list, held as text: objects take 24 times the memory."""
    expected = "a list (write a longer one as JSON lines)"
    text = _read(path, MAX_LIST_BYTES, expected)
    try:
        starts, ends = _items(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected {expected}: {error}") from error

    def read(index: int) -> Any:
        return parse_json(text[starts[index] : ends[index]], where(index), "a JSON object")

    def where(index: int) -> str:
        return f"{path} row {index}"

    return Part(len(starts), read, where)


# A string, or a structural character. Possessive: a string without an end is tried once.
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[\]{},]', re.DOTALL)


def _items(text: bytes) -> tuple[array.array[int], array.array[int]]:
    """Return the start and end offsets of the items of a JSON list. Raises ValueError."""
    starts = array.array("q")
    ends = array.array("q")
    depth = 0
    start = 0
    for token in _TOKENS.finditer(text):
        sign = token[0]
        place = token.start()
        if sign in (b"[", b"{"):
            depth += 1
            start = start or place + 1
            continue
        if place - start > MAX_ROW_BYTES or len(starts) >= MAX_LIST_ROWS:
            raise ValueError(f"at most {MAX_LIST_ROWS:,} rows of at most {MAX_ROW_BYTES:,} bytes")
        depth -= sign in (b"]", b"}")
        if depth == 0 and text[place + 1 :].strip():
            raise ValueError(f"more than one value: {text[place + 1 :].strip()[:40]!r} after it")
        if depth == 0 and not starts and not text[start:place].strip():
            return starts, ends
        if depth == 0 or (depth == 1 and sign == b","):
            starts.append(start)
            ends.append(place)
            start = place + 1
        if depth == 0:
            return starts, ends
    raise ValueError("no ] at its end")


def _holds_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2**16).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def read_json(path: Path, max_bytes: int, expected: str) -> Any:
    """Parse a file. Raises ValueError if it is larger than `max_bytes`, and as `parse_json`."""
    return parse_json(_read(path, max_bytes, expected), str(path), expected)


def _read(path: Path, max_bytes: int, expected: str) -> bytes:
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"{path}: expected {expected} of at most {max_bytes:,} bytes")
    return text


def parse_json(text: bytes, where: str, expected: str) -> Any:
    """Parse JSON. Raises ValueError for NaN, infinities, duplicate names, and text not in UTF-8."""
    try:
        return json.loads(
            text.decode("utf-8-sig"),
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=_no_duplicates,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected {expected}: {error}") from error


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"expected finite numbers, got {text:.40}")
    if number == 0 and re.match(r"[-0.]*[1-9]", text):
        raise ValueError(f"expected 0 or numbers that a float can hold, got {text:.40}")
    return number


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        ((name, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {name!r:.80} is in it twice")
    return row


# --- Arrow ------------------------------------------------------------------------------


def _arrow_part(
    path: Path, kind: str, first_row: int, num_rows: int, load: Callable[[], Any]
) -> Part:
    """Return the rows of a batch or table; its first row has the number `first_row` in the file."""

    def read(index: int) -> Any:
        with _readable(path, kind):
            row = load().slice(index, 1)
            row.validate(full=True)  # a damaged file may have any offsets
            columns = dict(zip(row.schema.names, row.columns, strict=True))
            if len(columns) != row.num_columns:
                raise ValueError(f"{where(index)}: two columns have one name: rename one")
            num_values = sum(_each(columns, arrow_values.num_values, where(index)).values())
            if row.nbytes > MAX_ROW_BYTES or num_values > MAX_ROW_VALUES:
                raise ValueError(
                    f"{where(index)}: expected at most {MAX_ROW_BYTES:,} bytes and "
                    f"{MAX_ROW_VALUES:,} values, got {row.nbytes:,} and {num_values:,}"
                )
            if not row.num_rows:
                raise ValueError(f"{where(index)} is missing, although the file counts it")
            lists = _each(columns, arrow_values.values, where(index))
            return {name: values[0] for name, values in lists.items()}

    def where(index: int) -> str:
        return f"{path} row {first_row + index}"

    return Part(num_rows, read, where)


def _each(columns: Mapping[str, Any], read: Callable[[Any], T], where: str) -> dict[str, T]:
    """Read each column. Raises ValueError that names a column that cannot be read."""
    result = dict[str, T]()
    for name, column in columns.items():
        try:
            result[name] = read(column)
        except (_pyarrow().ArrowException, ValueError, OverflowError) as error:
            raise ValueError(
                f"{where}: column {name!r:.80} ({column.type!s:.80}) {_reason(error)}: leave it out"
            ) from error
    return result


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("has ") else f"cannot be read: {text:.200}"


def _arrow_batches(path: Path) -> list[Part]:
    """Return the batches of a memory-mapped Arrow file or stream."""
    parts = list[Part]()
    first_row = 0
    with _readable(path, "Arrow"):
        unpack.check_batches(path, MAX_UNPACKED_BYTES)
        for batch in unpack.open_batches(_pyarrow().memory_map(str(path))):
            load = partial(lambda batch: batch, batch)
            parts.append(_arrow_part(path, "Arrow", first_row, batch.num_rows, load))
            first_row += batch.num_rows
    return parts


def _parquet_groups(paths: Sequence[Path]) -> list[Part]:
    """Return the row groups of parquet files, which share one cache."""
    cache = _GroupCache()
    parts = list[Part]()
    for path in paths:
        with _readable(path, "parquet"):
            footer = _pyarrow().parquet.read_metadata(path)
            first_row = 0
            for group in range(footer.num_row_groups):
                about = footer.row_group(group)
                if about.total_byte_size > MAX_UNPACKED_BYTES:
                    raise ValueError(
                        f"row group {group} has {about.total_byte_size:,} bytes, expected at most "
                        f"{MAX_UNPACKED_BYTES:,}: write it again with a row_group_size"
                    )
                load = partial(cache.table, path, group)
                parts.append(_arrow_part(path, "parquet", first_row, about.num_rows, load))
                first_row += about.num_rows
    return parts


class _GroupCache:
    """The unpacked row groups that were read last. Thread-safe."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Path, int], Any] = {}  # the group used last is at the end
        self._num_bytes = 0
        self._lock = threading.Lock()

    def table(self, path: Path, group: int) -> Any:
        with self._lock:
            if (table := self._tables.pop((path, group), None)) is None:
                table = unpack.row_group(path, group, MAX_UNPACKED_BYTES)
                self._num_bytes += table.nbytes
            self._tables[path, group] = table
            while len(self._tables) > 1 and self._num_bytes > CACHE_BYTES:
                self._num_bytes -= self._tables.pop(next(iter(self._tables))).nbytes
            return table


def _pyarrow() -> Any:
    import pyarrow.ipc
    import pyarrow.parquet  # slow to import

    return pyarrow


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Turn errors about a file into a ValueError that names the file."""
    try:
        yield
    except (_pyarrow().ArrowException, ValueError, OSError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: not a readable {kind} file: {error}") from error
