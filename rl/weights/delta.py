"""The bytes that differ between two copies of an array, encoded as instructions to write them.

`encode(old, new)` returns a delta, and `apply(copy_of_old, delta)` makes the copy bitwise equal to
`new`. Bytes are overwritten, never added or XORed, so applying a delta twice is harmless.

A training step moves a bfloat16 weight by one unit in the last place, if at all, so the lower byte
changes and the upper byte rarely does. In float32, the two lower bytes nearly always change. The
bytes of an element are therefore separated ("planes"), and each plane of each block of `BLOCK`
elements takes its smallest form:

    0  nothing changed
    1  count: uint16, size: uint16, gaps: uint8[size], values: uint8[count]
       a gap is the number of bytes between two changed bytes; 255 skips 255 bytes and continues
    2  count: uint16, bitmap: uint8[elements / 8], values: uint8[count]
    3  all bytes of the plane: uint8[elements]

Counts are per block, so an array may have any length. Both kernels make one pass and release the
interpreter lock. Since a delta comes from another program, `apply` never writes outside the array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numba
import numpy as np

BLOCK = 16384  # elements; below 2**16, as counts are uint16
_CHUNK = 64 * BLOCK  # elements per call, so that scratch memory is small
_NONE = 0
_GAPS = 1
_BITMAP = 2
_DENSE = 3
Run = Callable[..., Iterable[Any]]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class DamagedDelta(ValueError):
    """The payload is not a valid delta for an array of this size."""


def encode(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the delta from `old` to `new`, as uint8; empty if the arrays are equal.

    Both arrays are contiguous, and have the same dtype and size.
    """
    return encode_all([(old, new)], map)[0]


def encode_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]], run: Run) -> list[np.ndarray]:
    """Return the delta of each (old, new) pair; `run` is `map`, or `map` of a thread pool."""
    tasks = []
    for at, (old, new) in enumerate(pairs):
        assert old.dtype == new.dtype and old.size == new.size
        unsigned = _UNSIGNED[old.dtype.itemsize]
        old_n = old.reshape(-1).view(unsigned)
        new_n = new.reshape(-1).view(unsigned)
        for n in range(0, new_n.size, _CHUNK):
            tasks.append((at, old_n[n : n + _CHUNK], new_n[n : n + _CHUNK]))
    parts: list[list[np.ndarray]] = [[] for _ in pairs]
    changed = [False] * len(pairs)
    for at, part, differs in run(_encoded, tasks):
        parts[at].append(part)
        changed[at] |= differs
    nothing = np.empty(0, np.uint8)
    return [np.concatenate(p) if c else nothing for p, c in zip(parts, changed, strict=True)]


def apply(target: np.ndarray, delta: np.ndarray) -> None:
    """Overwrite the bytes of the contiguous array `target` that `delta` names.

    Raises DamagedDelta, possibly after changing a part of `target`.
    """
    assert target.flags.c_contiguous and target.flags.writeable
    if not delta.size:
        return
    itemsize = target.dtype.itemsize
    bytes_n = target.reshape(-1).view(np.uint8)
    consumed = _apply(bytes_n, itemsize, np.ascontiguousarray(delta))
    if consumed != delta.size:
        raise DamagedDelta(
            f"expected a delta of {target.size:,} elements of {itemsize} bytes, got {delta.size:,} "
            f"bytes that are none"
        )


