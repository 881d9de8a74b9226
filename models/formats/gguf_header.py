"""The header of a GGUF file: metadata and the locations of tensors.

Every count, length, type and offset is checked against the size of the file and a limit before it
is used to read or allocate anything (`gguf.GGUFReader` trusts all values). The format:
github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from reprise.models.formats.hf_files import Stored, escaped, finite, shown
from reprise.models.hints import install_hint, program

MAX_HEADER_BYTES = 64 * 2**20  # a vocabulary of 250,000 tokens with merges takes 10 MiB
MAX_PAIRS = 2**16
MAX_TENSORS = 2**17  # a model of 100 layers has 50 and 1,500
MAX_ELEMENTS = 2**22  # of all arrays together
_MAX_AXES = 4
_TYPES = "<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? text array <u8 <i8 <f8".split()
_FLOAT = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata by key, and tensors by their names in the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredGguf]

    @property
    def architecture(self) -> Any:
        return self.metadata.get("general.architecture")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value; ValueError if it has another type."""
        value = self.metadata.get(key, default)
        if value is not default and not isinstance(value, kind):
            self.fail(f"expected {key} of type {kind.__name__}, got {shown(value)}")
        return value

    def fail(self, problem: str, fix: str = "convert the model again") -> NoReturn:
        raise ValueError(f"{self.path}: {problem}: {fix}")


@dataclasses.dataclass(frozen=True)
class StoredGguf(Stored):
    """A tensor of a `gguf.GGMLQuantizationType`, dequantized to float32 when read.

    `interleaved_heads` is the number of heads with rows that llama.cpp interleaved, or 0.
    """

    kind: Any
    offset: int
    num_bytes: int
    interleaved_heads: int = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with self.path.open("rb") as file:
            yield file

    def reader(self, file: BinaryIO) -> Callable[[tuple[slice, ...]], np.ndarray]:
        return self.read(file).__getitem__

    def read(self, file: BinaryIO) -> np.ndarray:
        file.seek(self.offset)
        content = np.frombuffer(file.read(self.num_bytes), np.uint8)
        if len(content) != self.num_bytes:
            raise ValueError(f"{self.path} became shorter while it was read: copy it again")
        blocks = content.reshape(math.prod(self.shape[:-1]), -1)
        values = package().dequantize(blocks, self.kind).reshape(self.shape)
        finite(values, f"{self.path}: {self.name}")
        if not self.interleaved_heads:
            return values
        # rotary embeddings pair rows i and i + h/2 of a head; the file has them as 2i and 2i + 1
        pairs = values.reshape(self.interleaved_heads, -1, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(self.shape)


def package() -> Any:
    """Return the `gguf` package; ModuleNotFoundError with the command that installs it."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading a GGUF file needs the package gguf ({error}): install it with "
            f"{install_hint('gguf')}, or convert the file where it is installed: "
            f"{program('export')} FILE --output FOLDER"
        ) from error
    return gguf


def read(path: Path) -> Header:
    """Return the header of a file. Raises FileNotFoundError, or ValueError for a damaged file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a GGUF file, got {str(path)!r}, which is not a file: models are not "
            "downloaded here; fetch it first"
        )
    package()
    with path.open("rb") as file:
        return _HeaderReader(path, file).header()


