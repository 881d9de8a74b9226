"""HistoPipe and the steps of a pipeline, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.sched.policies.group_fifo import GroupFifo
from reprise.sched.policies.histopipe import (
    HistoPipe,
    HistoPipeConfig,
    Pace,
    allocate,
    evenly,
    ranking_groups,
    seconds_of_two_steps,
    tau_of,
    two_tiers,
)
from reprise.sched.policies.steps import StepOrder
from reprise.sched.protocol import (
    ChunkDone,
    Defer,
    Finished,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import Kv, RequestSpec

LIMIT = 1000


def step(number, *past, size=1):
    """A prompt of `size` requests for each of `past`; request 100·step + 10·prompt + sample."""
    return Submitted(
        tuple(
            RequestSpec(100 * number + 10 * p + i, 100 * number + p, 5, LIMIT, None, tokens, number)
            for p, tokens in enumerate(past)
            for i in range(size)
        )
    )


def begun(workers, **config):
    scheduler = HistoPipe(HistoPipeConfig(num_steps=9, **config))
    for worker in range(workers):
        assert scheduler.handle(WorkerJoined(worker, 10**6, 100), 0.0) == []
    return scheduler


def placed(actions):
    return {a.request_id: a.worker_id for a in actions}


def finish(scheduler, request_id, worker_id, tokens, chunk=1):
    return scheduler.handle(Finished(request_id, worker_id, chunk, tokens), 0.0)


def test_steps_go_to_the_workers_in_opposite_orders():
    scheduler = begun(3, num_ranking_groups=3)
    past = ((30,), (10,), (20,))
    assert placed(scheduler.handle(step(0, *past), 0.0)) == {10: 0, 20: 1, 0: 2}
    assert scheduler.handle(step(1, *past), 0.0) == []
    # worker 0 is through with the shortest: it goes on to the longest of the next step
    assert placed(finish(scheduler, 10, 0, 9)) == {100: 0}
    assert placed(finish(scheduler, 20, 1, 9)) == {120: 1}


def test_a_worker_runs_at_most_one_update_ahead():
    scheduler = begun(1, num_ranking_groups=1)
    for number in range(3):
        actions = scheduler.handle(step(number, (10,)), 0.0)
        assert placed(actions) == ({0: 0} if number == 0 else {})
    assert placed(finish(scheduler, 0, 0, 9)) == {100: 0}
    assert finish(scheduler, 100, 0, 9) == []  # step 2 needs the update of step 0
    assert placed(scheduler.handle(Trained(0), 0.0)) == {200: 0}


def test_without_a_past_prompts_are_dealt_as_they_come():
    scheduler = begun(2, num_ranking_groups=2)
    assert placed(scheduler.handle(step(0, (), ()), 0.0)) == {0: 0, 10: 1}


def test_the_second_tier_gives_the_longest_more_workers():
    work = lambda: lambda length, n: length * n  # noqa: E731
    scheduler = begun(6, num_ranking_groups=3, tau=work)
    past = ((10,), (60,), (25,), (25,), (60,), (10,), (60,), (25,), (10,))
    found = placed(scheduler.handle(step(0, *past), 0.0))
    assert [found[10 * p] for p in (0, 5, 8)] == [0, 0, 0]
    assert [found[10 * p] for p in (2, 3, 7)] == [1, 2, 1]
    assert [found[10 * p] for p in (1, 4, 6)] == [3, 4, 5]
    # of two groups three of four workers for one would leave two of them the longest each step
    scheduler = begun(4, num_ranking_groups=2, tau=work)
    found = placed(scheduler.handle(step(0, (10,), (10,), (100,), (100,)), 0.0))
    assert found == {0: 0, 10: 1, 20: 2, 30: 3}


def test_the_second_tier_plans_by_the_last_updates_seconds_and_by_what_is_known_then():
    shared, alike = lambda length, requests: length * requests, lambda length, requests: length
    taus = iter([shared, shared, shared, alike])
    scheduler = begun(6, num_ranking_groups=3, tau=lambda: next(taus))

    def planned(number):
        """The workers of each group of two requests; together 20, 50 and 120 s of work."""
        scheduler.handle(step(number, *((10,), (25,), (60,)) * 2), 0.0)
        return [len(share.waiting) for share in scheduler._steps[number]]

    assert planned(0) == [1, 2, 3]  # 20, 25 and 40 s, for which d is 10
    scheduler.handle(Trained(0, train_s=120.0), 0.0)
    assert planned(1) == [2, 2, 2]  # one each is done with the update; three are left over
    scheduler.handle(Trained(1, train_s=0.0), 0.0)
    assert planned(2) == [1, 2, 3]
    assert planned(3) == [2, 2, 2]  # where more workers are of no use


def test_what_a_step_asks_later_goes_to_who_has_least_to_do_and_is_not_moved():
    scheduler = begun(2, num_ranking_groups=2)
    scheduler.handle(step(0, (10,), (100,)), 0.0)
    scheduler.handle(step(1, (10,), (100,), size=2), 0.0)
    # worker 0 begins the next step with two of the longest, worker 1 then with two of the shortest
    finish(scheduler, 0, 0, 9)
    finish(scheduler, 10, 1, 90)
    finish(scheduler, 110, 0, 90)
    further = Submitted((RequestSpec(777, 777, 5, LIMIT, None, (10,), 1, urgent=True),))
    assert scheduler.handle(further, 0.0) == [Start(777, 0, 1, LIMIT, 0, Kv.PREFILL)]
    # on the loss of its worker too it has all of its tokens at once
    actions = scheduler.handle(WorkerLost(0), 0.0)
    assert start_tokens(actions)[777] == LIMIT
    finish(scheduler, 777, 1, 500, chunk=2)
    assert scheduler.num_moved == 0 and scheduler.num_unfinished == 3


def test_what_the_last_step_asks_later_is_a_step_that_nothing_leaves():
    scheduler = HistoPipe(HistoPipeConfig(num_steps=1, num_ranking_groups=1))
    scheduler.handle(WorkerJoined(0, 10**6, 100), 0.0)
    scheduler.handle(step(0, (10,)), 0.0)
    finish(scheduler, 0, 0, 9)
    assert placed(scheduler.handle(step(1, (10,)), 0.0)) == {100: 0}
    assert placed(outlier(scheduler, 100, 0, 11)) == {100: 0}


def start_tokens(actions):
    return {a.request_id: a.max_tokens for a in actions}


def test_a_start_ends_where_a_response_would_be_an_outlier():
    scheduler = begun(2, num_ranking_groups=2)
    # 1.1 times the longest median of the group's prompts
    actions = scheduler.handle(step(0, (10, 30), (90, 100)), 0.0)
    assert start_tokens(actions) == {0: 22, 10: 105}


def outlier(scheduler, request_id, worker_id, tokens, chunk=1):
    return scheduler.handle(ChunkDone(request_id, worker_id, chunk, tokens, True), 0.0)


def test_an_outlier_of_a_short_group_moves_to_a_longer_one():
    scheduler = begun(2, num_ranking_groups=2, last_share=0.5, check_tokens=7)
    scheduler.handle(step(0, (10,), (100,), size=2), 0.0)
    # both of its group are still there: it continues for a while
    assert outlier(scheduler, 0, 0, 11) == [Start(0, 0, 2, 7, 0, Kv.HELD)]
    assert finish(scheduler, 1, 0, 5) == []
    # now it is the last: it goes to the other worker for good, where its cache is recomputed
    assert outlier(scheduler, 0, 0, 18, chunk=2) == [Start(0, 1, 3, LIMIT - 18, 0, Kv.PREFILL)]
    assert scheduler.num_moved == 1
    finish(scheduler, 0, 1, 50, chunk=3)
    assert scheduler.num_unfinished == 2


def test_an_outlier_of_a_long_group_resumes_in_the_next_step():
    scheduler = begun(2, num_ranking_groups=2)
    scheduler.handle(step(0, (10,), (100,)), 0.0)
    assert outlier(scheduler, 10, 1, 111) == [Defer(10)]
    # worker 1 is free, and the next step, in the opposite order, has its longest at worker 0
    actions = scheduler.handle(step(1, (10,), (100,)), 0.0)
    assert placed(actions) == {100: 1}
    actions = finish(scheduler, 0, 0, 5)
    assert placed(actions) == {110: 0, 10: 0}
    assert start_tokens(actions)[10] == LIMIT - 111
    assert {a.kv for a in actions} == {Kv.PREFILL}


def test_an_outlier_finds_a_worker_in_a_next_step_whose_longest_group_has_lost_its_own():
    scheduler = begun(2, num_ranking_groups=2)
    scheduler.handle(step(0, (10,), (100,)), 0.0)
    # the next step has its longest at worker 0
    scheduler.handle(step(1, (10,), (100,)), 0.0)
    scheduler.handle(WorkerLost(0), 0.0)
    finish(scheduler, 0, 1, 5, chunk=2)  # it went on at worker 1
    actions = outlier(scheduler, 10, 1, 111)
    assert actions[0] == Defer(10)
    assert placed(actions[1:]) == {100: 1, 110: 1, 10: 1}


def test_beta_is_the_upper_quartile_of_growth():
    scheduler = begun(1, num_ranking_groups=1)
    scheduler.handle(step(0, *[(10,)] * 5), 0.0)
    for prompt, tokens in enumerate((10, 20, 30, 40, 50)):
        finish(scheduler, 10 * prompt, 0, tokens)
    # growth of 1, 2, 3, 4 and 5: the quartile is 4
    assert start_tokens(scheduler.handle(step(1, (10,)), 0.0)) == {100: 40}


def test_a_step_may_have_no_request_here():
    """Of several processes one may have none of a step; more of it may come."""
    scheduler = begun(2, num_ranking_groups=2)
    assert scheduler.handle(Submitted((), 0), 0.0) == []
    assert placed(scheduler.handle(step(1, (10,), (30,)), 0.0)) == {100: 1, 110: 0}
    assert scheduler.handle(Submitted((), 2), 0.0) == []
    scheduler.handle(Trained(0), 0.0)
    assert [finish(scheduler, *ends, 9) for ends in ((100, 1), (110, 0))] == [[], []]
    assert placed(scheduler.handle(step(2, ()), 0.0)).keys() == {200}
    with pytest.raises(ValueError, match="expected all requests of step 3"):
        scheduler.handle(Submitted((), 4), 0.0)


def test_a_step_must_be_whole_and_come_in_order():
    with pytest.raises(ValueError, match="all requests of step 0, and workers before"):
        begun(1).handle(step(1, (10,)), 0.0)
    with pytest.raises(ValueError, match="all requests of step 0, and workers before"):
        begun(0).handle(step(0, (10,)), 0.0)


# --- steps around a scheduler that knows of none ----------------------------------------


def test_sync_waits_for_the_update_and_one_step_off_for_the_one_before():
    for mode, starts_before_update in (("sync", False), ("one_step_off", True)):
        scheduler = StepOrder(GroupFifo(seed=0), mode)
        scheduler.handle(WorkerJoined(0, 100, 10), 0.0)
        assert placed(scheduler.handle(step(0, ()), 0.0)) == {0: 0}
        assert scheduler.handle(step(1, ()), 0.0) == []
        assert scheduler.handle(step(2, ()), 0.0) == []
        actions = finish(scheduler, 0, 0, 5)
        assert placed(actions) == ({100: 0} if starts_before_update else {})
        actions += scheduler.handle(Trained(0), 0.0)
        assert placed(actions) == {100: 0}
        actions = finish(scheduler, 100, 0, 5)
        assert placed(actions) == ({200: 0} if starts_before_update else {})
        assert scheduler.num_unfinished == 1


def test_more_of_a_step_that_has_begun_is_submitted_at_once_and_of_one_that_waits_with_it():
    scheduler = StepOrder(GroupFifo(seed=0), "one_step_off")
    scheduler.handle(WorkerJoined(0, 100, 10), 0.0)
    scheduler.handle(step(0, ()), 0.0)
    scheduler.handle(step(1, ()), 0.0)

    def more(request_id, number):
        return Submitted((RequestSpec(request_id, request_id, 5, LIMIT, step=number, urgent=True),))

    assert scheduler.handle(more(150, 1), 0.0) == []
    assert placed(scheduler.handle(more(50, 0), 0.0)) == {50: 0}
    assert scheduler.num_unfinished == 4
    finish(scheduler, 0, 0, 5)
    assert placed(finish(scheduler, 50, 0, 5)) == {100: 0, 150: 0}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="expected a mode of sync, one_step_off"):
        StepOrder(GroupFifo(seed=0), "async")


# --- the two tiers


def shared_work(length, requests):
    return length * requests


def plan_of(lengths, num_workers, tau=shared_work, **options):
    """Of groups of one request each, which their workers share."""
    return allocate(lengths, [1] * len(lengths), num_workers, tau, **options)


def test_ranking_groups_are_of_equal_size_and_ascending():
    assert ranking_groups([5, 1, 9, 3, 7, 2], 3) == [[1, 5], [3, 0], [4, 2]]
    assert ranking_groups([1, 1, 1, 1, 1], 2) == [[0, 1, 2], [3, 4]]


def test_long_groups_get_the_workers_that_make_times_grow_evenly():
    # t0 = 10. With 7 workers d = 2.5 is met: 10/1 <= 10, 25/2 <= 12.5, 60/4 <= 15; any less
    # takes a third worker for the second group
    assert plan_of([10, 25, 60], 7, precision_s=0.01) == [1, 2, 4]
    # with 10 all are done in the time of the shortest: d = 0
    assert plan_of([10, 25, 60], 10, precision_s=0.01) == [1, 3, 6]


def test_a_step_is_not_planned_to_be_shorter_than_its_training():
    # 30 s are met by [1, 1, 2]; the two that are left over go to the longest
    assert plan_of([10, 25, 60], 6, train_s=30, precision_s=0.01) == [1, 2, 3]


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
