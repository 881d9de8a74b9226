"""HistoPipe's two tiers, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.policies.histopipe_allocation import (
    Pace,
    allocate,
    evenly,
    ranking_groups,
    seconds_of_two_steps,
    tau_of,
    two_tiers,
)


def shared_work(length, requests):
    return length * requests


def plan_of(lengths, num_workers, tau=shared_work, **options):
    """Of groups of one request each, which their workers share."""
    return allocate(lengths, [1] * len(lengths), num_workers, tau, **options)


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
    assert plan_of([10, 25, 60], 7, precision_s=0.01) == [1, 2, 4]
    # with 10 all are done in the time of the shortest: d = 0
    assert plan_of([10, 25, 60], 10, precision_s=0.01) == [1, 3, 6]


def test_a_step_is_not_planned_to_be_shorter_than_its_training():
    # 30 s are met by [1, 1, 2]; the two that are left over go to the longest
    assert plan_of([10, 25, 60], 6, train_s=30, precision_s=0.01) == [1, 2, 3]


def test_workers_left_over_go_to_the_longest_groups():
    assert plan_of([1, 1, 1], 5) == [1, 2, 2]


def test_too_few_workers_are_an_error():
    with pytest.raises(ValueError, match="at least 1 of the workers for each of 3"):
        plan_of([1, 2, 3], 2)


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), st.integers(0, 40), st.floats(0, 100))
def test_a_plan_uses_all_workers_and_leaves_no_group_without(lengths, more, train_s):
    lengths = sorted(lengths)
    sizes, workers = [4] * len(lengths), len(lengths) + more
    plan = allocate(lengths, sizes, workers, shared_work, train_s=train_s)
    assert sum(plan) == workers and min(plan) >= 1
    kept = two_tiers(lengths, sizes, workers, shared_work, train_s=train_s)
    even = evenly(len(lengths), workers)
    assert kept in (plan, even)
    assert seconds_of_two_steps(lengths, sizes, kept, shared_work) == min(
        seconds_of_two_steps(lengths, sizes, p, shared_work) for p in (plan, even)
    )


def test_equal_parts_stay_where_some_would_have_the_longest_in_both_orders():
    # 6 workers: [1, 1, 4] has two with 60 / 4 s twice, and the others idle
    lengths, one_each = [4, 6, 60], [1, 1, 1]
    assert plan_of(lengths, 6, precision_s=0.01) == [1, 1, 4]
    assert seconds_of_two_steps(lengths, one_each, [1, 1, 4], shared_work) == 30
    assert seconds_of_two_steps(lengths, one_each, [2, 2, 2], shared_work) == 32
    assert two_tiers(lengths, one_each, 6, shared_work) == [1, 1, 4]
    # where a batch costs next to nothing, equal parts leave a worker the longest once
    alone = lambda length, requests: length * (0.9 + 0.1 * requests)  # noqa: E731
    assert plan_of(lengths, 6, alone) == [1, 1, 4]
    assert two_tiers(lengths, one_each, 6, alone) == [2, 2, 2]


def test_groups_of_more_requests_get_more_workers():
    # 10 s to answer 4 requests of length 5 with two workers, as one has for 2 of them
    assert allocate([5, 5], [2, 4], 3, shared_work, precision_s=0.01) == [1, 2]


def test_tau_is_the_rounds_of_a_response_in_a_batch_of_the_workers_share():
    asked = []

    def round_seconds(requests, positions, nodes):
        asked.append((requests, positions, nodes))
        return 0.5

    tau = tau_of(round_seconds, 180, 10, Pace(nodes=3.0, tokens=2.0))
    # 40 tokens at two a round; each request holds its prompt and half of its response
    assert tau(40, 6) == 10
    assert asked == [(6, 180, 3.0)]
    # 180 positions are six requests' on average: twelve take turns
    assert tau(40, 12) == 20
    assert asked[1:] == [(6, 180, 3.0)]
