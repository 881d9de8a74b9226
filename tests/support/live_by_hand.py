"""Live requests for tests, and what a drafter drafts for them."""

import numpy as np

from reprise.spec.drafter import LiveSlots


def live_slots(num):
    ids = np.arange(num)
    return LiveSlots(ids, ids, ids, ids, ids, ids, np.zeros((num, 2), np.int32))


def ids(*tokens):
    return np.asarray(tokens, np.int32)


def live_texts(*rows, groups=None, prompt=2, first_id=0):
    """Each row is the prompt and response of a request."""
    A = len(rows)
    tokens_BL = np.zeros((A, max(32, *map(len, rows))), np.int32)
    for a, row in enumerate(rows):
        tokens_BL[a, : len(row)] = row
    names = np.arange(first_id, first_id + A)
    totals = np.asarray([len(row) for row in rows], np.int32)
    return LiveSlots(
        np.arange(A, dtype=np.int32),
        names,
        np.zeros(A, np.int64) if groups is None else np.asarray(groups),
        np.full(A, prompt, np.int32),
        totals,
        np.full(A, 20),
        tokens_BL,
    )


def drafts(drafter, view, most=4):
    drafts = drafter.propose(view, np.full(len(view), most), most)
    return [drafts.tokens_AN[a, : drafts.count_A[a]].tolist() for a in range(len(view))]