def most_bytes(size: int, itemsize: int) -> int:
    """Return the maximum number of bytes of a delta of `size` elements."""
    blocks = -(-size // BLOCK)
    return blocks * itemsize + size * itemsize


def _encoded(task: tuple[int, np.ndarray, np.ndarray]) -> tuple[int, np.ndarray, bool]:
    at, old_n, new_n = task
    out = np.empty(most_bytes(new_n.size, new_n.itemsize), np.uint8)
    used, changed = _encode(old_n, new_n, new_n.itemsize, out)
    return at, out[:used].copy(), changed > 0


@numba.njit(cache=True, nogil=True)
def _encode(old_n, new_n, itemsize, out):  # type: ignore[no-untyped-def]
    """Write all planes of all blocks; return the numbers of bytes written and elements changed."""
    at = 0
    total = 0
    changed_c = np.empty(BLOCK, np.int64)
    position_c = np.empty(BLOCK, np.int64)
    for start in range(0, len(new_n), BLOCK):
        size = min(BLOCK, len(new_n) - start)
        changed = 0
        for i in range(size):
            changed_c[changed] = i
            changed += old_n[start + i] != new_n[start + i]
        total += changed
        for plane in range(itemsize):
            shift = np.uint64(8 * plane)
            count = 0
            gap_bytes = 0
            before = -1
            for c in range(changed):
                i = changed_c[c]
                differs = np.uint64(old_n[start + i]) ^ np.uint64(new_n[start + i])
                if (differs >> shift) & np.uint64(255):
                    gap_bytes += 1 + (i - before - 1) // 255
                    before = i
                    position_c[count] = i
                    count += 1
            at = _write_plane(new_n, start, size, shift, position_c, count, gap_bytes, out, at)
    return at, total


@numba.njit(cache=True, nogil=True)
def _write_plane(new_n, start, size, shift, position_c, count, gap_bytes, out, at):  # type: ignore[no-untyped-def]
    """Write one plane of a block in its smallest form; return the offset of the next plane."""
    bitmap_bytes = (size + 7) // 8
    gaps = 4 + gap_bytes + count
    bitmap = 2 + bitmap_bytes + count
    if count == 0:
        out[at] = _NONE
        return at + 1
    if min(gaps, bitmap) >= size:
        out[at] = _DENSE
        for i in range(size):
            out[at + 1 + i] = (np.uint64(new_n[start + i]) >> shift) & np.uint64(255)
        return at + 1 + size
    out[at + 1] = count & 255
    out[at + 2] = count >> 8
    if gaps <= bitmap:
        out[at] = _GAPS
        out[at + 3] = gap_bytes & 255
        out[at + 4] = gap_bytes >> 8
        at += 5
        before = -1
        for c in range(count):
            gap = position_c[c] - before - 1
            while gap >= 255:
                out[at] = 255
                at += 1
                gap -= 255
            out[at] = gap
            at += 1
            before = position_c[c]
    else:
        out[at] = _BITMAP
        at += 3
        out[at : at + bitmap_bytes] = 0
        for c in range(count):
            out[at + position_c[c] // 8] |= 1 << (position_c[c] % 8)
        at += bitmap_bytes
    for c in range(count):
        out[at + c] = (np.uint64(new_n[start + position_c[c]]) >> shift) & np.uint64(255)
    return at + count


@numba.njit(cache=True, nogil=True)
def _apply(bytes_n, itemsize, delta):  # type: ignore[no-untyped-def]
    """Apply all planes of all blocks; return the number of bytes read, or -1 if invalid."""
    at = 0
    elements = len(bytes_n) // itemsize
    for start in range(0, elements, BLOCK):
        size = min(BLOCK, elements - start)
        for plane in range(itemsize):
            if at >= len(delta):
                return -1
            form = delta[at]
            at += 1
            first = start * itemsize + plane
            if form == _DENSE:
                if at + size > len(delta):
                    return -1
                for i in range(size):
                    bytes_n[first + i * itemsize] = delta[at + i]
                at += size
            elif form == _GAPS:
                at = _apply_gaps(bytes_n, first, itemsize, size, delta, at)
            elif form == _BITMAP:
                at = _apply_bitmap(bytes_n, first, itemsize, size, delta, at)
            elif form != _NONE:
                return -1
            if at < 0:
                return -1
    return at


@numba.njit(cache=True, nogil=True)
def _apply_gaps(bytes_n, first, itemsize, size, delta, at):  # type: ignore[no-untyped-def]
    if at + 4 > len(delta):
        return -1
    count = np.int64(delta[at]) | np.int64(delta[at + 1]) << 8
    values = at + 4 + (np.int64(delta[at + 2]) | np.int64(delta[at + 3]) << 8)
    if values + count > len(delta):
        return -1
    i = -1
    c = 0
    for g in range(at + 4, values):
        gap = np.int64(delta[g])
        if gap == 255:
            i += 255
            continue
        i += gap + 1
        if i >= size or c >= count:
            return -1
        bytes_n[first + i * itemsize] = delta[values + c]
        c += 1
    return values + count if c == count else -1


@numba.njit(cache=True, nogil=True)
def _apply_bitmap(bytes_n, first, itemsize, size, delta, at):  # type: ignore[no-untyped-def]
    values = at + 2 + (size + 7) // 8
    if values > len(delta):
        return -1
    count = np.int64(delta[at]) | np.int64(delta[at + 1]) << 8
    if values + count > len(delta):
        return -1
    c = 0
    for b in range(at + 2, values):
        bits = np.int64(delta[b])
        while bits:
            bit = 0
            while not (bits >> bit) & 1:
                bit += 1
            i = (b - at - 2) * 8 + bit
            if i >= size or c >= count:
                return -1
            bytes_n[first + i * itemsize] = delta[values + c]
            c += 1
            bits &= bits - 1
    return values + count if c == count else -1
