"""Sizes that shapes come in: powers of two of the smallest, so that few are compiled."""

from __future__ import annotations


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """The least of smallest · 2^i that holds `size`, at most `largest`."""
    value = smallest
    while value < size:
        value *= 2
    return value if largest is None else min(value, largest)


def buckets(size: int, smallest: int) -> list[int]:
    """All of them up to that of `size`, smallest first."""
    sizes = [smallest]
    while sizes[-1] < size:
        sizes.append(2 * sizes[-1])
    return sizes