class _HeaderReader:
    """Reads a header value by value; `where` names the value in errors."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = self.num_elements = 0

    def header(self) -> Header:
        magic = self.take(4, "the word GGUF")
        version = self.number(4, "the version")
        if magic != b"GGUF" or version not in (2, 3):
            self.fail(
                "expected the word GGUF and version 2 or 3 in little-endian order, got "
                f"{magic!r} and {version:#x}",
                "name a GGUF file, or convert the model again",
            )
        num_tensors = self.count("tensors", MAX_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self.count("key-value pairs", MAX_PAIRS)):
            key = self.string("a key")
            if key in metadata:
                self.fail(f"expected every key once, got {shown(key)} twice")
            name = f"the value of {escaped(key)}"
            metadata[key] = self.value(self.number(4, f"the type of {name}"), name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"expected general.alignment as a power of two, got {shown(alignment)}")
        tensors = [self.tensor() for _ in range(num_tensors)]
        return Header(self.path, metadata, self.placed(tensors, alignment))

    def placed(self, tensors: list[StoredGguf], alignment: int) -> dict[str, StoredGguf]:
        """Return tensors by name, with offsets from the start of the file; refuse overlaps."""
        start = -(-self.position // alignment) * alignment
        end = 0
        before = "the header"
        placed: dict[str, StoredGguf] = {}
        for tensor in sorted(tensors, key=lambda t: t.offset):
            if tensor.name in placed:
                self.fail(f"expected every tensor once, got {shown(tensor.name)} twice")
            placed[tensor.name] = dataclasses.replace(tensor, offset=start + tensor.offset)
            is_apart = tensor.offset >= end and tensor.offset % alignment == 0
            end = tensor.offset + tensor.num_bytes
            if not is_apart or start + end > self.size:
                self.fail(
                    f"expected tensor {escaped(tensor.name)} at a multiple of {alignment} after "
                    f"{escaped(before)} and before the file's end, got {tensor.num_bytes} bytes at "
                    f"{tensor.offset} after the header's {start}"
                )
            before = tensor.name
        return placed

    def tensor(self) -> StoredGguf:
        """Read the entry of one tensor; its offset counts from the end of the header."""
        name = self.string("the name of a tensor")
        where = f"tensor {escaped(name)}"
        if not 1 <= (num_axes := self.number(4, f"the number of axes of {where}")) <= _MAX_AXES:
            self.fail(f"expected {where} with 1 to {_MAX_AXES} axes, got {num_axes}")
        sizes = [self.number(8, f"the shape of {where}") for _ in range(num_axes)]
        type_id = self.number(4, f"the type of {where}")
        offset = self.number(8, where)
        kinds = {kind.value: kind for kind in package().GGML_QUANT_SIZES}
        if (kind := kinds.get(type_id)) is None:
            self.fail(
                f"expected {where} of a type that the installed gguf package knows, got type "
                f"{type_id}",
                "install a newer gguf, or convert the model to another type",
            )
        block, block_bytes = package().GGML_QUANT_SIZES[kind]
        if min(sizes) < 1 or sizes[0] % block:
            self.fail(
                f"expected {where} of type {kind.name} with axes of at least 1, the first a "
                f"multiple of {block}, got {sizes}"
            )
        num_bytes = math.prod(sizes) // block * block_bytes
        return StoredGguf(self.path, name, tuple(sizes[::-1]), "F32", kind, offset, num_bytes)

    def value(self, kind: int, where: str) -> Any:
        if kind == _STRING:
            return self.string(where)
        if kind == _ARRAY:
            kind = self.number(4, f"the type of {where}")
            count = self.count(f"elements in {where}", MAX_ELEMENTS - self.num_elements)
            self.num_elements += count
            if kind == _STRING:
                return [self.string(where) for _ in range(count)]
            return self.numbers(kind, count, where)
        [number] = self.numbers(kind, 1, where)
        # the shortest decimal that gives the float32, as in config.json
        return float(str(np.float32(number))) if kind == _FLOAT else number

    def numbers(self, kind: int, count: int, where: str) -> list[Any]:
        if kind in (_STRING, _ARRAY) or kind >= len(_TYPES):
            self.fail(f"expected {where} as numbers or strings, got type {kind}")
        element = np.dtype(_TYPES[kind])
        content = self.take(count * element.itemsize, where)
        if kind == _BOOL and max(content, default=0) > 1:
            self.fail(f"expected {where} as 0 or 1, got {max(content)}")
        return np.frombuffer(content, element).tolist()

    def count(self, what: str, max_count: int) -> int:
        if (count := self.number(8, f"the number of {what}")) > max_count:
            self.fail(f"expected at most {max_count} {what}, got {count}")
        return count

    def string(self, where: str) -> str:
        content = self.take(self.number(8, f"the length of {where}"), where)
        try:
            return content.decode()
        except UnicodeDecodeError:
            self.fail(f"expected {where} as UTF-8, got {shown(content)}")

    def number(self, num_bytes: int, where: str) -> int:
        return int.from_bytes(self.take(num_bytes, where), "little")

    def take(self, num_bytes: int, where: str) -> bytes:
        left = self.size - self.position
        if num_bytes > left:
            self.fail(f"expected {where} in {num_bytes} bytes, got the last {left} of the file")
        if self.position + num_bytes > MAX_HEADER_BYTES:
            self.fail(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got a longer one")
        content = self.file.read(num_bytes)
        if len(content) != num_bytes:
            self.fail("it became shorter while it was read")
        self.position += num_bytes
        return content

    def fail(self, problem: str, fix: str = "copy or download it again") -> NoReturn:
        raise ValueError(
            f"{self.path} ({self.size} bytes) cannot be read: byte {self.position}: {problem}; "
            f"{fix}"
        )
