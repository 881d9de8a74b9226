"""Copies of stragglers, by hand."""

from __future__ import annotations

import pytest

from reprise.sched.policies.divided import Divided, Fifo
from reprise.sched.policies.fastest_of_n import FastestOfN
from reprise.sched.policies.steps import Ahead
from reprise.sched.protocol import (
    ChunkDone,
    Copy,
    Drop,
    Finished,
    Profiled,
    Recall,
    Start,
    Submitted,
    WorkerJoined,
    WorkerLost,
)
from reprise.sched.request import COPIES, MAX_COPIES, Kv, RequestSpec, copy_of


def scheduler(workers=2, inner=None, max_requests=4, kv_tokens=1000, **options):
    settings = {"num_methods": 2, "max_copies": 4} | options
    made = FastestOfN(inner or Divided(Fifo(), chunk_tokens=50), **settings)
    for worker_id in range(workers):
        assert made.handle(WorkerJoined(worker_id, kv_tokens, max_requests), 0.0) == []
    return made


def present(*numbers, **fields):
    return Submitted(tuple(RequestSpec(i, i, 5, 50, **fields) for i in numbers))


def first(request_id):
    return request_id + COPIES


def second(request_id):
    return request_id + 2 * COPIES


def started(actions):
    return [(a.request_id, a.worker_id) for a in actions if isinstance(a, Start)]


def copied(actions):
    """(request, which copy, worker that has it, worker that gets it) of copies."""
    return [
        (a.request_id, copy_of(a.start.request_id)[1], a.worker_id, a.start.worker_id)
        for a in actions
        if isinstance(a, Copy)
    ]


def dropped(actions):
    return {(a.request_id, a.worker_id) for a in actions if isinstance(a, Drop)}


# --- when there are copies ------------------------------------------------------------------


def test_a_dry_worker_answers_what_is_left_a_second_time():
    s = scheduler()
    actions = s.handle(present(0), 0.0)
    assert started(actions) == [(0, 0)] and isinstance(actions[0], Start)
    # with room for all that it may come to
    start = Start(first(0), 1, 1, 50, 55, Kv.POOL)
    assert actions[1:] == [Copy(0, 0, start)]
    assert s.num_unfinished == 1, "copies are no requests"


def test_no_copies_while_something_waits():
    s = scheduler(max_requests=1)
    assert copied(s.handle(present(0, 1, 2), 0.0)) == []
    actions = s.handle(Finished(0, 0, 1, 9), 1.0)
    assert started(actions) == [(2, 0)] and copied(actions) == []
    assert copied(s.handle(Finished(1, 1, 1, 9), 2.0)) == [(2, 1, 0, 1)]


def test_no_copies_while_no_worker_is_dry():
    s = scheduler()
    assert copied(s.handle(present(0, 1, 2), 0.0)) == []
    assert copied(s.handle(Finished(0, 0, 1, 9), 1.0)) == [], "another one runs there"
    assert copied(s.handle(Finished(1, 1, 1, 9), 1.0)) == [(2, 1, 0, 1)]


def test_no_copies_where_they_do_not_pay():
    asked = []

    def worth(held, left):
        asked.append((held, left))
        return held >= 30

    s = scheduler(worth=worth, inner=Divided(Fifo(), chunk_tokens=25))
    assert copied(s.handle(present(0), 0.0)) == [] and asked[-1] == (5, 50)
    assert copied(s.handle(ChunkDone(0, 0, 1, 25, True), 1.0)) == [(0, 1, 0, 1)]
    assert asked[-1] == (30, 25)


def test_a_new_worker_gets_copies():
    s = scheduler(1)
    s.handle(present(0), 0.0)
    assert copied(s.handle(WorkerJoined(1, 1000, 4), 1.0)) == [(0, 1, 0, 1)]
    # each worker has one method: the one with the fewest workers
    assert copied(s.handle(WorkerJoined(2, 1000, 4), 1.0)) == [(0, 2, 0, 2)]
    assert copied(s.handle(WorkerJoined(3, 1000, 4), 1.0)) == [], "there is no third method"


