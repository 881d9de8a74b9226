"""Divided rollouts, by hand: who starts, where, with how much."""

from __future__ import annotations

import pytest

from reprise.sched.policies.divided import ContextAware, Divided, Fifo, LongestKnown
from reprise.sched.protocol import ChunkDone, Finished, Start, Submitted, WorkerJoined, WorkerLost
from reprise.sched.request import Kv, RequestSpec


def requests(*groups, prompt=2, limit=100, known=None):
    """One request for each (group, request) in order of their numbers."""
    return tuple(
        RequestSpec(i, g, prompt, limit, known[i] if known else None) for i, g in enumerate(groups)
    )


def begun(order, workers, submitted, chunk=10, **more):
    """A scheduler that was told of its workers, (id, positions, requests), and of the requests."""
    scheduler = Divided(order, chunk_tokens=chunk, **more)
    for worker in workers:
        assert scheduler.handle(WorkerJoined(*worker), 0.0) == []
    return scheduler, list(scheduler.handle(Submitted(submitted), 0.0))


def names(actions):
    return [(a.request_id, a.worker_id) for a in actions]


def test_starts_go_where_most_is_free_and_stop_where_nothing_fits():
    scheduler, actions = begun(Fifo(), [(0, 30, 9), (1, 40, 9)], requests(0, 0, 0, 0, 0, 0))
    # 12 positions each: worker 1 has 40, 28, then ties with worker 0 go to the lower number
    assert names(actions) == [(0, 1), (1, 0), (2, 1), (3, 0), (4, 1)]
    assert actions[0] == Start(0, 1, 1, 10, 12, Kv.PREFILL)
    assert scheduler.num_unfinished == 6
    # one ends: its room is the only one
    assert names(scheduler.handle(Finished(3, 0, 1, 4), 1.0)) == [(5, 0)]


def test_fifo_sends_a_request_behind_all_others_after_a_chunk():
    scheduler, _ = begun(Fifo(), [(0, 12, 9)], requests(0, 0, 0))
    assert names(scheduler.handle(ChunkDone(0, 0, 1, 8, True), 1.0)) == [(1, 0)]
    assert names(scheduler.handle(Finished(1, 0, 1, 3), 2.0)) == [(2, 0)]


@pytest.mark.parametrize("order", [Fifo(), ContextAware(seed=0)])
def test_urgent_requests_start_before_all_that_wait(order):
    scheduler, actions = begun(order, [(0, 24, 9)], requests(0, 0, 1, 1))
    assert len(actions) == 2
    late = tuple(RequestSpec(i, 7, 2, 100, urgent=True) for i in (8, 9))
    assert scheduler.handle(Submitted(late), 0.0) == []
    first, second = (a.request_id for a in actions)
    assert names(scheduler.handle(Finished(first, 0, 1, 4), 1.0)) == [(8, 0)]
    assert names(scheduler.handle(ChunkDone(8, 0, 1, 10, True), 2.0)) == [(9, 0)]
    # its second chunk takes 22 positions; others would fit before that
    assert names(scheduler.handle(Finished(9, 0, 1, 4), 3.0)) == []
    assert names(scheduler.handle(Finished(second, 0, 1, 4), 4.0)) == [(8, 0)]


def test_a_chunk_continues_on_its_worker_without_a_copy():
    scheduler, _ = begun(Fifo(), [(0, 60, 9), (1, 70, 9)], requests(0))
    assert scheduler.handle(ChunkDone(0, 1, 1, 10, True), 1.0) == [Start(0, 1, 2, 10, 22, Kv.HELD)]


def test_it_moves_where_there_is_twice_the_room():
    scheduler, actions = begun(Fifo(), [(0, 70, 9), (1, 40, 9)], requests(0, 0, 0, 0, 0, 0))
    assert names(actions) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 0), (5, 1)]
    for request_id, free in ((1, 34), (2, 46), (4, 58)):
        assert scheduler.handle(Finished(request_id, 0, 1, 1), 1.0) == [], free
    # 58 are free at worker 0; at worker 1, with what request 5 gives back, 28
    assert scheduler.handle(ChunkDone(5, 1, 1, 10, True), 2.0) == [Start(5, 0, 2, 10, 22, Kv.POOL)]


def test_a_chunk_continues_elsewhere_from_the_pool_if_that_is_cheaper():
    for pooled, cheaper, kv in [
        (True, True, Kv.POOL),
        (True, False, Kv.PREFILL),
        (False, True, Kv.PREFILL),
    ]:
        scheduler, _ = begun(
            Fifo(),
            [(0, 22, 9), (1, 12, 9)],
            requests(0, 0, 0),
            prefer_pool=lambda tokens, cheaper=cheaper: cheaper,
        )
        # request 0 has to wait behind request 2, and nothing is held for it meanwhile
        actions = scheduler.handle(ChunkDone(0, 0, 1, 10, pooled), 1.0)
        assert names(actions) == [(2, 0)]
        assert scheduler.handle(Finished(2, 0, 1, 1), 2.0) == [Start(0, 0, 2, 10, 22, kv)]


def test_the_last_chunk_ends_at_the_limit():
    scheduler, _ = begun(Fifo(), [(0, 40, 9)], requests(0, limit=13))
    (start,) = scheduler.handle(ChunkDone(0, 0, 1, 10, True), 1.0)
    assert (start.max_tokens, start.reserved_tokens) == (3, 15)


