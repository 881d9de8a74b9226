"""What a drafter's cache computes before a draft, and what it keeps, with steps that only note."""

import dataclasses
import types
from functools import partial

import numpy as np
import pytest
from draft_model_reference import LONGEST, MODEL, POLICY, Host

from reprise.models.attention import kv_cache
from reprise.rl.slots.config import EngineConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.draft_cache import cache as draft_cache
from reprise.spec.draft_cache.cache import DraftCache, PassSizes
from reprise.spec.draft_cache.drafting import END_COLUMNS

T, N = 4, LONGEST // 4  # positions of a page, pages of a row
BUCKETS = EngineConfig(slots=8, min_slots=2, page_tokens=T)
GIVEN = "weights", ()
TEXTS = {7: range(1, 15), 4: [5, 6], 9: range(20, 31)}


def live(texts, num_rows=4):
    host = Host(num_rows)
    for request_id, text in texts.items():
        host.enter(request_id, text)
    return host.live()


@pytest.fixture
def make(monkeypatch):
    """A maker of caches, and of lists of the tables that they compute."""
    return partial(_make, monkeypatch)


def _make(monkeypatch, first_token=0, apart=False):
    num_pages = 4 * N
    runner = types.SimpleNamespace(
        dtype=np.float32,
        model=POLICY,
        config=BUCKETS,
        num_pages=num_pages,
        slot_pages=N,
        num_positions=LONGEST,
        batch_ways=1,
        cache_of=lambda model, num_slots: kv_cache.init(
            model, num_slots, N, num_pages, T, np.float32, for_cpu=True
        ),
        argument=lambda x: x,
        put=lambda x: x,
    )
    passes = PassSizes(window_tokens=2, chunk_widths=(4,), pass_tokens=12)
    drafting = types.SimpleNamespace(first_token=first_token, apart=apart)
    tables = []

    def catch_up(given, cache, table_PX, *, drafting):
        assert given == GIVEN
        tables.append(table_PX)
        return cache

    monkeypatch.setattr(draft_cache, "catch_up", catch_up)
    return DraftCache(MODEL, passes, drafting, runner), tables


def computed(tables, num_rows):
    """Lists of (row, slot, place of the token, token), one a pass, without padding."""

    def entries(table_PX):
        real = [chunk for chunk in table_PX.tolist() if chunk[0] < num_rows]
        return [(b, s, t + i, x) for b, s, t, *tokens in real for i, x in enumerate(tokens)]

    return [entries(table_PX) for table_PX in tables]


@pytest.mark.parametrize("apart", [False, True])
def test_rows_lack_nothing_but_their_window_and_only_they_are_computed(make, apart):
    cache, tables = make(apart=apart, first_token=int(apart))
    first, asked = int(apart), live(TEXTS)
    rows_A, _ = cache.follow(asked, asked, GIVEN)
    passes = computed(tables, len(cache.rows))
    assert {table.shape for table in tables} == {(3, 3 + 4)}
    got = {(row, slot, t): token for entries in passes for row, slot, t, token in entries}
    for slot, (row, text) in enumerate(zip(rows_A.tolist(), TEXTS.values(), strict=True)):
        places = {t for r, s, t in got if r == row}
        assert places >= set(range(first, len(text) - 2)) or len(text) == 2
        assert all(got[row, slot, t] == text[t] for t in places)
    assert rows_A[1] not in {row for row, _, _ in got}  # it fits into a window
    chunks = [table[table[:, 0] < len(cache.rows), 0].tolist() for table in tables]
    assert any(len(set(rows)) < len(rows) for rows in chunks) == apart
    if not apart:  # a chunk reads all before it
        known = dict.fromkeys(rows_A.tolist(), 0)
        for entries in passes:
            places = {row: [t for r, _, t, _ in entries if r == row] for row, *_ in entries}
            assert all(min(at) <= known[row] for row, at in places.items())
            known |= {row: max(at) + 1 for row, at in places.items()}
    cache.rows.known_B[rows_A] = [len(text) for text in TEXTS.values()]
    cache.follow(asked, asked, GIVEN)
    assert len(tables) == len(passes)


def test_entries_are_kept_in_other_buckets(make):
    cache, tables = make()
    asked = live(TEXTS)
    rows_A, _ = cache.follow(asked, asked, GIVEN)
    pages_AN = np.asarray(cache.arrays.table_BN)[rows_A]
    [held_N] = pages_AN[2:]
    marked = tuple(keys.at[held_N[held_N >= 0]].set(3.0) for keys in cache.arrays.keys)
    cache.arrays = dataclasses.replace(cache.arrays, keys=marked)
    before = len(tables)
    few = live({9: TEXTS[9], 7: TEXTS[7]}, 2)
    rows_A, _ = cache.follow(few, few, GIVEN)
    assert (cache.arrays.num_slots, cache.arrays.num_positions) == (2, LONGEST)
    assert len(tables) == before
    np.testing.assert_array_equal(cache.arrays.table_BN[rows_A], pages_AN[[2, 0]])
    keys_BKhS, _ = cache.arrays.layer(0).whole_slots()
    num_tokens = len(TEXTS[9])
    assert (keys_BKhS[rows_A[0], ..., :num_tokens] == 3).all()
    assert (keys_BKhS[rows_A[1], ..., : len(TEXTS[7])] == 0).all()


def test_a_step_that_fails_costs_the_entries_alone(make):
    cache, tables = make()
    asked = live(TEXTS)
    cache.follow(asked, asked, GIVEN)
    first = len(tables)
    cache.taken()
    cache.follow(asked, asked, GIVEN)
    assert len(tables) == 2 * first


def test_requests_that_share_noise_have_rows_of_their_own_and_one_name(make):
    """Of one example in two steps of a pipeline; drafters draw with the noise of the policy."""
    cache, _ = make()
    asked = live({7: [1, 2, 3], 7 + 3 * 2**31: [1, 2, 3]})
    rows_A, _ = cache.follow(asked, asked, GIVEN)
    assert len(set(rows_A.tolist())) == 2
    table_BX = cache.ends(asked, rows_A, np.ones(2, np.int32), SamplingConfig())
    names = table_BX[rows_A, 2 + END_COLUMNS.index("request_id")]
    assert names.tolist() == [7, 7]
