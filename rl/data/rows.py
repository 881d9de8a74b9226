"""Rows of data files by their number, without holding the files in memory.

JSON lines are found by their offsets, parquet rows by row group (the last few are kept),
Arrow files are mapped. Invariant: a row is plain JSON: text, finite numbers, lists, dicts.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl.data.files import Found

MOST_ROW_BYTES = 2**24  # of a line or a file of JSON
MOST_LIST_BYTES = 2**28  # of a file with a list of rows, which is held in memory
MOST_GROUP_BYTES = 2**32  # of a parquet row group, unpacked
MOST_DEPTH = 100  # of lists and objects in a row
CACHE_BYTES = 2**29  # of unpacked row groups

_CHUNK_BYTES = 2**24
_BLANK = tuple(b" \t\r\n\v\f")


class Rows(Protocol):
    """Rows by number; `where` says where one stands, for messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


def open_rows(found: Found) -> Rows:
    """Open the files of one task. Raises ValueError that names the file."""
    if found.format == "jsonl":
        parts = [JsonLines(path) for path in found.paths]
        return parts[0] if len(parts) == 1 else Joined(parts)
    if found.format == "json" and len(found.paths) == 1 and _is_list(found.paths[0]):
        return JsonList(found.paths[0])
    readers: dict[str, Callable[[Sequence[Path]], Rows]] = {
        "json": JsonFiles,
        "parquet": ParquetRows,
        "datasets": ArrowRows,
    }
    return readers[found.format](found.paths)


class Joined:
    """Rows of several files, one behind the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts, self._ends = parts, _ends(len(part) for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = _place(self._ends, index)
        return self._parts[part][inner]

    def where(self, index: int) -> str:
        part, inner = _place(self._ends, index)
        return self._parts[part].where(inner)


def _ends(lengths: Any) -> list[int]:
    return list(itertools.accumulate(lengths))


def _place(ends: Sequence[int], index: int) -> tuple[int, int]:
    """The part that row `index` is in, and its number there."""
    part = bisect.bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


# --- JSON -------------------------------------------------------------------------------


class JsonLines:
    """One JSON object a line; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, first, size = _line_starts(path)
        ends = np.append(starts[1:], size)
        kept = ~np.isin(first, _BLANK)
        kept[first == ord("\n")] = False
        with path.open("rb") as file:
            for line in np.flatnonzero(np.isin(first, _BLANK) & (first != ord("\n"))):
                file.seek(starts[line])
                kept[line] = bool(file.read(ends[line] - starts[line]).strip())
        self._numbers = np.flatnonzero(kept)
        self._starts, self._ends = starts[kept], ends[kept]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = int(self._starts[index]), int(self._ends[index])
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        return parse_object(line, self.where(index), "expected one JSON object a line")

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index] + 1}"


def _line_starts(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """The offset of every line, int64 [n], its first byte, uint8 [n], and the file's size."""
    starts, first = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
    offset, begins, last, lines = 0, True, 0, 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data = np.frombuffer(chunk, np.uint8)
            found = np.flatnonzero(data == ord("\n")) + 1
            if begins:
                found = np.append(0, found)
            begins = chunk[-1:] == b"\n"
            found = found[found < len(data)]
            longest = np.diff(np.concatenate([[last], found + offset, [offset + len(data)]]))
            if longest.max() > MOST_ROW_BYTES:
                raise ValueError(
                    f"{path}:{lines + int(longest.argmax())}: expected lines of at most "
                    f"{MOST_ROW_BYTES:,} bytes"
                )
            if len(found):
                last = int(found[-1]) + offset
            starts.append(found + offset)
            first.append(data[found])
            lines, offset = lines + len(found), offset + len(data)
    return np.concatenate(starts), np.concatenate(first), offset


class JsonFiles:
    """One JSON object a file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._paths[index].open("rb") as file:
            text = file.read(MOST_ROW_BYTES + 1)
        if len(text) > MOST_ROW_BYTES:
            raise ValueError(f"{self.where(index)}: expected at most {MOST_ROW_BYTES:,} bytes")
        return parse_object(text, self.where(index), "expected one JSON object a file")

    def where(self, index: int) -> str:
        return str(self._paths[index])


class JsonList:
    """A file with one list of JSON objects; it is held in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if (size := path.stat().st_size) > MOST_LIST_BYTES:
            raise ValueError(
                f"{path}: expected a list of at most {MOST_LIST_BYTES:,} bytes, got {size:,}: "
                "write it as JSON lines"
            )
        self._rows = _parse(path.read_bytes(), str(path), "expected a list of JSON objects")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _object(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path} row {index}"


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_CHUNK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def parse_object(text: bytes, where: str, expected: str) -> dict[str, Any]:
    """Return a JSON object; raises ValueError for anything else."""
    return _object(_parse(text, where, expected), where, text.count(b"[") + text.count(b"{"))


def _object(row: Any, where: str, depth: int = MOST_DEPTH + 1) -> dict[str, Any]:
    """Return the row if it is an object that is not too deep; `depth` is at least how deep."""
    if not isinstance(row, dict):
        mend = "; a list is read by json:FILE" if isinstance(row, list) else ""
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}{mend}")
    return row if depth <= MOST_DEPTH else plain(row, where)


