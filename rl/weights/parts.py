"""Payloads cut into parts of bounded size, and put together again.

A part is slices of several buffers, or one slice of a long one. Both sides cut by the same sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from rl.weights.pieces import empty_aligned


@dataclasses.dataclass(frozen=True)
class Slice:
    """Bytes `start` to `stop` of a buffer of a payload."""

    buffer: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int], part_bytes: int) -> list[list[Slice]]:
    """Return the slices of each part; buffers without bytes are in none."""
    parts: list[list[Slice]] = []
    room = 0
    for buffer, size in enumerate(sizes):
        if room < min(size, part_bytes):
            room = 0
        for start in range(0, size, part_bytes):
            piece = Slice(buffer, start, min(size, start + part_bytes))
            if room < piece.num_bytes:
                parts.append([])
                room = part_bytes
            parts[-1].append(piece)
            room -= piece.num_bytes
    return parts


def slices_of(buffers: Sequence[np.ndarray], part: Sequence[Slice]) -> list[np.ndarray]:
    """Return the bytes of a part, not copied."""
    return [buffers[s.buffer][s.start : s.stop] for s in part]


def joined(
    sizes: Sequence[int], parts: Iterable[tuple[Sequence[Slice], Sequence[np.ndarray]]]
) -> list[np.ndarray]:
    """Put buffers together; one that is in a single slice is not copied."""
    buffers: list[np.ndarray | None] = [None if size else empty_aligned(0) for size in sizes]
    for slices, bytes_of_part in parts:
        for piece, found_n in zip(slices, bytes_of_part, strict=True):
            assert len(found_n) == piece.num_bytes
            if piece.num_bytes == sizes[piece.buffer]:
                buffers[piece.buffer] = found_n
                continue
            whole = buffers[piece.buffer]
            if whole is None:
                whole = buffers[piece.buffer] = empty_aligned(sizes[piece.buffer])
            whole[piece.start : piece.stop] = found_n
    return [buffer for buffer in buffers if buffer is not None]
