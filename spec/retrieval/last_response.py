"""Drafts that continue a request's own response of the last epoch.

Where noise repeats from epoch to epoch (`coupled`), and where a prefix has been cut (`lenient`),
the old response stays a good draft behind a token that differs: at the same position if a token
was replaced, a few positions further if some were inserted or left out. F = requests known,
L = tokens of a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np

from spec.drafter import PADDING, Drafter, Drafts, LiveSlots, Source, no_drafts

REACH = 16  # how far the old response is searched for the last two tokens, to either side
FOUND, LOST = 0.95, 0.5  # probability of the first draft token, after a match and without one
NEXT = 0.98  # the factor of each further one


class _Texts(NamedTuple):
    """The old responses, and how far each is shifted against the request's position."""

    tokens_FL: np.ndarray
    length_F: np.ndarray
    shift_F: np.ndarray


class LastResponseDrafter(Drafter):
    """Drafts a chain a request out of `cached`: last epoch's response by request id."""

    def __init__(self, cached: Mapping[int, np.ndarray]) -> None:
        longest = max(map(len, cached.values()), default=0)
        self._index = {request_id: f for f, request_id in enumerate(cached)}
        tokens_FL = np.full((len(cached), longest), PADDING, np.int32)
        for row_L, tokens in zip(tokens_FL, cached.values(), strict=True):
            row_L[: len(tokens)] = tokens
        length_F = np.array([len(t) for t in cached.values()], np.int32)
        self._texts = _Texts(tokens_FL, length_F, np.zeros(len(cached), np.int32))

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = no_drafts(len(live), max_nodes)
        which_A = np.array([self._index.get(r, -1) for r in live.request_ids_A.tolist()], np.int32)
        _continue(
            live.tokens_BL,
            live.rows_A,
            live.prompt_tokens_A,
            live.total_tokens_A,
            which_A,
            np.asarray(max_nodes_A, np.int32),
            self._texts,
            drafts,
        )
        drafts.sources_AN[:] = Source.LAST
        return drafts


@numba.njit(cache=True, nogil=True)
def _continue(  # type: ignore[no-untyped-def]
    tokens_BL, rows_A, prompt_tokens_A, total_tokens_A, which_A, most_A, texts, out
):
    for a in range(len(rows_A)):
        f = which_A[a]
        if f < 0:
            continue
        row, end = tokens_BL[rows_A[a]], total_tokens_A[a]
        emitted = end - prompt_tokens_A[a]
        found = emitted == 0 or _matches(row, end, emitted, texts, f, texts.shift_F[f], 1)
        if not found:
            for step in range(1, 2 * REACH + 1):  # +1, −1, +2, −2, …
                shift = texts.shift_F[f] + ((step + 1) // 2 if step % 2 else -(step // 2))
                if _matches(row, end, emitted, texts, f, shift, 2):
                    texts.shift_F[f], found = shift, True
                    break
        at = emitted + texts.shift_F[f]
        prob = FOUND if found else LOST
        for n in range(min(most_A[a], out.tokens_AN.shape[1])):
            if at + n < 0 or at + n >= texts.length_F[f]:
                break
            out.tokens_AN[a, n], out.parents_AN[a, n] = texts.tokens_FL[f, at + n], n - 1
            out.prob_AN[a, n] = prob
            prob *= NEXT
            out.count_A[a] = n + 1


@numba.njit(cache=True, nogil=True)
def _matches(row, end, emitted, texts, f, shift, num_tokens):  # type: ignore[no-untyped-def]
    """True if the response's last `num_tokens` are those of text f, `shift` positions further."""
    at = emitted + shift  # of the next token
    if num_tokens > emitted or at - num_tokens < 0 or at > texts.length_F[f]:
        return False
    for k in range(1, num_tokens + 1):
        if row[end - k] != texts.tokens_FL[f, at - k]:
            return False
    return True
