"""Pages of slots: by hand, and invariants under any order of reserve, share, release and moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.spec.page_table import NO_PAGE, PageTable, spread

T = 4


def table(num_slots=4, slot_pages=3, num_pages=8, ways=1):
    return PageTable(num_slots, slot_pages, num_pages, T, ways)


def test_full_pages_are_shared_and_the_last_one_is_copied():
    pages = table()
    pages.reserve(0, 3 * T)
    first, second, _ = pages.pages_BN[0].tolist()
    [(source, target)] = pages.share(0, 1, T + 2)
    assert (source, pages.pages_BN[1].tolist()) == (second, [first, target, NO_PAGE])
    assert pages.share(0, 2, T) == []  # nothing to copy
    assert pages.users_P[first] == 3
    pages.release(0)
    assert pages.users_P[first] == 2 and pages.num_free(0) == 8 - 2
    assert np.nonzero(pages.used_by([1]))[0].tolist() == sorted([first, target])
    assert pages.used_by([1, 2]).sum() == 2 and not pages.used_by([0, 3]).any()


def test_a_table_says_whether_it_has_changed():
    pages = table()
    assert pages.has_changed  # a device has no table yet
    steps = [
        (lambda: pages.reserve(0, 2 * T), True),
        (lambda: pages.reserve(0, T + 1), False),  # it has these pages
        (lambda: pages.reserve(1, 2 * T), True),
        (lambda: pages.share(0, 2, T), True),
        (lambda: pages.reserve(3, 3 * T), True),
        (lambda: pages.reserve(2, 3 * T), False),  # too few are free
        (lambda: pages.release(1, 2 * T), False),
        (lambda: pages.release(1, T), True),
        (lambda: pages.take_rows([1, 0]), True),
    ]
    for step, changes in steps:
        pages.has_changed = False
        step()
        assert pages.has_changed == changes


def test_tables_of_timed_rounds_have_pages_of_their_parts():
    found = spread(4, 3, 8, 2)
    assert found.shape == (4, 3)
    assert found[:2].max() < 4 <= found[2:].min()
    assert len(set(found[:2].ravel().tolist())) == 4


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "share", "release", "move"]),
        *(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3 * T)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("ways", [1, 2])
@settings(deadline=None, max_examples=150)
@given(operations=OPERATIONS)
def test_pages_are_counted_and_what_a_slot_has_stays(ways, operations):
    pages, num_pages = table(6, 3, 12, ways), 12
    model = {b: [] for b in range(6)}  # what each slot has, page by page
    for what, a, b, tokens in operations:
        if what == "reserve" and pages.reserve(a, tokens):
            new = pages.pages_BN[a, len(model[a]) : pages.held_B[a]].tolist()
            model[a] = model[a] + new
        elif what == "share" and a != b and not model[b] and tokens <= len(model[a]) * T:
            copies = pages.share(a, b, tokens)
            if copies is not None:
                model[b] = pages.pages_BN[b, : pages.held_B[b]].tolist()
                full = tokens // T if pages.part_B[a] == pages.part_B[b] else 0
                assert model[b][:full] == model[a][:full]
                assert [source for source, _ in copies] == model[a][full : len(model[b])]
                assert [target for _, target in copies] == model[b][full:]
        elif what == "release":
            pages.release(a, tokens)
            model[a] = model[a][: -(-tokens // T)]
        elif what == "move" and ways == 1:
            pages.take_rows([a if i == b else b if i == a else i for i in range(6)])
            model[a], model[b] = model[b], model[a]
        held = [pages.pages_BN[s, : pages.held_B[s]].tolist() for s in range(6)]
        assert held == [model[s] for s in range(6)]
        users = np.bincount([page for some in held for page in some], minlength=num_pages)
        np.testing.assert_array_equal(users, pages.users_P)
        free = [p for part in range(ways) for p in pages._free[part]]
        assert sorted(free) == np.nonzero(users == 0)[0].tolist()
        for s in range(6):
            assert all(p * ways // num_pages == pages.part_B[s] for p in held[s])
