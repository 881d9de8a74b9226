"""HistoPipe's two tiers, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.policies.histopipe_allocation import allocate, evenly, ranking_groups


def shared_work(length, workers):
    return length / workers


def test_ranking_groups_are_of_equal_size_and_ascending():
    assert ranking_groups([5, 1, 9, 3, 7, 2], 3) == [[1, 5], [3, 0], [4, 2]]
    assert ranking_groups([1, 1, 1, 1, 1], 2) == [[0, 1, 2], [3, 4]]


def test_workers_in_equal_parts():
    assert evenly(3, 8) == [3, 3, 2]
    with pytest.raises(ValueError, match="a worker for each of 4"):
        evenly(4, 3)


def test_long_groups_get_the_workers_that_make_times_grow_evenly():
    # t0 = 10. With 7 workers d = 2.5 is met: 10/1 <= 10, 25/2 <= 12.5, 60/4 <= 15; any less
    # takes a third worker for the second group
    assert allocate([10, 25, 60], 7, shared_work, precision_s=0.01) == [1, 2, 4]
    # with 10 all are done in the time of the shortest: d = 0
    assert allocate([10, 25, 60], 10, shared_work, precision_s=0.01) == [1, 3, 6]


def test_a_step_is_not_planned_to_be_shorter_than_its_training():
    # 30 s are met by [1, 1, 2]; the two that are left over go to the longest
    assert allocate([10, 25, 60], 6, shared_work, train_s=30, precision_s=0.01) == [1, 2, 3]


def test_workers_left_over_go_to_the_longest_groups():
    assert allocate([1, 1, 1], 5, shared_work) == [1, 2, 2]


def test_too_few_workers_are_an_error():
    with pytest.raises(ValueError, match="at least 1 of the workers for each of 3"):
        allocate([1, 2, 3], 2, shared_work)


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), st.integers(0, 40), st.floats(0, 100))
def test_a_plan_uses_all_workers_and_leaves_no_group_without(lengths, more, train_s):
    lengths = sorted(lengths)
    plan = allocate(lengths, len(lengths) + more, shared_work, train_s=train_s)
    assert sum(plan) == len(lengths) + more and min(plan) >= 1
