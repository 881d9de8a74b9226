"""The header of a GGUF file: metadata and where each tensor lies, checked before it is believed.

Every length, count, type and offset is compared with the size of the file before anything is read
or allocated by it, so that a damaged or lying file costs one sentence. Weights are not read. The
format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from models.hf_config import escaped, shown

MAX_HEADER_BYTES = 64 * 2**20  # of metadata and tensor entries; 250,000 tokens with merges have 10
MAX_STRINGS = 2**21  # in all arrays
MAX_TENSORS, MAX_PAIRS = 2**17, 2**16  # a model of 100 layers has 1,500 and 50
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 2**16 - 1  # of a key or a tensor, as the format says
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT = "general.alignment"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_COPY = "copy or download it again"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `shape` has the fastest axis last, `offset` is from the file's start.

    `kind` is a `gguf.GGMLQuantizationType`.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata by key, and tensors by name. Arrays of numbers are numpy's, of strings lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def is_gguf(path: Path) -> bool:
    """Return whether a path is meant as a GGUF file: policies are otherwise folders."""
    return path.is_file() or (path.suffix.lower() == ".gguf" and not path.is_dir())


def printed(value: Any) -> str:
    """Return a value of the metadata as errors print it: escaped, on one line, and cut."""
    most = 8  # elements
    if isinstance(value, np.ndarray | list) and len(value) > most:
        return f"{shown(list(value[:most]))} and {len(value) - most} more"
    return shown(value.tolist() if isinstance(value, np.ndarray) else value)


def package() -> Any:
    """Return the `gguf` package; ModuleNotFoundError with the command that installs it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading a GGUF file needs the package gguf ({error}): install it with "
            "pip install -e '.[gguf]', or convert the file where it is installed: "
            "python -m models.gguf FILE FOLDER"
        ) from error
    return gguf


