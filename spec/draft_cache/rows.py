"""The host's record of the tokens whose keys and values a drafter's own cache holds.

B = rows of the cache, S = its positions, A = live requests, K = draft tokens of a chain.
"""

from __future__ import annotations

import numba
import numpy as np

from spec.drafter import LiveSlots

NOBODY = -1


class CachedRows:
    """Rows of tokens; the cache holds the entries of `tokens_BS[b, :known_B[b]]`.

    The entry of a token depends on it and on those before it, on no later one. A row outlives its
    request. The next request in it keeps the prefix that the two texts share: a request that
    returns its own tokens, a sibling the prompt.
    """

    def __init__(self, num_rows: int, num_positions: int) -> None:
        self.tokens_BS = np.zeros((num_rows, num_positions), np.int32)
        self.filled_B = np.zeros(num_rows, np.int32)  # tokens, draft tokens included
        self.known_B = np.zeros(num_rows, np.int32)
        self.owner_B = np.full(num_rows, NOBODY, np.int64)
        # first position and number of the last chain's draft tokens
        self.drafted_at_B = np.zeros(num_rows, np.int32)
        self.drafted_B = np.zeros(num_rows, np.int32)
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.owner_B)

    def follow(self, live: LiveSlots) -> tuple[np.ndarray, np.ndarray]:
        """Write the live requests' tokens to their rows; return the rows, and int [A, 2].

        The latter is how many draft tokens of the last chain were accepted, and of how many that is
        known. There must be as many rows as requests.
        """
        rows_A = self._rows(live)
        total_A = np.minimum(live.total_tokens_A, self.tokens_BS.shape[1]).astype(np.int32)
        texts = live.tokens_BL, live.rows_A, total_A
        agreed_A = _follow(*texts, rows_A, self.tokens_BS, self.filled_B)
        at_A, drafted_A = self.drafted_at_B[rows_A], self.drafted_B[rows_A]
        seen_A = np.clip(total_A - at_A, 0, drafted_A)
        accepted_A = np.clip(agreed_A - at_A, 0, seen_A)
        self.drafted_B[rows_A] = 0
        self.roll_back(rows_A, agreed_A)
        return rows_A, np.stack([accepted_A, seen_A], axis=1)

    def roll_back(self, rows_A: np.ndarray, agreed_A: np.ndarray) -> None:
        """Forget entries behind the first `agreed_A` tokens: their drafts were rejected."""
        self.known_B[rows_A] = np.minimum(self.known_B[rows_A], agreed_A)

    def drafted(self, rows_A: np.ndarray, tokens_AK: np.ndarray, count_A: np.ndarray) -> None:
        """Append chains to these rows; the cache has the entries of all but the last token."""
        total_A = self.filled_B[rows_A]
        a, k = np.nonzero(np.arange(tokens_AK.shape[1]) < count_A[:, None])
        self.tokens_BS[rows_A[a], total_A[a] + k] = tokens_AK[a, k]
        self.filled_B[rows_A] = total_A + count_A
        self.known_B[rows_A] = total_A + count_A - 1
        self.drafted_at_B[rows_A], self.drafted_B[rows_A] = total_A, count_A

    def ended(self, live: LiveSlots) -> None:
        """Free the rows of these requests, which each have one."""
        for request_id in live.request_ids_A.tolist():
            self.owner_B[self._row_of.pop(request_id)] = NOBODY

    def has(self, live: LiveSlots) -> np.ndarray:
        """Return which of these requests have a row, bool [A]."""
        return np.array([r in self._row_of for r in live.request_ids_A.tolist()], bool)

    def resized(
        self, num_rows: int, num_positions: int, live: LiveSlots
    ) -> tuple[CachedRows, np.ndarray]:
        """Return a table of another size, and which row each of its rows was, int32 [B].

        With fewer rows, those of live requests are kept, then those with the most known entries.
        New rows know nothing.
        """
        is_live_B = np.isin(self.owner_B, live.request_ids_A)
        order_B = np.lexsort((-self.known_B, self.owner_B == NOBODY, ~is_live_B))[:num_rows]
        if num_rows >= len(self):
            order_B = np.arange(len(self))
        new, n = CachedRows(num_rows, num_positions), len(order_B)
        S = min(num_positions, self.tokens_BS.shape[1])
        new.tokens_BS[:n, :S] = self.tokens_BS[order_B, :S]
        for name in ("filled_B", "known_B", "owner_B", "drafted_at_B", "drafted_B"):
            getattr(new, name)[:n] = getattr(self, name)[order_B]
        owned = np.nonzero(new.owner_B != NOBODY)[0].tolist()
        new._row_of = {int(new.owner_B[b]): b for b in owned}
        return new, np.concatenate([order_B, np.zeros(num_rows - n, int)]).astype(np.int32)

    def _rows(self, live: LiveSlots) -> np.ndarray:
        for a in np.nonzero(~self.has(live))[0].tolist():
            request_id = int(live.request_ids_A[a])
            tokens_T = live.tokens_BL[live.rows_A[a], : live.total_tokens_A[a]]
            b = self._best_free(tokens_T, live)
            self._row_of.pop(int(self.owner_B[b]), None)
            self._row_of[request_id] = b
            self.owner_B[b], self.drafted_B[b] = request_id, 0
        return np.array([self._row_of[r] for r in live.request_ids_A.tolist()], np.int64)

    def _best_free(self, tokens_T: np.ndarray, live: LiveSlots) -> int:
        """Return the free row that shares the longest prefix with a text, then knows least.

        Rows of requests that are not live now are taken only if no other is free.
        """
        common_B = np.minimum(_common(self.tokens_BS, self.filled_B, tokens_T), self.known_B)
        is_live_B = np.isin(self.owner_B, live.request_ids_A)
        order_B = np.lexsort((self.known_B, -common_B, self.owner_B != NOBODY, is_live_B))
        assert not is_live_B[order_B[0]], "there must be as many rows as requests"
        return int(order_B[0])


@numba.njit(cache=True, nogil=True)
def _follow(tokens_BL, rows_A, total_A, held_A, held_BS, filled_B):  # type: ignore[no-untyped-def]
    """Write each request's tokens to its row; return the lengths of the prefixes they share."""
    agreed_A = np.zeros(len(rows_A), np.int32)
    for a in range(len(rows_A)):
        text, held, b = tokens_BL[rows_A[a]], held_BS[held_A[a]], held_A[a]
        k, end = 0, min(total_A[a], filled_B[b])
        while k < end and text[k] == held[k]:
            k += 1
        agreed_A[a], filled_B[b] = k, total_A[a]
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
