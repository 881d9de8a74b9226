"""Bucketed array sizes, `smallest` times powers of two, so that few programs are compiled."""

from __future__ import annotations


def bucket(size: int, smallest: int, largest: int | None = None) -> int:
    """Return the least `smallest` · 2^i that is at least `size`, capped at `largest`."""
    value = smallest
    while value < size:
        value *= 2
    return value if largest is None else min(value, largest)


def buckets(size: int, smallest: int) -> list[int]:
    """Return all buckets up to the bucket of `size`, smallest first."""
    sizes = [smallest]
    while sizes[-1] < size:
        sizes.append(2 * sizes[-1])
    return sizes


def widest_tree(num_slots: int, num_nodes: int, max_nodes: int) -> int:
    """Return the most nodes per slot in a round: twice the average. Attention pads trees to it."""
    return min(max_nodes, -(-2 * num_nodes // num_slots))