def read(path: Path) -> Header:
    """Read a file's header. Raises FileNotFoundError, and ValueError for a file that is not whole.

    ValueError, too, for what no reader here understands: other versions, types without a
    known size, several files.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a GGUF file, got {str(path)!r}, which is not a file: models are not "
            "downloaded here; fetch it first"
        )
    package()
    with path.open("rb") as file:
        return _Reader(path, file, os.fstat(file.fileno()).st_size).header()


class _Reader:
    """A position in a file, from which values are read that the file can hold."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.position = self.num_strings = 0

    def header(self) -> Header:
        num_tensors, num_pairs = self._begin()
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name("the name of a key")
            if key in metadata:
                self._fail(f"expected every key once, got {shown(key)} twice")
            metadata[key] = self._value(self._number("I", f"the type of {escaped(key)}"), key)
        alignment = self._alignment(metadata)
        found: dict[str, TensorEntry] = {}
        for _ in range(num_tensors):
            entry = self._tensor()
            if entry.name in found:
                self._fail(f"expected every tensor once, got {shown(entry.name)} twice")
            found[entry.name] = entry
        return Header(self.path, metadata, self._placed(found, alignment))

    def _begin(self) -> tuple[int, int]:
        """Read magic, version and the numbers of tensors and of pairs."""
        magic = self._take(4, "the word GGUF at its start")
        if magic != b"GGUF":
            self._fail(
                f"expected the word GGUF at its start, got {magic!r}",
                "name a GGUF file, or a Hugging Face folder",
            )
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            got = f"version {version}"
            if swapped in (1, *_VERSIONS):
                got = f"version {swapped} in big-endian order"
            self._fail(
                f"expected GGUF of version 2 or 3 in little-endian order, got {got}",
                "convert the model again",
            )
        return self._count("tensors", MAX_TENSORS), self._count("key-value pairs", MAX_PAIRS)

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q", f"the number of {what}")
        if count > most:
            self._fail(f"expected at most {most} {what}, got {count}")
        return int(count)

    def _name(self, what: str) -> str:
        name = self._string(what, _MAX_NAME_BYTES)
        if not name:
            self._fail(f"expected {what}, got none")
        return name

    def _string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q", f"the length of {what}")
        if length > most:
            self._fail(f"expected {what} of at most {most} bytes, got {length}")
        content = self._take(length, what)
        try:
            return content.decode()
        except UnicodeDecodeError:
            self._fail(f"expected {what} as UTF-8, got {shown(content)}")

    def _value(self, kind: int, key: str) -> Any:
        what = f"the value of {escaped(key)}"
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], what)
        if kind == _BOOL:
            value = self._number("B", what)
            if value > 1:
                self._fail(f"expected {what} as 0 or 1, got {value}")
            return bool(value)
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what)
        self._fail(f"expected {what} of a type from 0 to 12, got {kind}")

    def _array(self, what: str) -> Any:
        kind = self._number("I", f"the type of {what}")
        count = self._number("Q", f"the length of {what}")
        if kind == _STRING:
            most = min((self.size - self.position) // 8, MAX_STRINGS - self.num_strings)
            if count > most:
                self._fail(f"expected at most {most} strings in {what}, got {count}")
            self.num_strings += count
            return [self._string(f"a string of {what}") for _ in range(count)]
        if kind not in _NUMBERS and kind != _BOOL:
            self._fail(f"expected {what} as numbers or strings, got elements of type {kind}")
        element = np.dtype(f"<{_NUMBERS.get(kind, 'B')}" if kind != _BOOL else "u1")
        return np.frombuffer(self._take(count * element.itemsize, what), element)

    def _tensor(self) -> TensorEntry:
        """Read one entry; its offset still counts from the first tensor."""
        name = self._name("the name of a tensor")
        what = f"tensor {escaped(name)}"
        dimensions = self._number("I", f"the number of axes of {what}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"expected {what} with 1 to {_MAX_DIMENSIONS} axes, got {dimensions}")
        sizes = [self._number("Q", f"the shape of {what}") for _ in range(dimensions)]
        type_id = self._number("I", f"the type of {what}")
        gguf = package()
        try:
            kind = gguf.GGMLQuantizationType(type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self._fail(
                f"expected {what} of a type that the installed gguf package knows, got type "
                f"{type_id}",
                "install a newer gguf, or convert the model to another type",
            )
        if min(sizes) < 1 or sizes[0] % block:
            self._fail(
                f"expected {what} of type {kind.name} with axes of at least 1, the first a "
                f"multiple of {block}, got {sizes}"
            )
        num_bytes = math.prod(sizes) // block * block_bytes
        if num_bytes > self.size:
            self._fail(
                f"expected {what} to fit into the file's {self.size} bytes, got {sizes} of type "
                f"{kind.name}, which is {num_bytes}"
            )
        offset = self._number("Q", f"the offset of {what}")
        return TensorEntry(name, tuple(sizes[::-1]), kind, offset, num_bytes)

    def _placed(self, found: dict[str, TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """Return the tensors with offsets from the file's start, all apart and inside of it."""
        start, end, before = -(-self.position // alignment) * alignment, 0, ""
        for entry in sorted(found.values(), key=lambda e: e.offset):
            what = f"tensor {escaped(entry.name)}"
            if entry.offset % alignment:
                self._fail(f"expected {what} at a multiple of {alignment}, got {entry.offset}")
            if entry.offset < end:
                self._fail(f"expected {what} behind {escaped(before)}, got it at {entry.offset}")
            end, before = entry.offset + entry.num_bytes, entry.name
            if start + end > self.size:
                self._fail(
                    f"expected {what} at bytes {start + entry.offset} to {start + end}, got a file "
                    f"that ends at {self.size}"
                )
        return {
            name: dataclasses.replace(entry, offset=start + entry.offset)
            for name, entry in found.items()
        }

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"expected {_ALIGNMENT} as a power of two, got {printed(alignment)}")
        return alignment

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))[0]

    def _take(self, num_bytes: int, what: str) -> bytes:
        left = self.size - self.position
        if num_bytes > left:
            self._fail(f"expected {what} in {num_bytes} bytes, got the last {left} of the file")
        if self.position + num_bytes > MAX_HEADER_BYTES:
            self._fail(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got a longer one")
        content = self.file.read(num_bytes)
        if len(content) != num_bytes:
            self._fail("it became shorter while it was read")
        self.position += num_bytes
        return content

    def _fail(self, problem: str, mend: str = _COPY) -> NoReturn:
        raise ValueError(
            f"{self.path} ({self.size} bytes) cannot be read: byte {self.position}: {problem}; "
            f"{mend}"
        )
