"""What looked-up draft tokens would have brought, of tokens that were drawn another way.

A probe keeps texts as they are now; once its requests have grown, it replays the device's
rule (`spec.retrieval.device_lookup.find`, `chains`) on their new tokens. So the budget learns what
looking up is worth, and no round is spent on it. A = probed requests, L = tokens of a text.
"""

from __future__ import annotations

import dataclasses

import numba
import numpy as np

from spec.drafter import LiveSlots
from spec.retrieval.device_lookup import CONTEXT_TOKENS, LEAST_MATCH, LookupOutcome
from spec.retrieval.lookup_texts import LookupTexts

MOST_REQUESTS = 16  # of a probe: more would say little more
LEAST_TOKENS = 8  # a request, in the mean, before a probe is judged


@dataclasses.dataclass(frozen=True, eq=False)
class LookupProbe:
    """Texts of some live requests, and how far these were when the texts were made."""

    request_ids_A: np.ndarray
    total_tokens_A: np.ndarray
    text_AL: np.ndarray
    next_A: np.ndarray

    def judge(self, live: LiveSlots, num_nodes: int) -> tuple[LiveSlots, LookupOutcome] | None:
        """Of which requests it can tell, and how rounds of `num_nodes` would have fared.

        None while that is too early. What a round would have met after the last known token
        is left open, and requests that are gone do not count.
        """
        mine_A, theirs_A = np.nonzero(self.request_ids_A[:, None] == live.request_ids_A)
        known = live.take(theirs_A)
        start_A = self.total_tokens_A[mine_A]
        if int((known.total_tokens_A - start_A).sum()) < LEAST_TOKENS * len(known):
            return None
        reached_AJ, accepted_AJ = np.zeros((2, len(known), num_nodes - 1), np.int64)
        tried = _replay(
            self.text_AL[mine_A],
            self.next_A[mine_A],
            known.tokens_BL,
            known.rows_A,
            start_A,
            known.total_tokens_A,
            reached_AJ,
            accepted_AJ,
        )
        return known, LookupOutcome(tried, reached_AJ, accepted_AJ)


def probe(texts: LookupTexts, live: LiveSlots, num_slots: int) -> LookupProbe:
    """A probe of at most `MOST_REQUESTS` live requests, as of now."""
    text_BL, _, next_B = texts.fill(live, num_slots)
    chosen = live.take(np.arange(0, len(live), -(-len(live) // MOST_REQUESTS)))
    rows_A = chosen.rows_A
    return LookupProbe(chosen.request_ids_A, chosen.total_tokens_A, text_BL[rows_A], next_B[rows_A])


@numba.njit(cache=True, nogil=True)
def _replay(  # type: ignore[no-untyped-def]
    text_AL, next_A, tokens_BL, rows_A, start_A, end_A, reached_AJ, accepted_AJ
):
    tried, L, most = 0, text_AL.shape[1], accepted_AJ.shape[1]
    for a in range(len(rows_A)):
        text_L, tokens_L = text_AL[a], tokens_BL[rows_A[a]]
        at, end, following = start_A[a], end_A[a], next_A[a]
        while at < end:
            place = _place(text_L, tokens_L, at, following)
            longest = min(most, L - place)
            hits = 0
            while hits < longest and at + hits < end:
                if text_L[place + hits] != tokens_L[at + hits]:
                    break
                hits += 1
            reached_AJ[a, :hits] += 1
            accepted_AJ[a, :hits] += 1
            if at + hits == end:
                break  # what comes next is not known
            if hits < most:
                reached_AJ[a, hits] += 1
            tried += (text_L[place : place + longest] >= 0).sum()
            at += hits + 1
            following = place + hits + 1 if place < L else L
    return tried


@numba.njit(cache=True, nogil=True)
def _place(text_L, tokens_L, end, following):  # type: ignore[no-untyped-def]
    """`spec.retrieval.device_lookup.find` for one request whose context is tokens_L[:end]."""
    L = len(text_L)
    best, place = 0, L
    for at in range(L - 1):
        follows = at == following - 1
        if text_L[at] != tokens_L[end - 1] and not follows:
            continue
        if text_L[at + 1] < 0:
            continue
        length = 0
        while length < min(CONTEXT_TOKENS, at + 1, end):
            if text_L[at - length] != tokens_L[end - 1 - length]:
                break
            length += 1
        if length < LEAST_MATCH and not follows:
            continue
        score = 2 * length + 3 * follows
        if score > best:
            best, place = score, at + 1
    return place