def _parse(text: bytes, where: str, expected: str) -> Any:
    """Return what JSON text holds. Raises ValueError for what JSON forbids.

    That is NaN and infinities, a name twice in one object, text that is not UTF-8.
    """
    try:
        return json.loads(
            text.decode("utf-8-sig"),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_no_name_twice,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {expected}: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice in it")
    return row


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value as plain JSON: dates and decimals as text, NaN and infinities as None.

    Raises ValueError for bytes, which are no text, and for lists and objects that are too deep.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth > MOST_DEPTH:
        raise ValueError(f"{where}: expected at most {MOST_DEPTH} lists and objects in one another")
    if isinstance(value, dict):
        return {str(k): plain(v, f"{where}: {k!s:.80}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth + 1) for item in value]
    if isinstance(value, bytes):
        raise ValueError(f"{where}: holds bytes (an image?), expected text: leave the column out")
    return str(value)


# --- Arrow ------------------------------------------------------------------------------


class ParquetRows:
    """Rows of parquet files; the row groups read last are kept, unpacked."""

    def __init__(self, paths: Sequence[Path]) -> None:
        parquet = _pyarrow("parquet")
        self._groups: list[tuple[Path, int]] = []
        self._footers: dict[Path, Any] = {}
        lengths: list[int] = []
        for path in paths:
            with _readable(path, "parquet"):
                footer = self._footers[path] = parquet.read_metadata(path)
                for group in range(footer.num_row_groups):
                    about = footer.row_group(group)
                    if about.total_byte_size > MOST_GROUP_BYTES:
                        raise ValueError(
                            f"row group {group} has {about.total_byte_size:,} bytes, expected at "
                            f"most {MOST_GROUP_BYTES:,}: write it again with a row_group_size"
                        )
                    self._groups.append((path, group))
                    lengths.append(about.num_rows)
        self._ends = _ends(lengths)
        self._starts = _starts_in_file([path for path, _ in self._groups], lengths)
        self._kept: dict[int, Any] = {}  # the one used last at the end
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, inner = _place(self._ends, index)
        with _readable(self._groups[group][0], "parquet"):
            return _arrow_row(self._unpacked(group).slice(inner, 1), self.where(index))

    def where(self, index: int) -> str:
        group, inner = _place(self._ends, index)
        return f"{self._groups[group][0]} row {self._starts[group] + inner}"

    def _unpacked(self, group: int) -> Any:
        with self._lock:
            if (table := self._kept.pop(group, None)) is None:
                path, number = self._groups[group]
                parquet = _pyarrow("parquet")
                with parquet.ParquetFile(path, metadata=self._footers[path]) as file:
                    table = file.read_row_group(number, use_threads=False)
                self._kept_bytes += table.nbytes
            self._kept[group] = table
            while len(self._kept) > 1 and self._kept_bytes > CACHE_BYTES:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
            return table


class ArrowRows:
    """Rows of Arrow files, streams or not, mapped into memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        arrow = _pyarrow("ipc")
        self._batches: list[Any] = []
        self._paths: list[Path] = []
        for path in paths:
            with _readable(path, "Arrow"):
                source = _pyarrow("").memory_map(str(path))
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                reader = arrow.open_file(source) if is_file else arrow.open_stream(source)
                batches = reader.read_all().to_batches()
            self._batches += batches
            self._paths += [path] * len(batches)
        lengths = [batch.num_rows for batch in self._batches]
        self._ends, self._starts = _ends(lengths), _starts_in_file(self._paths, lengths)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, inner = _place(self._ends, index)
        with _readable(self._paths[batch], "Arrow"):
            row = self._batches[batch].slice(inner, 1)
            row.validate(full=True)  # offsets may lie
            return _arrow_row(row, self.where(index))

    def where(self, index: int) -> str:
        batch, inner = _place(self._ends, index)
        return f"{self._paths[batch]} row {self._starts[batch] + inner}"


def _starts_in_file(paths: Sequence[Path], lengths: Sequence[int]) -> list[int]:
    """The number, in its file, of the first row of each part."""
    starts: list[int] = []
    for i, path in enumerate(paths):
        starts.append(starts[-1] + lengths[i - 1] if i and paths[i - 1] == path else 0)
    return starts


def _arrow_row(one_row: Any, where: str) -> dict[str, Any]:
    if not (rows := one_row.to_pylist()):
        raise ValueError(f"{where} is not there, although the file says so")
    return plain(rows[0], where)


def _pyarrow(module: str) -> Any:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ImportError("parquet and Arrow files need pyarrow: pip install pyarrow") from error
    return {"parquet": parquet, "ipc": ipc}.get(module, pyarrow)


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """A context in which complaints about a file become a ValueError that names it."""
    try:
        yield
    except (_pyarrow("").ArrowException, ValueError, OSError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: not a readable {kind} file: {error}") from error
