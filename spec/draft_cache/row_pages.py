"""The pages of a drafter's cache: a row holds those of its request's tokens and of the next fetch.

They are as many as the engine's, but siblings share none. Where they lack, rows whose requests do
not draft now lose theirs; a request that still finds too few drafts nothing for a while.

B = rows of the cache, A = requests that draft.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.paged_cache import Cache, PagedCache
from spec.draft_cache.rows import NOBODY, CachedRows
from spec.page_table import PageTable


class RowPages:
    """The table of the rows' pages, and which rows have room for their requests."""

    def __init__(self, num_rows: int, num_positions: int, runner: Any) -> None:
        config, self._num_positions = runner.config, num_positions
        T, ways = config.page_tokens, runner.batch_ways
        num_pages = runner.num_pages if num_rows else 0
        self._table = PageTable(num_rows, num_positions // T, num_pages, T, ways)
        self._ahead_tokens = max(config.max_nodes, config.rounds_per_fetch)
        self.has_room_B = np.zeros(num_rows, bool)
        self._is_stale = False

    def reserve(self, rows: CachedRows, rows_A: np.ndarray, total_A: np.ndarray) -> None:
        """Give rows pages for so many tokens and those of a fetch, as far as there are any."""
        drafts_B = np.isin(np.arange(len(rows)), rows_A)
        for row, total in zip(rows_A.tolist(), total_A.tolist(), strict=True):
            tokens = min(total + self._ahead_tokens, self._num_positions)
            held = self._table.held_B[row]
            self._table.release(row, tokens)  # of a longer request before it
            while not (has_room := self._table.reserve(row, tokens)):
                if not self._take_from(rows, row, ~drafts_B):
                    self._release(rows, row)
                    break
            self.has_room_B[row] = has_room
            self._is_stale |= self._table.held_B[row] != held

    def _take_from(self, rows: CachedRows, needing: int, may_lose_B: np.ndarray) -> bool:
        """Release another row of the same part: one without a request, which knows least."""
        part_of, held_B = self._table.part_of, self._table.held_B
        others = [
            row
            for row in np.nonzero(may_lose_B & (held_B > 0))[0].tolist()
            if part_of(row) == part_of(needing)
        ]
        if not others:
            return False
        known_B, owner_B = rows.known_B, rows.owner_B
        self._release(rows, min(others, key=lambda r: (owner_B[r] != NOBODY, known_B[r])))
        return True

    def _release(self, rows: CachedRows, row: int) -> None:
        self._table.release(row)
        rows.known_B[row], self.has_room_B[row], self._is_stale = 0, False, True

    def take_rows(self, rows: CachedRows, row_X: np.ndarray) -> None:
        """Make row i what row `row_X[i]` was; those behind are new, as are those of other parts."""
        before, ways = len(self._table), self._table.ways
        part_B = np.arange(len(rows)) * ways // len(rows)
        kept_B = np.pad(row_X, (0, len(rows) - len(row_X)), constant_values=-1)
        kept_B = np.where(kept_B * ways // before == part_B, kept_B, -1)
        self._table.take_rows(kept_B.tolist())
        rows.known_B[kept_B < 0] = 0
        self.has_room_B = np.where(kept_B < 0, False, self.has_room_B[np.maximum(kept_B, 0)])
        self._is_stale = True

    def on_device(self, cache: Cache | None, runner: Any) -> PagedCache:
        """Return the cache with this table."""
        assert isinstance(cache, PagedCache)
        if self._is_stale:
            self._is_stale = False
            return dataclasses.replace(cache, table_BN=runner.put(self._table.pages_BN.copy()))
        return cache
