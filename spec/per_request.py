"""State of each live request, as rows of arrays. A = live requests, F = rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spec.drafter import LiveSlots


class RequestIndex:
    """A row number below `size` for each request; numbers of forgotten requests are reused."""

    def __init__(self) -> None:
        self.size = 0
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self._last_ids_A = np.empty(0, np.int64)
        self._last_rows_A = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, live: LiveSlots) -> np.ndarray:
        """Return the number of each live request, int64 [A]; new requests are given one."""
        ids_A = live.request_ids_A
        if ids_A is not self._last_ids_A:
            if not np.array_equal(ids_A, self._last_ids_A):
                ids = ids_A.tolist()
                self._last_rows_A = np.fromiter(map(self._number, ids), np.int64, len(ids))
            self._last_ids_A = ids_A
        return self._last_rows_A

    def forget(self, request_ids: Iterable[int]) -> list[int]:
        """Forget requests that have ended; return the numbers that they had."""
        had = [self._numbers.pop(r) for r in request_ids if r in self._numbers]
        self._free += had
        if had:
            self._last_ids_A = np.empty(0, np.int64)
        return had

    def _number(self, request_id: int) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            if not self._free:
                self._free.append(self.size)
                self.size += 1
            number = self._numbers[request_id] = self._free.pop()
        return number


def with_room(rows_F: np.ndarray, size: int, fill: float) -> np.ndarray:
    """Return `rows_F` if it has `size` rows, else a longer copy whose new rows are `fill`."""
    if len(rows_F) >= size:
        return rows_F
    longer = np.full((max(size, 2 * len(rows_F)), *rows_F.shape[1:]), fill, rows_F.dtype)
    longer[: len(rows_F)] = rows_F
    return longer


class PerRequest:
    """A number per request, kept by its id; new requests start at `start`."""

    def __init__(self, index: RequestIndex, start: float) -> None:
        self._index, self._start = index, start
        self._values_F = np.empty(0, np.float64)

    def get(self, live: LiveSlots) -> np.ndarray:
        which_A = self._index.of(live)
        self._values_F = with_room(self._values_F, self._index.size, self._start)
        return self._values_F[which_A]

    def set(self, live: LiveSlots, values_A: np.ndarray) -> None:
        which_A = self._index.of(live)
        self._values_F = with_room(self._values_F, self._index.size, self._start)
        self._values_F[which_A] = values_A
