"""The host side of drafter cache rows: the tokens with cached entries, and the pages.

B = rows of the cache, S = positions of the cache, A = live requests, K = draft tokens of a chain.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numba
import numpy as np

from reprise.models.attention.kv_cache import KVCache
from reprise.spec.drafter import LiveSlots
from reprise.spec.page_table import PageTable

NO_OWNER = -1


class CachedRows:
    """Rows of tokens; the cache holds the entries of `tokens_BS[b, :known_B[b]]`.

    The entry of a token depends on this token and on earlier tokens. A row outlives its request.
    The next request in the row keeps the prefix that both texts share: a returning request keeps
    its tokens, a sibling keeps the prompt.
    """

    def __init__(self, num_rows: int, num_positions: int) -> None:
        self.tokens_BS = np.zeros((num_rows, num_positions), np.int32)
        self.filled_B = np.zeros(num_rows, np.int32)  # tokens, draft tokens included
        self.known_B = np.zeros(num_rows, np.int32)
        self.owner_B = np.full(num_rows, NO_OWNER, np.int64)
        # first position and number of the draft tokens in the last chain
        self.drafted_at_B = np.zeros(num_rows, np.int32)
        self.drafted_B = np.zeros(num_rows, np.int32)
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.owner_B)

    def follow(self, live: LiveSlots) -> tuple[np.ndarray, np.ndarray]:
        """Write request tokens to their rows; return the rows, and the acceptance of last chains.

        The acceptance is int [A, 2]: accepted draft tokens, and draft tokens with a known outcome.
        """
        rows_A = self._rows(live)
        total_A = np.minimum(live.total_tokens_A, self.tokens_BS.shape[1]).astype(np.int32)
        agreed_A = _follow(
            live.tokens_BL, live.rows_A, total_A, rows_A, self.tokens_BS, self.filled_B
        )
        at_A = self.drafted_at_B[rows_A]
        drafted_A = self.drafted_B[rows_A]
        seen_A = np.clip(total_A - at_A, 0, drafted_A)
        accepted_A = np.clip(agreed_A - at_A, 0, seen_A)
        self.drafted_B[rows_A] = 0
        self.roll_back(rows_A, agreed_A)
        return rows_A, np.stack([accepted_A, seen_A], axis=1)

    def roll_back(self, rows_A: np.ndarray, agreed_A: np.ndarray) -> None:
        """Forget entries after the first `agreed_A` tokens."""
        self.known_B[rows_A] = np.minimum(self.known_B[rows_A], agreed_A)

    def drafted(self, rows_A: np.ndarray, tokens_AK: np.ndarray, count_A: np.ndarray) -> None:
        """Append chains to these rows; the cache has the entries of all but the last token."""
        total_A = self.filled_B[rows_A]
        a, k = np.nonzero(np.arange(tokens_AK.shape[1]) < count_A[:, None])
        self.tokens_BS[rows_A[a], total_A[a] + k] = tokens_AK[a, k]
        self.filled_B[rows_A] = total_A + count_A
        self.known_B[rows_A] = total_A + count_A - 1
        self.drafted_at_B[rows_A] = total_A
        self.drafted_B[rows_A] = count_A

    def ended(self, live: LiveSlots) -> None:
        """Free the rows of these requests; each request must have a row."""
        for request_id in live.request_ids_A.tolist():
            self.owner_B[self._row_of.pop(request_id)] = NO_OWNER

    def has(self, live: LiveSlots) -> np.ndarray:
        """Return which of these requests have a row, bool [A]."""
        return np.array([r in self._row_of for r in live.request_ids_A.tolist()], bool)

    def resized(
        self, num_rows: int, num_positions: int, live: LiveSlots
    ) -> tuple[CachedRows, np.ndarray]:
        """Return resized rows and their old indices; live rows and the fullest rows are kept."""
        is_live_B = np.isin(self.owner_B, live.request_ids_A)
        order_B = np.lexsort((-self.known_B, self.owner_B == NO_OWNER, ~is_live_B))[:num_rows]
        if num_rows >= len(self):
            order_B = np.arange(len(self))
        new = CachedRows(num_rows, num_positions)
        n = len(order_B)
        S = min(num_positions, self.tokens_BS.shape[1])
        new.tokens_BS[:n, :S] = self.tokens_BS[order_B, :S]
        for name in ("filled_B", "known_B", "owner_B", "drafted_at_B", "drafted_B"):
            getattr(new, name)[:n] = getattr(self, name)[order_B]
        owned = np.nonzero(new.owner_B != NO_OWNER)[0].tolist()
        new._row_of = {int(new.owner_B[b]): b for b in owned}
        return new, np.concatenate([order_B, np.zeros(num_rows - n, int)]).astype(np.int32)

    def _rows(self, live: LiveSlots) -> np.ndarray:
        for a in np.nonzero(~self.has(live))[0].tolist():
            request_id = int(live.request_ids_A[a])
            tokens_T = live.tokens_BL[live.rows_A[a], : live.total_tokens_A[a]]
            b = self._best_free(tokens_T, live)
            self._row_of.pop(int(self.owner_B[b]), None)
            self._row_of[request_id] = b
            self.owner_B[b] = request_id
            self.drafted_B[b] = 0
        return np.array([self._row_of[r] for r in live.request_ids_A.tolist()], np.int64)

    def _best_free(self, tokens_T: np.ndarray, live: LiveSlots) -> int:
        """Return a row without a live request, by preference unowned, with the longest prefix."""
        common_B = np.minimum(_common(self.tokens_BS, self.filled_B, tokens_T), self.known_B)
        is_live_B = np.isin(self.owner_B, live.request_ids_A)
        order_B = np.lexsort((self.known_B, -common_B, self.owner_B != NO_OWNER, is_live_B))
        assert not is_live_B[order_B[0]], "there must be as many rows as requests"
        return int(order_B[0])


@numba.njit(cache=True, nogil=True)
def _follow(tokens_BL, rows_A, total_A, held_A, held_BS, filled_B):  # type: ignore[no-untyped-def]
    """Write request tokens to their rows; return the lengths of the shared prefixes."""
    agreed_A = np.zeros(len(rows_A), np.int32)
    for a in range(len(rows_A)):
        text = tokens_BL[rows_A[a]]
        held = held_BS[held_A[a]]
        b = held_A[a]
        k = 0
        end = min(total_A[a], filled_B[b])
        while k < end and text[k] == held[k]:
            k += 1
        agreed_A[a] = k
        filled_B[b] = total_A[a]
        for t in range(k, total_A[a]):
            held[t] = text[t]
    return agreed_A


@numba.njit(cache=True, nogil=True)
def _common(held_BS, filled_B, tokens_T):  # type: ignore[no-untyped-def]
    """Return the length of the prefix that each row shares with a text, int32 [B]."""
    out_B = np.zeros(len(held_BS), np.int32)
    for b in range(len(held_BS)):
        end = min(len(tokens_T), filled_B[b])
        while out_B[b] < end and held_BS[b, out_B[b]] == tokens_T[out_B[b]]:
            out_B[b] += 1
    return out_B


class RowPages:
    """The pages of the rows, for the tokens of a request and the next fetch, while pages last.

    Siblings share no pages. If pages run out, rows that do not draft now lose their pages. A
    request that still lacks pages drafts nothing for a while.
    """

    def __init__(self, num_rows: int, runner: Any) -> None:
        config = runner.config
        slot_pages, num_pages = (runner.slot_pages, runner.num_pages) if num_rows else (0, 0)
        T = config.page_tokens
        ways = runner.batch_ways
        self._table = PageTable(num_rows, slot_pages, num_pages, T, ways)
        self._num_positions = slot_pages * T
        self._ahead_tokens = max(config.max_nodes, config.rounds_per_fetch)
        self.has_room_B = np.zeros(num_rows, bool)
        self._is_stale = False

    def reserve(self, rows: CachedRows, rows_A: np.ndarray, total_A: np.ndarray) -> None:
        """Give rows pages for `total_A` tokens and the next fetch, while pages last."""
        drafts_B = np.isin(np.arange(len(rows)), rows_A)
        for row, total in zip(rows_A.tolist(), total_A.tolist(), strict=True):
            tokens = min(total + self._ahead_tokens, self._num_positions)
            held = self._table.held_B[row]
            self._table.release(row, tokens)  # pages of a longer, earlier request
            while not (has_room := self._table.reserve(row, tokens)):
                if not self._take_from(rows, row, ~drafts_B):
                    self._release(rows, row)
                    break
            self.has_room_B[row] = has_room
            self._is_stale |= self._table.held_B[row] != held

    def _take_from(self, rows: CachedRows, needing: int, may_lose_B: np.ndarray) -> bool:
        """Release another row of the same part: preferably unowned, then the least full."""
        part_B = self._table.part_B
        held_B = self._table.held_B
        others = [
            row
            for row in np.nonzero(may_lose_B & (held_B > 0))[0].tolist()
            if part_B[row] == part_B[needing]
        ]
        if not others:
            return False
        known_B = rows.known_B
        owner_B = rows.owner_B
        self._release(rows, min(others, key=lambda r: (owner_B[r] != NO_OWNER, known_B[r])))
        return True

    def _release(self, rows: CachedRows, row: int) -> None:
        self._table.release(row)
        rows.known_B[row] = 0
        self.has_room_B[row] = False
        self._is_stale = True

    def take_rows(self, rows: CachedRows, row_X: np.ndarray) -> None:
        """Make row i the former row `row_X[i]`; further rows and rows of other parts are empty."""
        before = len(self._table)
        ways = self._table.ways
        part_B = np.arange(len(rows)) * ways // len(rows)
        keep_B = np.pad(row_X, (0, len(rows) - len(row_X)), constant_values=-1)
        keep_B = np.where(keep_B * ways // before == part_B, keep_B, -1)
        self._table.take_rows(keep_B.tolist())
        rows.known_B[keep_B < 0] = 0
        self.has_room_B = np.where(keep_B < 0, False, self.has_room_B[np.maximum(keep_B, 0)])
        self._is_stale = True

    def on_device(self, cache: KVCache | None, runner: Any) -> KVCache:
        """Return the cache with the current page table."""
        assert cache is not None
        if self._is_stale:
            self._is_stale = False
            return dataclasses.replace(cache, table_BN=runner.put(self._table.pages_BN.copy()))
        return cache
