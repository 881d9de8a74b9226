"""A tree of weights as pieces in host memory: whole arrays, or the shards that a process has.

Of an array that is split over devices every shard is a piece of its own, so that nothing is put
together on a device or a trainer's host that was not there before. Names are paths in the tree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from rl.weights import delta

_ALIGNMENT = 64  # bytes: jax takes such memory over without a copy
_WORTH_THREADS = 8 * 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class PieceInfo:
    """Where a piece belongs, its dtype, and the SHA-256 of its bytes."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A piece and its bytes, C-ordered; nobody writes to them."""

    info: PieceInfo
    bytes_n: np.ndarray

    def array(self) -> np.ndarray:
        return self.bytes_n.view(np.dtype(self.info.dtype)).reshape(self.info.shape)


def names_of(tree: Any) -> list[str]:
    """Return the name of each leaf, in the order of `jax.tree.leaves`."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def pieces_of(tree: Any, pool: Executor) -> list[Piece]:
    """Copy what this process has of each array to host memory; of copies of a shard only one."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    return list(runner(pool, num_bytes)(_hashed, _copies(tree)))


def runner(pool: Executor, num_bytes: int) -> delta.Run:
    """Return `map` for little work, for which handing it to threads takes longer."""
    return pool.map if num_bytes >= _WORTH_THREADS else map


def sha256(bytes_n: np.ndarray) -> str:
    """Return the checksum of bytes.

    SHA-256, as in the manifests of checkpoints: the standard library's, 1.5 GB/s a core where
    processors have instructions for it, without the interpreter lock; CRC-32 takes half of the
    time, and misses one of four billion errors instead of none.
    """
    return hashlib.sha256(bytes_n.data).hexdigest()


def fingerprint(infos: Sequence[PieceInfo]) -> str:
    """Return what tells these weights from any others: SHA-256 of names, places and checksums."""
    lines = sorted(f"{i.name}\n{i.start}\n{i.shape}\n{i.dtype}\n{i.sha256}\n" for i in infos)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def empty_aligned(num_bytes: int) -> np.ndarray:
    """Return uninitialised bytes that jax's CPU devices can use in place."""
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + num_bytes]


def assemble(pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Join pieces that cover every array (`rl.weights.offers.check_cover`) to read-only arrays."""
    arrays: dict[str, np.ndarray] = {}
    for piece in pieces:
        info = piece.info
        if info.shape == shapes[info.name]:
            arrays[info.name] = piece.array()
            continue
        if info.name not in arrays:
            num_bytes = math.prod(shapes[info.name]) * np.dtype(info.dtype).itemsize
            whole = empty_aligned(num_bytes).view(np.dtype(info.dtype))
            arrays[info.name] = whole.reshape(shapes[info.name])
        arrays[info.name][info.region] = piece.array()
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _copies(tree: Any) -> Iterator[tuple[PieceInfo, np.ndarray]]:
    """Each piece without its checksum, and its bytes, one after the other."""
    for name, leaf in zip(names_of(tree), jax.tree.leaves(tree), strict=True):
        for start, data in _shards(leaf):
            bytes_n = empty_aligned(data.nbytes)
            np.copyto(bytes_n.view(data.dtype).reshape(data.shape), data)
            yield PieceInfo(name, start, data.shape, str(data.dtype), ""), bytes_n


def _shards(leaf: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        yield (0,) * array.ndim, array
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            data = shard.data  # jax keeps what it fetches with the array: not with the trainer's
            data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
            yield tuple(part.start or 0 for part in shard.index), np.asarray(data)


def _hashed(copied: tuple[PieceInfo, np.ndarray]) -> Piece:
    info, bytes_n = copied
    return Piece(dataclasses.replace(info, sha256=sha256(bytes_n)), bytes_n)
