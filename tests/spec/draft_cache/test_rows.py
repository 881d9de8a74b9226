"""Tokens of the rows of a drafter's cache, by hand."""

import numpy as np
import pytest

from spec.draft_cache.rows import CachedRows
from spec.drafter import LiveSlots


def live(texts, prompt_tokens=1):
    """Live requests by id."""
    A = len(texts)
    tokens_BL = np.zeros((A, 16), np.int32)
    for row, text in zip(tokens_BL, texts.values(), strict=True):
        row[: len(text)] = text
    total_A = np.array([len(t) for t in texts.values()], np.int32)
    return LiveSlots(
        rows_A=np.arange(A),
        request_ids_A=np.array(list(texts), np.int64),
        group_ids_A=np.zeros(A, np.int64),
        prompt_tokens_A=np.full(A, prompt_tokens, np.int32),
        total_tokens_A=total_A,
        remaining_tokens_A=16 - total_A,
        tokens_BL=tokens_BL,
    )


def drafted(held, texts, *chains):
    """Rows whose requests were followed, all computed, and drafted for."""
    rows_A, _ = held.follow(live(texts))
    held.known_B[rows_A] = [len(t) for t in texts.values()]
    longest = max(map(len, chains))
    tokens_AK = np.array([[*c, *[-9] * (longest - len(c))] for c in chains])
    held.drafted(rows_A, tokens_AK, np.array([len(c) for c in chains]))
    return rows_A


def test_a_row_that_is_new_knows_nothing():
    held = CachedRows(2, 16)
    rows_A, acceptance_A2 = held.follow(live({7: [1, 2, 3], 4: [5]}))
    assert sorted(rows_A.tolist()) == [0, 1] and acceptance_A2.tolist() == [[0, 0], [0, 0]]
    assert held.known_B.tolist() == [0, 0]
    assert held.filled_B[rows_A].tolist() == [3, 1]
    assert held.tokens_BS[rows_A[0], :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("now", "known", "accepted", "seen"),
    [
        ([1, 2, 6, 7, 8, 3], 4, 3, 3),  # all accepted: the last draft token has no entry
        ([1, 2, 6, 7, 9], 4, 2, 3),
        ([1, 2, 9], 2, 0, 1),
        ([1, 2, 6], 3, 1, 1),  # so far
        ([1, 2, 9, 7, 8, 3, 3], 2, 0, 3),
        ([1, 9, 6, 7, 8], 1, 0, 3),  # not what it was
        ([1], 1, 0, 0),
    ],
)
def test_entries_of_accepted_drafts_stay(now, known, accepted, seen):
    held = CachedRows(2, 16)
    rows_A = drafted(held, {7: [1, 2], 4: [5]}, [6, 7, 8], [5])
    assert held.known_B[rows_A].tolist() == [4, 1]
    again_A, acceptance_A2 = held.follow(live({4: [5, 5], 7: now}))
    assert again_A.tolist() == rows_A[::-1].tolist()
    assert held.known_B[again_A].tolist() == [1, known]
    assert acceptance_A2.tolist() == [[1, 1], [accepted, seen]]
    assert held.tokens_BS[again_A[1], : len(now)].tolist() == now
    assert held.follow(live({7: now}))[1].tolist() == [[0, 0]]  # counted once


def test_the_last_position_is_never_known():
    """Longer chains of other rows may have written there."""
    held = CachedRows(1, 6)
    drafted(held, {7: [1, 2, 3]}, [4, 5, 6])
    assert held.known_B.tolist() == [5] and held.filled_B.tolist() == [6]


def test_free_rows_go_to_those_that_have_most_in_common_with_them():
    held = CachedRows(3, 16)
    texts = {1: [1, 2, 3, 4], 2: [1, 2, 9], 3: [8]}
    row = dict(zip(texts, drafted(held, texts, [5], [5], [5]).tolist(), strict=True))
    held.ended(live({1: texts[1], 2: texts[2]}))
    rows_A, _ = held.follow(live({3: texts[3], 6: [1, 2, 9, 9]}))
    assert rows_A.tolist() == [row[3], row[2]] and held.known_B[row[2]] == 3
    rows_A, _ = held.follow(live({6: [1, 2, 9, 9], 3: texts[3], 7: [7]}))
    assert rows_A.tolist() == [row[2], row[3], row[1]] and held.known_B[row[1]] == 0


def test_rows_of_requests_that_are_away_are_taken_last():
    held = CachedRows(3, 16)
    texts = {1: [1, 2, 3, 4], 2: [4]}
    first, second = drafted(held, texts, [5], [5]).tolist()
    rows_A, _ = held.follow(live({9: [1, 2, 3]}))
    [third] = rows_A.tolist()
    assert {first, second, third} == {0, 1, 2} and held.known_B[third] == 0
    assert held.has(live(texts)).all()
    rows_A, _ = held.follow(live({9: [1, 2, 3], 8: [4, 4]}))
    assert rows_A.tolist() == [third, second]
    assert held.has(live({1: [1], 2: [4], 8: [4]})).tolist() == [True, False, True]
    with pytest.raises(AssertionError, match="as many rows as requests"):
        held.follow(live({9: [1], 8: [1], 7: [1], 6: [1]}))
