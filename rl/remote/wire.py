"""Records as bytes and back; what another program sends is checked against the records' types.

    "RPW1" · length of the header, uint32 · header, JSON · arrays, each from a multiple of 8 on

The header has the record's name, its fields, and the dtype and shape of each array. A `Codec` reads
the records that it was made for and nothing else; nothing is executed on the way.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import struct
import threading
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

import jax
import numpy as np

MAGIC = b"RPW1"
MOST_HEADER_BYTES = 2**26
MOST_MESSAGE_BYTES = 2**36  # a policy's weights, or keys and values of long requests
MOST_ARRAYS = 2**20  # eight of a response
MOST_DIMENSIONS = 8
_ALIGNED = 8
_START = struct.Struct("<4sI")
DTYPES = ("bool", "uint8", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64")

Check = Callable[[Any], None]  # raises ValueError
ArraySpec = tuple[str, int]  # dtype, number of axes
_Writer = Callable[[Any, list[np.ndarray]], Any]
_Reader = Callable[[Any, Sequence[np.ndarray], str], Any]


class WireError(ValueError):
    """Raised for bytes that are no message of this protocol; says what was expected, and got."""


@dataclasses.dataclass(frozen=True, eq=False)
class Codec:
    """Writes and reads `records`, dataclasses whose fields have plain types, records and arrays.

    `arrays` has dtype and axes of the arrays of a record, by field; of others any dtype of `DTYPES`
    is read. `checks` are called with the records that they are for, once they are read.
    """

    records: tuple[type, ...]
    arrays: Mapping[type, Mapping[str, ArraySpec]] = dataclasses.field(default_factory=dict)
    checks: Mapping[type, Check] = dataclasses.field(default_factory=dict)
    _made: dict[Any, tuple[_Writer, _Reader]] = dataclasses.field(default_factory=dict)
    _lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)  # type: ignore[valid-type]

    def encode(self, record: Any) -> bytes:
        """Return a record as bytes."""
        arrays: list[np.ndarray] = []
        assert type(record) in self.records, f"{type(record).__name__} is not a message"
        fields = self._of(type(record))[0](record, arrays)
        described = [[x.dtype.name, list(x.shape)] for x in arrays]
        header = json.dumps([type(record).__name__, fields, described]).encode()
        parts = [_START.pack(MAGIC, len(header)), header]
        at = _START.size + len(header)
        for x in arrays:
            padding = -at % _ALIGNED
            parts += [b"\0" * padding, x.tobytes()]
            at += padding + x.nbytes
        return b"".join(parts)

    def decode(self, message: bytes) -> Any:
        """Return the record in `message`. Raises WireError for anything else."""
        name, fields, described, start = _header(message)
        known = {cls.__name__: cls for cls in self.records}
        if name not in known:
            raise WireError(f"expected a message of {', '.join(known)}, got {_shown(name)}")
        arrays = _arrays(message, described, start)
        return self._of(known[name])[1](fields, arrays, name)

    def _of(self, hint: Any) -> tuple[_Writer, _Reader]:
        with self._lock:  # a record's entry is there before its fields', which may be of its kind
            found = self._made.get(hint)
            if found is None:
                found = self._made[hint] = self._make(hint)
        return found

    def _make(self, hint: Any) -> tuple[_Writer, _Reader]:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            return self._record(hint)
        if hint in _PLAIN:
            return _PLAIN[hint]
        if hint in (np.ndarray, jax.Array):
            return _write_array, _array_reader(None)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enum(hint)
        if origin is Literal:
            return _literal(args)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if origin in (tuple, collections.abc.Sequence):
            return self._tuple(args, open_end=origin is not tuple or args[1:] == (...,))
        if origin is collections.abc.Mapping:
            return self._mapping(args)
        raise TypeError(f"no messages of {hint}")

    def _record(self, cls: type) -> tuple[_Writer, _Reader]:
        hints, specs = typing.get_type_hints(cls), self.arrays.get(cls, {})
        parts: dict[str, tuple[_Writer, _Reader]] = {}
        names = [f.name for f in dataclasses.fields(cls) if f.init]

        def write(record: Any, arrays: list[np.ndarray]) -> Any:
            return {n: parts[n][0](getattr(record, n), arrays) for n in names}

        def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
            if type(value) is not dict or value.keys() != parts.keys():
                got = sorted(value) if type(value) is dict else value
                raise _wrong(path, f"the fields {', '.join(parts)}", got)
            fields = {n: parts[n][1](value[n], arrays, f"{path}.{n}") for n in names}
            try:
                record = cls(**fields)
                if cls in self.checks:
                    self.checks[cls](record)
            except WireError:
                raise
            except (ValueError, OverflowError, AssertionError) as error:
                raise WireError(f"{path}: {str(error)[:500]}") from error
            return record

        self._made[cls] = write, read
        for n in names:
            spec = specs.get(n)
            parts[n] = (_write_array, _array_reader(spec)) if spec else self._of(hints[n])
        return write, read

    def _union(self, options: Sequence[Any]) -> tuple[_Writer, _Reader]:
        """One of several records by name, or a single type; or None."""
        some = [x for x in options if x is not type(None)]
        optional = len(some) < len(options)
        if len(some) == 1:
            write_one, read_one = self._of(some[0])
        else:
            write_one, read_one = self._named(some)

        def write(value: Any, arrays: list[np.ndarray]) -> Any:
            return None if value is None and optional else write_one(value, arrays)

        def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
            return None if value is None and optional else read_one(value, arrays, path)

        return write, read

    def _named(self, classes: Sequence[type]) -> tuple[_Writer, _Reader]:
        known = {cls.__name__: cls for cls in classes}

        def write(value: Any, arrays: list[np.ndarray]) -> Any:
            name = type(value).__name__
            return [name, self._of(known[name])[0](value, arrays)]

        def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
            if type(value) is not list or len(value) != 2 or value[0] not in tuple(known):
                raise _wrong(path, f"one of {', '.join(known)}", value)
            return self._of(known[value[0]])[1](value[1], arrays, f"{path}:{value[0]}")

        return write, read

    def _tuple(self, args: Sequence[Any], *, open_end: bool) -> tuple[_Writer, _Reader]:
        parts = [self._of(x) for x in args if x is not ...]

        def write(value: Any, arrays: list[np.ndarray]) -> Any:
            if open_end:
                return [parts[0][0](x, arrays) for x in value]
            return [part[0](x, arrays) for part, x in zip(parts, value, strict=True)]

        def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
            if type(value) is not list or not (open_end or len(value) == len(parts)):
                raise _wrong(path, "a list" if open_end else f"a list of {len(parts)}", value)
            readers = parts * len(value) if open_end else parts
            return tuple(
                part[1](x, arrays, f"{path}[{i}]")
                for i, (part, x) in enumerate(zip(readers, value, strict=True))
            )

        return write, read

    def _mapping(self, args: Sequence[Any]) -> tuple[_Writer, _Reader]:
        write_pairs, read_pairs = self._of(tuple[types.GenericAlias(tuple, tuple(args)), ...])  # type: ignore[misc]

        def write(value: Any, arrays: list[np.ndarray]) -> Any:
            return write_pairs(tuple(value.items()), arrays)

        def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
            pairs = read_pairs(value, arrays, path)
            found = dict(pairs)
            if len(found) < len(pairs):
                raise _wrong(path, "each key once", [key for key, _ in pairs][:20])
            return found

        return write, read


def _header(message: bytes) -> tuple[Any, Any, Any, int]:
    size = len(message)
    if not _START.size <= size <= MOST_MESSAGE_BYTES:
        raise WireError(f"expected {_START.size} to {MOST_MESSAGE_BYTES} bytes, got {size}")
    magic, length = _START.unpack_from(message)
    if magic != MAGIC:
        raise WireError(f"expected a message that begins with {MAGIC!r}, got {magic!r}")
    if length > min(MOST_HEADER_BYTES, size - _START.size):
        raise WireError(f"expected a header within {size} bytes, got one of {length}")
    start = _START.size + length
    try:
        header = json.loads(message[_START.size : start])
    except (ValueError, RecursionError) as error:
        raise WireError(f"expected a header in JSON, got {str(error)[:200]}") from error
    if type(header) is not list or len(header) != 3 or type(header[0]) is not str:
        raise WireError(f"expected a name, fields and arrays, got {_shown(header)}")
    return (*header, start)


def _arrays(message: bytes, described: Any, at: int) -> list[np.ndarray]:
    """The arrays behind the header: copies, which may be written to."""
    if type(described) is not list or len(described) > MOST_ARRAYS:
        raise _wrong("arrays", f"a list of at most {MOST_ARRAYS}", described)
    found = []
    for i, entry in enumerate(described):
        if type(entry) is not list or len(entry) != 2 or entry[0] not in DTYPES:
            raise _wrong(f"arrays[{i}]", f"a dtype of {', '.join(DTYPES)} and a shape", entry)
        shape: Any = entry[1]
        dtype = np.dtype(entry[0])
        if type(shape) is not list or len(shape) > MOST_DIMENSIONS:
            raise _wrong(f"arrays[{i}]", f"a shape of at most {MOST_DIMENSIONS} axes", shape)
        if any(type(n) is not int or not 0 <= n <= MOST_MESSAGE_BYTES for n in shape):
            raise _wrong(f"arrays[{i}]", "sizes of 0 or more", shape)
        at += -at % _ALIGNED
        count = 1
        for n in shape:
            count *= n
        if at + count * dtype.itemsize > len(message):
            raise _wrong(f"arrays[{i}]", f"its end within {len(message)} bytes", shape)
        x = np.frombuffer(message, dtype, count, at) if count else np.empty(0, dtype)
        found.append(x.reshape(shape).copy())
        at += count * dtype.itemsize
    if at != len(message):
        raise WireError(f"expected {at} bytes of header and arrays, got {len(message)}")
    return found


def _write_array(value: Any, arrays: list[np.ndarray]) -> int:
    x = np.ascontiguousarray(jax.device_get(value))
    assert x.dtype.name in DTYPES, f"no messages of arrays of {x.dtype}"
    arrays.append(x.reshape(np.shape(value)))
    return len(arrays) - 1


def _array_reader(spec: ArraySpec | None) -> _Reader:
    def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> np.ndarray:
        if type(value) is not int or not 0 <= value < len(arrays):
            raise _wrong(path, f"an array below {len(arrays)}", value)
        x = arrays[value]
        if spec is not None and (x.dtype.name, x.ndim) != spec:
            got = f"{x.dtype.name} of {x.ndim}"
            raise WireError(f"{path}: expected an array of {spec[0]} of {spec[1]} axes, got {got}")
        return x

    return read


def _exactly(kind: type, what: str) -> tuple[_Writer, _Reader]:
    def write(value: Any, arrays: list[np.ndarray]) -> Any:
        return kind(value)  # numpy's numbers too

    def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
        too_large = type(value) is int and not -(2**63) <= value < 2**63
        if type(value) is not kind or too_large:
            raise _wrong(path, what, value)
        return value

    return write, read


def _bytes() -> tuple[_Writer, _Reader]:
    read_array = _array_reader(("uint8", 1))

    def write(value: bytes, arrays: list[np.ndarray]) -> Any:
        return _write_array(np.frombuffer(value, np.uint8), arrays)

    def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> bytes:
        return bytes(read_array(value, arrays, path).tobytes())

    return write, read


_PLAIN: dict[Any, tuple[_Writer, _Reader]] = {
    bool: _exactly(bool, "true or false"),
    int: _exactly(int, "a whole number of 64 bits"),
    float: _exactly(float, "a number"),
    str: _exactly(str, "text"),
    bytes: _bytes(),
}


def _enum(cls: type[enum.Enum]) -> tuple[_Writer, _Reader]:
    values = {member.value: member for member in cls}

    def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
        if type(value) not in (str, int) or value not in values:
            raise _wrong(path, f"one of {', '.join(map(str, values))}", value)
        return values[value]

    return lambda value, arrays: value.value, read


def _literal(values: Sequence[Any]) -> tuple[_Writer, _Reader]:
    def read(value: Any, arrays: Sequence[np.ndarray], path: str) -> Any:
        if type(value) is not str or value not in values:
            raise _wrong(path, f"one of {', '.join(map(str, values))}", value)
        return value

    return lambda value, arrays: value, read


def _wrong(path: str, expected: str, got: Any) -> WireError:
    return WireError(f"{path}: expected {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    return repr(value)[:200]