def test_seer_probes_first_the_shortest_of_them_before_others():
    order = ContextAware(seed=0, explore=0)
    scheduler, actions = begun(order, [(0, 30, 2)], requests(0, 0, 1, 1))
    assert names(actions) == [(0, 0), (2, 0)]  # the probes of both groups
    # a probe goes on before the requests that are none
    assert names(scheduler.handle(ChunkDone(0, 0, 1, 2, True), 1.0)) == [(0, 0)]
    scheduler, _ = begun(ContextAware(seed=0, explore=0), [(0, 14, 1)], requests(0, 0, 1, 1))
    # 0 had 2 tokens; 2, which has none, is before it; neither group knows its length
    assert names(scheduler.handle(ChunkDone(0, 0, 1, 2, True), 1.0)) == [(2, 0)]
    assert names(scheduler.handle(ChunkDone(2, 0, 1, 1, True), 2.0)) == [(2, 0)]


def test_seer_takes_the_longest_group_and_counts_unknown_ones_as_longest():
    order = ContextAware(seed=0, explore=0)
    scheduler, actions = begun(order, [(0, 36, 3)], requests(0, 0, 1, 1, 2, 2))
    assert names(actions) == [(0, 0), (2, 0), (4, 0)]
    # group 0 ends at 5; groups 1 and 2, of which nothing is known, are taken for the limit
    assert names(scheduler.handle(Finished(0, 0, 1, 5), 1.0)) == [(3, 0)]
    assert names(scheduler.handle(Finished(2, 0, 1, 4), 2.0)) == [(5, 0)]
    assert names(scheduler.handle(Finished(4, 0, 1, 4), 3.0)) == [(1, 0)]


def test_seer_raises_an_estimate_that_a_running_request_has_outgrown():
    order = ContextAware(seed=0, explore=0)
    scheduler, actions = begun(order, [(0, 48, 2)], requests(0, 0, 0, 1, 1, 1))
    assert names(actions) == [(0, 0), (3, 0)]
    assert names(scheduler.handle(Finished(0, 0, 1, 2), 1.0)) == [(4, 0)]  # unknown before 2
    assert names(scheduler.handle(Finished(3, 0, 1, 3), 2.0)) == [(5, 0)]  # 3 before 2
    assert names(scheduler.handle(Finished(5, 0, 1, 1), 3.0)) == [(1, 0)]
    # request 1 is at 10 already: its group is now taken for longer than that of 4
    assert names(scheduler.handle(ChunkDone(1, 0, 1, 10, True), 4.0)) == [(1, 0)]
    assert names(scheduler.handle(ChunkDone(4, 0, 1, 9, True), 5.0)) == [(2, 0)]


def test_a_share_of_the_picks_goes_to_the_group_that_was_served_least():
    order = ContextAware(seed=0, explore=1)
    scheduler, _ = begun(order, [(0, 24, 2)], requests(0, 0, 0, 1, 1, 1))
    # group 0 has been served 9 tokens, group 1 none, though 0 is the longer by its estimate
    assert names(scheduler.handle(Finished(0, 0, 1, 9), 1.0)) == [(4, 0)]


def test_the_oracle_takes_the_longest_by_what_is_known():
    submitted = requests(0, 0, 1, 1, known=[5, 60, 7, 9])
    _, actions = begun(LongestKnown(), [(0, 36, 3)], submitted)
    assert names(actions) == [(1, 0), (3, 0), (2, 0)]
    with pytest.raises(ValueError, match="expected its length to be known"):
        begun(LongestKnown(), [(0, 36, 3)], requests(0))


def test_requests_of_a_lost_worker_run_again_from_their_last_chunk():
    scheduler, _ = begun(Fifo(), [(0, 40, 9)], requests(0))
    scheduler.handle(ChunkDone(0, 0, 1, 10, True), 1.0)
    assert scheduler.handle(WorkerLost(0), 2.0) == []
    (start,) = scheduler.handle(WorkerJoined(1, 40, 9), 3.0)
    assert start == Start(0, 1, 3, 10, 22, Kv.POOL)
    # the dead worker's report comes late: it is of a start that is no longer in force
    assert scheduler.handle(Finished(0, 0, 2, 15), 4.0) == []
    assert scheduler.num_unfinished == 1
    assert scheduler.handle(Finished(0, 1, 3, 15), 5.0) == []
    assert scheduler.num_unfinished == 0


def test_a_chunk_that_fits_no_worker_is_an_error():
    with pytest.raises(ValueError, match="needs 12 positions.* holds 11; fix"):
        begun(Fifo(), [(0, 11, 9)], requests(0))


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens >= 1"):
        Divided(Fifo(), chunk_tokens=0)
    with pytest.raises(ValueError, match="explore in 0"):
        ContextAware(seed=0, explore=2)
    with pytest.raises(ValueError, match="at least one token"):
        RequestSpec(0, 0, 0, 5)


def test_finished_groups_are_dropped_when_more_come():
    """And a late report of it, from a worker that was lost, changes nothing."""
    scheduler, _ = begun(ContextAware(seed=0), [(0, 100, 8)], (), chunk=4)
    for step in range(50):
        requests = tuple(RequestSpec(10 * step + i, step, 2, 8) for i in range(3))
        starts = scheduler.handle(Submitted(requests), 3.0 * step)
        assert len(starts) == 3
        for start in starts:
            scheduler.handle(Finished(start.request_id, 0, start.chunk, 3), 3.0 * step + 1)
    assert scheduler.num_unfinished == 0
    assert len(scheduler._ledger.requests) <= 3 and len(scheduler._ledger.groups) <= 1
    assert scheduler.handle(ChunkDone(0, 0, 1, 4, True), 200.0) == []
    assert scheduler.handle(Finished(0, 0, 1, 4), 200.0) == []
