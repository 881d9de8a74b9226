"""The least of many keys that change: a heap whose outdated entries are dropped as they come up."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key", int, float, tuple[int, ...])
SPARE = 16  # outdated entries that are always kept


class LazyHeap(Generic[Key]):
    """Numbers by their keys, the least key first; ties go by number.

    `set` and `first` take O(log n) and `drop` O(1), amortized over n numbers: the heap is built
    anew when more than half of it is outdated, so that it never has more than 2n + SPARE entries.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, number: int, key: Key) -> None:
        """Enter a number, or change its key."""
        keys, heap = self._keys, self._heap
        if keys.get(number) == key:
            return
        keys[number] = key
        if len(heap) < 2 * len(keys) + SPARE:
            heapq.heappush(heap, (key, number))
        else:
            heap[:] = [(key, number) for number, key in keys.items()]
            heapq.heapify(heap)

    def drop(self, number: int) -> None:
        """Remove a number, if it is there."""
        self._keys.pop(number, None)
        if not self._keys:
            self._heap.clear()

    def first(self) -> int | None:
        """Return the number with the least key, which stays; None if there is none."""
        keys, heap = self._keys, self._heap
        while heap:
            key, number = heap[0]
            if keys.get(number) == key:
                return number
            heapq.heappop(heap)
        return None
