"""Drafts from the request's own response of last epoch, read on from where it stands.

Where noise repeats from epoch to epoch (`coupled`), and where a prefix has been cut
(`lenient`), the old response goes on being a good draft token behind a token that differs: at
the same place where a token was replaced, a few places further where some were put in
or left out. F = requests known, L = tokens of a response.
"""

from __future__ import annotations

from collections.abc import Mapping

import numba
import numpy as np

from spec.drafter import Drafts, LiveSlots, Source, no_drafts
from spec.tree import PADDING

REACH = 16  # how far the old text is searched for the last two tokens, to either side
FOUND, LOST = (
    0.95,
    0.5,
)  # probability of the first draft token, where the last token was met and where not
NEXT = 0.98  # of each further one


class AlignedDrafter:
    """A chain a request, out of `cached`: last epoch's response by request id."""

    def __init__(self, cached: Mapping[int, np.ndarray]) -> None:
        longest = max(map(len, cached.values()), default=0)
        self._place = {request_id: f for f, request_id in enumerate(cached)}
        self._tokens_FL = np.full((len(cached), longest), PADDING, np.int32)
        for row_L, tokens in zip(self._tokens_FL, cached.values(), strict=True):
            row_L[: len(tokens)] = tokens
        self._length_F = np.array([len(t) for t in cached.values()], np.int32)
        self._shift_F = np.zeros(len(cached), np.int32)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = no_drafts(len(live), max_nodes)
        which_A = np.array([self._place.get(r, -1) for r in live.request_ids_A.tolist()], np.int32)
        _read_on(
            live.tokens_BL,
            live.rows_A,
            live.prompt_tokens_A,
            live.total_tokens_A,
            which_A,
            self._tokens_FL,
            self._length_F,
            self._shift_F,
            np.asarray(max_nodes_A, np.int32),
            drafts.tokens_AN,
            drafts.parents_AN,
            drafts.prob_AN,
            drafts.count_A,
        )
        drafts.sources_AN[:] = Source.LAST
        return drafts

    def finished(self, live: LiveSlots) -> None:
        """Nothing to forget: a phase knows its requests."""


@numba.njit(cache=True, nogil=True)
def _read_on(  # type: ignore[no-untyped-def]
    tokens_BL,
    rows_A,
    prompt_tokens_A,
    total_tokens_A,
    which_A,
    text_FL,
    length_F,
    shift_F,
    most_A,
    tokens_AN,
    parents_AN,
    prob_AN,
    count_A,
):
    for a in range(len(rows_A)):
        f = which_A[a]
        if f < 0:
            continue
        row, end = tokens_BL[rows_A[a]], total_tokens_A[a]
        emitted = end - prompt_tokens_A[a]
        found = emitted == 0 or _met(row, end, emitted, text_FL[f], length_F[f], shift_F[f], 1)
        if not found:
            for step in range(1, 2 * REACH + 1):  # +1, −1, +2, −2, …
                shift = shift_F[f] + ((step + 1) // 2 if step % 2 else -(step // 2))
                if _met(row, end, emitted, text_FL[f], length_F[f], shift, 2):
                    shift_F[f], found = shift, True
                    break
        at = emitted + shift_F[f]
        prob = FOUND if found else LOST
        for n in range(min(most_A[a], tokens_AN.shape[1])):
            if at + n < 0 or at + n >= length_F[f]:
                break
            tokens_AN[a, n], parents_AN[a, n] = text_FL[f, at + n], n - 1
            prob_AN[a, n] = prob
            prob *= NEXT
            count_A[a] = n + 1


@numba.njit(cache=True, nogil=True)
def _met(row, end, emitted, text, length, shift, num_tokens):  # type: ignore[no-untyped-def]
    """Whether the response's last `num_tokens` are those of the text, so much further on."""
    at = emitted + shift  # what comes next
    if num_tokens > emitted or at - num_tokens < 0 or at > length:
        return False
    for k in range(1, num_tokens + 1):
        if row[end - k] != text[at - k]:
            return False
    return True
