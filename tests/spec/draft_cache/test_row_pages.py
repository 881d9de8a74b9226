"""Pages of a drafter's cache: who gets them, who loses them, and what rows know then."""

import types

import numpy as np
import pytest

from spec.draft_cache.row_pages import RowPages
from spec.draft_cache.rows import NOBODY, CachedRows

T, AHEAD, POSITIONS = 4, 3, 40


def make(num_rows, num_pages, ways=1):
    config = types.SimpleNamespace(page_tokens=T, max_nodes=AHEAD, rounds_per_fetch=2)
    runner = types.SimpleNamespace(config=config, num_pages=num_pages, batch_ways=ways)
    rows = CachedRows(num_rows, POSITIONS)
    rows.owner_B[:] = np.arange(num_rows)
    return rows, RowPages(num_rows, POSITIONS, runner)


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
    rows.owner_B[1] = NOBODY
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
