"""Sizes of shapes: the smallest times powers of two, so that few programs are compiled."""

from __future__ import annotations


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """Return the least smallest · 2^i that is at least `size`, but at most `largest`."""
    value = smallest
    while value < size:
        value *= 2
    return value if largest is None else min(value, largest)


def buckets(size: int, smallest: int) -> list[int]:
    """Return all buckets up to the one for `size`, smallest first."""
    sizes = [smallest]
    while sizes[-1] < size:
        sizes.append(2 * sizes[-1])
    return sizes


def widest_tree(num_slots: int, num_nodes: int, max_nodes: int) -> int:
    """Return the most nodes of a slot in a round, to which attention pads: twice the average."""
    return min(max_nodes, -(-2 * num_nodes // num_slots))
