"""Arrow columns as Python values that are equal to the stored numbers and texts.

The nearest Python type may differ: 0.1 in single precision is 0.10000000149 as a float, and
nanoseconds are cut off.
"""

from __future__ import annotations

import functools
from typing import Any


def num_values(column: Any) -> int:
    """Return the number of values nested in a column: nulls and repeated values take no bytes."""
    if not column.type.num_fields:
        return len(column)
    if hasattr(column, "chunks"):  # of a table
        return sum(map(num_values, column.chunks))
    if _types().is_map(column.type):  # has no flatten
        start = column.offsets[0].as_py()
        end = column.offsets[-1].as_py()
        inner = [part.slice(start, end - start) for part in (column.keys, column.items)]
    elif hasattr(column, "flatten"):
        inner = column.flatten()
    else:
        raise ValueError("has a type that is not supported")
    return len(column) + sum(map(num_values, inner if isinstance(inner, list) else [inner]))


def values(column: Any) -> list[Any]:
    """Return the values of an array or of the chunks of a column; a map is a dict.

    Raises ValueError, OverflowError or an ArrowException for values that Python cannot represent.
    """
    import pyarrow

    types = pyarrow.types
    kind = column.type
    if hasattr(column, "chunks"):
        return [value for chunk in column.chunks for value in values(chunk)]
    if _is_plain(kind):
        return column.to_pylist()  # type: ignore[no-any-return]
    if types.is_float32(kind):  # by the shortest text: 0.1 stays 0.1
        return column.cast(pyarrow.string()).cast(pyarrow.float64()).to_pylist()  # type: ignore[no-any-return]
    if types.is_float16(kind):
        return [None if x is None else float(str(x)) for x in _half_precision(column)]
    if types.is_dictionary(kind):
        return values(column.dictionary_decode())
    if isinstance(kind, pyarrow.BaseExtensionType):
        return values(column.storage)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        parts = map(values, column.flatten())
        rows = zip(*parts, strict=True)
        return [
            dict(zip(names, row, strict=True)) if is_valid else None
            for is_valid, row in zip(column.is_valid().to_pylist(), rows, strict=True)
        ]
    if types.is_map(kind):
        return [_as_dict(scalar.values) if scalar.is_valid else None for scalar in column]
    if _is_list(kind):
        return [values(scalar.values) if scalar.is_valid else None for scalar in column]
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind):
        return _times(column)
    raise ValueError("has a type that is not supported")


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    """Return whether `to_pylist` returns the exact values of a column of this type."""
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _is_plain(kind.storage_type)
    if kind.num_fields:
        is_known = types.is_struct(kind) or _is_list(kind)
        return is_known and all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    unlike = types.is_float16, types.is_float32, types.is_interval, types.is_map
    is_fine = types.is_temporal(kind) and getattr(kind, "unit", "") == "ns"
    return not is_fine and not any(is_one(kind) for is_one in unlike)


def _is_list(kind: Any) -> bool:
    types = _types()
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    return any(is_one(kind) for is_one in (*lists, types.is_list_view, types.is_large_list_view))


def _types() -> Any:
    import pyarrow

    return pyarrow.types


def _half_precision(column: Any) -> list[Any]:
    import numpy as np

    return [None if x is None else np.float16(x) for x in column.to_pylist()]


def _as_dict(entries: Any) -> dict[str, Any]:
    """Return the entries of a map. Raises ValueError for a duplicate key."""
    keys, items = (values(part) for part in entries.flatten())
    result = {str(key): item for key, item in zip(keys, items, strict=True)}
    if len(result) != len(keys):
        raise ValueError("has a key twice")
    return result


def _times(column: Any) -> list[Any]:
    """Return times in nanoseconds, as text if Python types would cut off digits."""
    import pyarrow

    kind = column.type
    types = pyarrow.types
    coarse = pyarrow.time64("us") if types.is_time(kind) else pyarrow.duration("us")
    if types.is_timestamp(kind):
        coarse = pyarrow.timestamp("us", kind.tz)
    try:
        return column.cast(coarse).to_pylist()  # type: ignore[no-any-return]
    except pyarrow.ArrowInvalid:
        if types.is_duration(kind):
            raise
        return column.cast(pyarrow.string()).to_pylist()  # type: ignore[no-any-return]