# --- of which requests, and where -----------------------------------------------------------


def test_the_lowest_acceptance_goes_first():
    s = scheduler(max_copies=2)
    s.handle(present(0, 1, 2, 3, 4), 0.0)  # 0, 2 and 4 on worker 0
    s.handle(Profiled({0: 0.9, 2: 0.1, 4: 0.5}), 0.5)
    s.handle(Finished(1, 1, 1, 9), 1.0)
    actions = s.handle(Finished(3, 1, 1, 9), 1.0)
    assert copied(actions) == [(2, 1, 0, 1), (4, 1, 0, 1)]


def test_a_worker_has_one_method_until_its_copies_have_ended():
    s = scheduler(4, num_methods=2)
    got = copied(s.handle(present(0), 0.0))
    assert got == [(0, 1, 0, 1), (0, 2, 0, 2)], "worker 3 has nothing to add"
    # method 1 has no worker any more: the one without copies takes it
    assert copied(s.handle(WorkerLost(1), 1.0)) == [(0, 1, 0, 3)]
    assert copied(s.handle(WorkerLost(2), 1.0)) == []


def test_no_more_copies_than_there_is_room_for():
    s = scheduler(kv_tokens=120)  # each copy takes 55
    s.handle(present(0, 1, 2), 0.0)  # 0 and 2 on worker 0
    assert len(copied(s.handle(Finished(1, 1, 1, 9), 1.0))) == 2
    s = scheduler()
    s.handle(present(0, 1, 2), 0.0)
    assert len(copied(s.handle(WorkerJoined(2, 60, 4), 1.0))) == 1
    s = scheduler()
    s.handle(present(0, 1, 2), 0.0)
    assert len(copied(s.handle(WorkerJoined(2, 1000, 1), 1.0))) == 1


def test_a_place_is_not_taken_by_what_has_its_copy_already():
    s = scheduler(max_copies=2)
    s.handle(present(0, 1, 2, 3, 4), 0.0)  # 0, 2 and 4 on worker 0
    s.handle(Profiled({0: 0.1, 2: 0.2, 4: 0.3}), 0.5)
    s.handle(Finished(1, 1, 1, 9), 1.0)
    assert copied(s.handle(Finished(3, 1, 1, 9), 1.0)) == [(0, 1, 0, 1), (2, 1, 0, 1)]
    # 2 ends: its place is for 4, though 0 has a lower acceptance
    assert copied(s.handle(Finished(2, 0, 1, 9), 2.0)) == [(4, 1, 0, 1)]


# --- who ends first -------------------------------------------------------------------------


def test_the_copy_that_ends_first_ends_the_request():
    s = scheduler(3)
    s.handle(present(0), 0.0)
    actions = s.handle(Finished(first(0), 1, 1, 30), 1.0)
    assert dropped(actions) == {(second(0), 2), (0, 0)} and len(actions) == 2
    assert s.num_unfinished == 0 and s._scheduler.num_unfinished == 0
    # what the others report by then is of no interest
    assert s.handle(Finished(second(0), 2, 1, 30), 1.0) == []
    assert s.handle(Finished(0, 0, 1, 30), 1.0) == []
    assert s.handle(ChunkDone(first(0), 1, 1, 30, True), 1.0) == []


def test_the_request_that_ends_first_drops_its_copies():
    s = scheduler(3)
    s.handle(present(0), 0.0)
    actions = s.handle(Finished(0, 0, 1, 30), 1.0)
    assert dropped(actions) == {(first(0), 1), (second(0), 2)} and len(actions) == 2
    assert s.handle(Finished(first(0), 1, 1, 30), 1.0) == [] and s.num_unfinished == 0


