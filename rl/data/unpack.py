"""Parquet row groups and Arrow files, unpacked in a child process (`models.child`).

A page, a dictionary or a compressed batch of a few bytes can unpack to any size, and headers may
state a wrong size. The child has a memory limit, and returns plain Arrow data of the actual size.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from reprise.models.child import Child, ChildEnded, limit_memory, serve

DEADLINE_S = 60  # of a row group, or of a file of batches
_BATCH_ROWS = 256  # unpacked at a time
_FIXES = {True: "with a row_group_size", False: "without compression, as save_to_disk does"}


def row_group(path: Path, group: int, max_bytes: int) -> Any:
    """Return a row group as a table. Raises ValueError if it has more than `max_bytes`."""
    import pyarrow.ipc

    parts = _unpacked(path, group, max_bytes)
    return pyarrow.concat_tables([pyarrow.ipc.open_stream(part).read_all() for part in parts])


def check_batches(path: Path, max_bytes: int) -> None:
    """Raise ValueError if an Arrow file unpacks to over `max_bytes` more than its size."""
    _unpacked(path, None, max_bytes)


def _unpacked(path: Path, group: int | None, max_bytes: int) -> list[bytes]:
    request = {"path": str(path.absolute()), "group": group, "max_bytes": max_bytes}
    try:
        *parts, end = _child(max_bytes).call(json.dumps(request).encode())
        error = json.loads(end)["error"]
    except ChildEnded:
        error = "memory"
    if error == "memory":
        subject = "" if group is None else f"row group {group}: "
        error = (
            f"{subject}expected at most {max_bytes:,} bytes and {DEADLINE_S} s to unpack it, got "
            f"more: write it again {_FIXES[group is not None]}"
        )
    if error is not None:
        raise ValueError(error)
    return parts


@functools.cache
def _child(max_bytes: int) -> Child:
    memory_bytes = 2 * max_bytes + 2**28  # a batch is sent as a copy
    return Child("reprise.rl.data.unpack", memory_bytes, DEADLINE_S)


# --- in the child ---------------------------------------------------------------------


def _prepare() -> Callable[[bytes], Iterable[bytes]]:
    import pyarrow.ipc
    import pyarrow.parquet  # noqa: F401, so that the limit does not count it

    return _answer


def _answer(request: bytes) -> Iterator[bytes]:
    """Yield the batches of a row group, and finally the error or null, as JSON."""
    import pyarrow

    path, group, max_bytes = json.loads(request).values()
    error = None
    try:
        if group is None:
            _check_batches(path, max_bytes)
        else:
            yield from _batches(path, group, max_bytes)
    except MemoryError:
        error = "memory"
    except (pyarrow.ArrowException, ValueError, OSError) as problem:
        error = str(problem)
    yield json.dumps({"error": error}).encode()


def _batches(path: str, group: int, max_bytes: int) -> Iterator[bytes]:
    import pyarrow

    num_bytes = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
            num_bytes += batch.nbytes
            if num_bytes > max_bytes:
                raise MemoryError
            yield _stream(batch.schema, [batch])
        yield _stream(file.schema_arrow, [])


def _stream(schema: Any, batches: Iterable[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()  # type: ignore[no-any-return]


def _check_batches(path: str, max_bytes: int) -> None:
    import pyarrow

    size_bytes = os.stat(path).st_size
    num_bytes = 0
    limit_memory(size_bytes + 2 * max_bytes + 2**28)  # mapped files count as memory
    with pyarrow.memory_map(path) as source:
        for batch in open_batches(source):
            num_bytes += batch.nbytes
            if num_bytes > size_bytes + max_bytes:
                raise MemoryError


def open_batches(source: Any) -> Iterable[Any]:
    """Return the record batches of an open Arrow file or stream."""
    import pyarrow.ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        return pyarrow.ipc.open_stream(source)  # type: ignore[no-any-return]
    reader = pyarrow.ipc.open_file(source)
    return map(reader.get_batch, range(reader.num_record_batches))


if __name__ == "__main__":
    serve(_prepare)
