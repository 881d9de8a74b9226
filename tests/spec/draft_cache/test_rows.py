"""Rows of a drafter's cache, and their pages."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
from live_by_hand import live_texts

from reprise.spec.draft_cache.rows import NO_OWNER, CachedRows, RowPages


def live(texts, prompt_tokens=1):
    """Live requests by id."""
    view = live_texts(*texts.values(), prompt=prompt_tokens)
    return dataclasses.replace(view, request_ids_A=np.array(list(texts), np.int64))


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


T, AHEAD, POSITIONS = 4, 3, 40


def make(num_rows, num_pages, ways=1):
    config = types.SimpleNamespace(page_tokens=T, max_nodes=AHEAD, rounds_per_fetch=2)
    runner = types.SimpleNamespace(
        config=config, num_pages=num_pages, slot_pages=POSITIONS // T, batch_ways=ways
    )
    rows = CachedRows(num_rows, POSITIONS)
    rows.owner_B[:] = np.arange(num_rows)
    return rows, RowPages(num_rows, runner)


def reserve(rows, pages, wanted):
    """Reserve for {row: tokens}, which are known then; return the pages that rows hold."""
    pages.reserve(rows, np.array([*wanted]), np.array([*wanted.values()]))
    for row, tokens in wanted.items():
        rows.known_B[row] = tokens if pages.has_room_B[row] else 0
    return pages._table.held_B.tolist()


def test_rows_hold_pages_for_their_tokens_and_a_fetch():
    rows, pages = make(3, 30)
    assert reserve(rows, pages, {0: 5, 2: 6}) == [2, 0, 3]
    assert pages.has_room_B.tolist() == [True, False, True]
    assert reserve(rows, pages, {0: 39, 2: 1}) == [10, 0, 1], "no more than a row has positions"


def test_where_pages_lack_rows_without_a_request_lose_theirs_first():
    rows, pages = make(4, 8)
    reserve(rows, pages, {0: 5, 1: 5, 2: 9})
    rows.owner_B[1] = NO_OWNER
    assert reserve(rows, pages, {3: 9}) == [2, 0, 3, 3]
    assert rows.known_B.tolist() == [5, 0, 9, 9]
    assert reserve(rows, pages, {3: 13}) == [0, 0, 3, 4], "then those that do not draft"


def test_a_request_that_finds_too_few_pages_drafts_nothing():
    rows, pages = make(2, 4)
    assert reserve(rows, pages, {0: 9, 1: 9}) == [3, 0]
    assert pages.has_room_B.tolist() == [True, False]
    assert rows.known_B.tolist() == [9, 0]
    assert reserve(rows, pages, {1: 9}) == [0, 3] and pages.has_room_B[1]


@pytest.mark.parametrize(("row_X", "known"), [([1, 3], [7, 9]), ([3, 1], [0, 0])])
def test_rows_that_change_their_part_of_the_devices_know_nothing(row_X, known):
    rows, pages = make(4, 16, ways=2)
    reserve(rows, pages, {0: 6, 1: 7, 2: 8, 3: 9})
    taken = CachedRows(2, POSITIONS)
    taken.known_B[:] = rows.known_B[row_X]
    pages.take_rows(taken, np.array(row_X))
    assert taken.known_B.tolist() == known
    assert pages._table.held_B.tolist() == [-(-(k + AHEAD) // T) if k else 0 for k in known]
    assert pages._table.num_free(0) + pages._table.num_free(1) == 16 - pages._table.held_B.sum()