def test_the_answer_of_a_request_that_has_chunks():
    s = scheduler(inner=Divided(Fifo(), chunk_tokens=20))
    s.handle(present(0), 0.0)
    (again,) = s.handle(ChunkDone(0, 0, 1, 20, True), 1.0)
    assert (again.chunk, again.kv) == (2, Kv.HELD)
    assert dropped(s.handle(Finished(first(0), 1, 1, 33), 2.0)) == {(0, 0)}
    assert s.num_unfinished == 0
    assert s.handle(ChunkDone(0, 0, 2, 40, True), 2.0) == [], "it ran on for a moment"


# --- workers --------------------------------------------------------------------------------


def test_a_worker_that_gets_a_request_drops_its_copies():
    s = scheduler()
    s.handle(present(0), 0.0)
    actions = s.handle(present(1), 1.0)
    assert actions[0] == Drop(first(0), 1) and started(actions) == [(1, 1)]
    assert len(actions) == 2
    # and has them again once it is dry
    actions = s.handle(Finished(1, 1, 1, 9), 2.0)
    assert copied(actions) == [(0, 1, 0, 1)] and len(actions) == 1


def test_a_request_whose_worker_is_lost_goes_on_beside_its_copies():
    s = scheduler(3)
    s.handle(present(0), 0.0)
    actions = s.handle(WorkerLost(0), 1.0)
    assert started(actions) == [(0, 1)] and dropped(actions) == {(first(0), 1)}
    assert list(s._copies) == [second(0)]
    assert dropped(s.handle(Finished(second(0), 2, 1, 30), 2.0)) == {(0, 1)}
    assert s.num_unfinished == 0


# --- beside what is begun -------------------------------------------------------------------


def test_what_is_begun_is_recalled_before_a_copy_starts():
    inner = scheduler(
        0, worth=lambda held, left: held >= 30, inner=Divided(Fifo(), chunk_tokens=25)
    )
    s = Ahead(inner, chunk_tokens=10)
    for worker_id in range(2):
        s.handle(WorkerJoined(worker_id, 1000, 4), 0.0)
    s.handle(present(0), 0.0)
    begun = RequestSpec(100, 0, 5, 50, ahead=True)
    assert started(s.handle(Submitted((begun,)), 0.0)) == [(100, 1)]
    actions = s.handle(ChunkDone(0, 0, 1, 25, True), 1.0)
    assert actions.index(Recall(1)) < [type(a) for a in actions].index(Copy)
    # what has let go waits: no worker is dry
    assert s.handle(ChunkDone(100, 1, 1, 3, True), 1.0) == []
    actions = s.handle(Finished(first(0), 1, 1, 30), 2.0)
    assert dropped(actions) == {(0, 0)} and s.num_unfinished == 0
    ((request_id, _),) = started(actions)
    assert request_id == 100 and actions[-1].max_tokens == 10


def test_a_worker_that_drops_its_copies_may_begin_something():
    s = Ahead(scheduler(0), chunk_tokens=10)
    for worker_id in range(2):
        s.handle(WorkerJoined(worker_id, 1000, 4), 0.0)
    s.handle(present(0), 0.0)
    begun = RequestSpec(100, 0, 5, 50, ahead=True), RequestSpec(101, 1, 5, 50, ahead=True)
    assert s.handle(Submitted(begun), 0.0) == [], "copies run there"
    actions = s.handle(Finished(0, 0, 1, 30), 1.0)
    assert dropped(actions) == {(first(0), 1)} and len(started(actions)) == 2
    assert {worker for _, worker in started(actions)} == {0, 1}


@pytest.mark.parametrize("options", [{"num_methods": 0}, {"num_methods": 8}, {"max_copies": 0}])
def test_settings_that_mean_nothing(options):
    assert MAX_COPIES == 7
    with pytest.raises(ValueError, match="methods and at least one copy"):
        scheduler(**options)
