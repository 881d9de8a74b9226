"""Digests of policy files, to check that a run or an adapter still has the same policy.

A file of up to 64 MiB is read whole. For a larger file the digest covers the size, the header, and
all bytes of each tensor of up to 256 KiB; a larger tensor adds four pieces of 64 KiB, including the
first and the last. Training, merging, rounding or replacing any tensor changes the digest; an edit
of single numbers in a large matrix may not. Digesting 8B parameters reads 80 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from reprise.models.formats import hf_files
from reprise.models.text import tokenizer_files

WHOLE_BYTES = 64 * 2**20  # size of the largest file that is read whole
PIECE_BYTES = 2**16
_PIECES = 4  # of a tensor
_FILE_PIECES = 1024  # of a file with unknown tensors, such as GGUF
_NAMES = (hf_files.CONFIG, hf_files.GENERATION, hf_files.INDEX, *tokenizer_files.NAMES)


def digest_policy(path: Path) -> dict[str, str]:
    """Return the digest of each file of a policy, by file name.

    Includes the tokenizer files next to a GGUF file. Raises OSError.
    """
    folder = path.parent if path.is_file() else path
    names = {name for name in _NAMES if (folder / name).is_file()}
    if path.is_file():
        tokenizer = names.intersection(tokenizer_files.NAMES)
        names = {path.name, *(tokenizer if path.suffix.lower() == ".gguf" else ())}
    else:
        names |= {file.name for file in path.glob("*.safetensors") if file.is_file()}
    return {name: digest_file(folder / name) for name in sorted(names)}


def combine(digests: Mapping[str, str]) -> str:
    """Return one digest for several files and their names."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:32]


def digest_file(path: Path) -> str:
    """Return the digest of a file, 32 hexadecimal digits. Raises OSError."""
    size_bytes = path.stat().st_size
    result = hashlib.sha256(f"{size_bytes}\0".encode())
    with path.open("rb") as file:
        for start, num_bytes in _read_parts(file, size_bytes):
            file.seek(start)
            result.update(file.read(num_bytes))
    return result.hexdigest()[:32]


def _read_parts(file: BinaryIO, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of each part of a file that the digest covers."""
    if size_bytes <= WHOLE_BYTES:
        yield 0, size_bytes
        return
    tensors = _tensors(file, size_bytes)
    if not tensors:
        yield from _pieces(0, size_bytes, _FILE_PIECES)
        return
    yield 0, tensors[0][0]  # the header
    for start, num_bytes in tensors:
        yield from _pieces(start, num_bytes, _PIECES)


def _pieces(start: int, num_bytes: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield evenly spread pieces, including the first and the last, or everything in one piece."""
    if num_bytes <= count * PIECE_BYTES:
        yield start, num_bytes
        return
    last = num_bytes - PIECE_BYTES
    for k in range(count):
        yield start + k * last // (count - 1), PIECE_BYTES


def _tensors(file: BinaryIO, size_bytes: int) -> list[tuple[int, int]]:
    """Return start and length of each tensor of a safetensors file, in order; [] otherwise."""
    header_bytes = int.from_bytes(file.read(8), "little")
    first = 8 + header_bytes
    if first > min(size_bytes, hf_files.MAX_HEADER_BYTES):
        return []
    try:
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        places = sorted((begin, end) for begin, end in map(_offsets, header.values()))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return []
    ends = [0, *(end for _, end in places)]
    follows = all(end <= begin for end, (begin, _) in zip(ends, places, strict=False))
    fits = all(begin <= end for begin, end in places) and first + ends[-1] <= size_bytes
    return [(first + begin, end - begin) for begin, end in places] if follows and fits else []


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return int(begin), int(end)
