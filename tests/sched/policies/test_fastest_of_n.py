"""Copies of stragglers: by hand, and under random events with deaths."""

from __future__ import annotations

import numpy as np
import pytest
from random_cluster import RandomCluster, Running, random_work

from sched.policies.ahead import Ahead
from sched.policies.divided import Divided
from sched.policies.fastest_of_n import FastestOfN
from sched.policies.group_fifo import GroupFifo
from sched.policies.orders import Fifo
from sched.policies.registry import ORDERS
from sched.protocol import (
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
from sched.request import COPIES, MOST_COPIES, Kv, RequestSpec, copy_of


class Blocked(Divided):
    """Starts nothing while `blocked`: its requests wait beside their copies."""

    blocked = False

    def _dispatch(self):
        return [] if self.blocked else super()._dispatch()


def scheduler(workers=2, inner=None, max_requests=4, kv_tokens=1000, **options):
    settings = {"num_methods": 2, "most_requests": 4} | options
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
    s = scheduler(most_requests=2)
    s.handle(present(0, 1, 2, 3, 4), 0.0)  # 0, 2 and 4 on worker 0
    s.handle(Profiled({0: 0.9, 2: 0.1, 4: 0.5}), 0.5)
    s.handle(Finished(1, 1, 1, 9), 1.0)
    actions = s.handle(Finished(3, 1, 1, 9), 1.0)
    assert copied(actions) == [(2, 1, 0, 1), (4, 1, 0, 1)]


def test_who_was_not_profiled_is_taken_for_the_worst():
    s = scheduler(most_requests=1)
    s.handle(present(0, 1, 2), 0.0)
    s.handle(Profiled({0: 0.3}), 0.5)
    assert copied(s.handle(Finished(1, 1, 1, 9), 1.0)) == [(2, 1, 0, 1)]


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
    s = scheduler(most_requests=2)
    s.handle(present(0, 1, 2, 3, 4), 0.0)  # 0, 2 and 4 on worker 0
    s.handle(Profiled({0: 0.1, 2: 0.2, 4: 0.3}), 0.5)
    s.handle(Finished(1, 1, 1, 9), 1.0)
    assert copied(s.handle(Finished(3, 1, 1, 9), 1.0)) == [(0, 1, 0, 1), (2, 1, 0, 1)]
    # 2 ends: its place is for 4, though 0 has a lower acceptance
    assert copied(s.handle(Finished(2, 0, 1, 9), 2.0)) == [(4, 1, 0, 1)]


def test_a_second_worker_of_a_method_takes_what_the_first_has_not():
    s = scheduler(num_methods=1, most_requests=1)
    s.handle(present(0, 1, 2), 0.0)
    s.handle(Profiled({0: 0.1, 2: 0.2}), 0.5)
    assert copied(s.handle(Finished(1, 1, 1, 9), 1.0)) == [(0, 1, 0, 1)]
    assert copied(s.handle(WorkerJoined(2, 1000, 4), 2.0)) == [(2, 1, 0, 2)]


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


def test_the_place_that_a_copy_has_freed_is_for_others():
    s = scheduler(3, max_requests=1, num_methods=1)
    assert copied(s.handle(present(0, 1), 0.0)) == [(0, 1, 0, 2)]
    actions = s.handle(Finished(first(0), 2, 1, 30), 1.0)
    assert dropped(actions) == {(0, 0)}
    # now two are dry, and the one that is left is copied once: by the one method
    assert copied(actions) == [(1, 1, 1, 0)]


def test_the_answer_of_a_request_that_has_chunks():
    s = scheduler(inner=Divided(Fifo(), chunk_tokens=20))
    s.handle(present(0), 0.0)
    (again,) = s.handle(ChunkDone(0, 0, 1, 20, True), 1.0)
    assert (again.chunk, again.kv) == (2, Kv.HELD)
    assert dropped(s.handle(Finished(first(0), 1, 1, 33), 2.0)) == {(0, 0)}
    assert s.num_unfinished == 0
    assert s.handle(ChunkDone(0, 0, 2, 40, True), 2.0) == [], "it ran on for a moment"


def test_a_copy_that_ends_while_its_request_waits_between_two_chunks():
    inner = Blocked(Fifo(), chunk_tokens=20)
    s = scheduler(inner=inner)
    s.handle(present(0), 0.0)
    inner.blocked = True
    assert s.handle(ChunkDone(0, 0, 1, 20, True), 1.0) == []
    assert s.handle(Finished(first(0), 1, 1, 33), 2.0) == []
    assert s.num_unfinished == 0 and inner.num_unfinished == 1
    inner.blocked = False
    actions = s.handle(present(7), 3.0)
    # it would be started now: it has ended instead
    assert dropped(actions) == {(0, 0)} and started(actions) == [(7, 1)]
    assert inner.num_unfinished == s.num_unfinished == 1
    assert copied(actions) == [(7, 1, 1, 0)]


def test_a_request_that_was_answered_while_it_waits_keeps_no_copies_back():
    inner = Blocked(Fifo(), chunk_tokens=20)
    s = scheduler(inner=inner, most_requests=1)
    s.handle(present(0, 1, 2), 0.0)  # 0 and 2 on worker 0
    assert copied(s.handle(Finished(1, 1, 1, 9), 1.0)) == [(0, 1, 0, 1)]
    inner.blocked = True
    s.handle(ChunkDone(0, 0, 1, 20, True), 2.0)
    assert copied(s.handle(Finished(first(0), 1, 1, 33), 3.0)) == [(2, 1, 0, 1)]


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
    assert list(s._copies[2]) == [second(0)]
    assert dropped(s.handle(Finished(second(0), 2, 1, 30), 2.0)) == {(0, 1)}
    assert s.num_unfinished == 0


def test_the_only_other_worker_takes_a_lost_ones_request():
    s = scheduler()
    s.handle(present(0), 0.0)
    actions = s.handle(WorkerLost(0), 1.0)
    assert actions[0] == Drop(first(0), 1) and started(actions) == [(0, 1)] and len(actions) == 2
    actions = s.handle(WorkerLost(1), 2.0)
    assert actions == [] and s.num_unfinished == 1
    assert started(s.handle(WorkerJoined(2, 1000, 4), 3.0)) == [(0, 2)]


def test_copies_of_a_lost_worker_are_gone():
    s = scheduler()
    s.handle(present(0), 0.0)
    assert s.handle(WorkerLost(1), 1.0) == []
    assert s.handle(Finished(first(0), 1, 1, 30), 1.0) == [], "a late report"
    assert s.num_unfinished == 1
    assert copied(s.handle(WorkerJoined(2, 1000, 4), 2.0)) == [(0, 1, 0, 2)]
    assert s.handle(Finished(0, 0, 1, 30), 3.0) == [Drop(first(0), 2)]


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


@pytest.mark.parametrize("options", [{"num_methods": 0}, {"num_methods": 8}, {"most_requests": 0}])
def test_settings_that_mean_nothing(options):
    assert MOST_COPIES == 7
    with pytest.raises(ValueError, match="methods and at least one request"):
        scheduler(**options)


# --- random events --------------------------------------------------------------------------


class CopiesCluster(RandomCluster):
    """Originals and copies run side by side; whichever ends first answers the request."""

    def play(self, *, workers, deaths, most_requests):
        self.most_requests, self.submitted, self.won = most_requests, set(), 0
        self.stale: list[Finished] = []  # reports of what was dropped, as it ended
        super().play(workers=workers, deaths=deaths)
        assert not self.copies() and not self.originals()

    def originals(self):
        return {r: w for w, x in self.workers.items() for r in x if not copy_of(r)[1]}

    def copies(self):
        return {r: w for w, x in self.workers.items() for r in x if copy_of(r)[1]}

    def report_one(self):
        if self.rng.random() < 0.1:
            some = [r for r in self.submitted if r not in self.finished]
            self.tell(Profiled({r: float(self.rng.random()) for r in some}))
        if self.stale and self.rng.random() < 0.5:
            late = self.stale.pop()
            if late.request_id not in self.workers.get(late.worker_id, ()):
                self.tell(late)
        super().report_one()

    def report(self, worker_id, number):
        request_id, copy = copy_of(number)
        if not copy:
            super().report(worker_id, number)
            return
        start = self.workers[worker_id].pop(number).start
        assert request_id not in self.finished, "it was to be dropped"
        self.finished.append(request_id)
        self.won += 1
        assert self.lengths[request_id] <= start.max_tokens
        self.tell(Finished(number, worker_id, start.chunk, self.lengths[request_id]))

    def tell(self, event):
        if isinstance(event, Submitted):
            self.submitted |= {r.request_id for r in event.requests}
        super().tell(event)
        open_requests = self.submitted - set(self.finished)
        assert self.scheduler.num_unfinished == len(open_requests)
        assert {copy_of(r)[0] for r in self.copies()} <= open_requests
        assert set(self.originals()) <= open_requests
        self.check_nobody_idles(open_requests)

    def check_nobody_idles(self, open_requests):
        """Where copies may be made, a worker has none only if all requests have one."""
        if self.budgeted or not open_requests or set(self.originals()) != open_requests:
            return
        answered = {copy_of(r)[0] for r in self.copies()}
        if not all(self.workers.values()):
            assert answered == open_requests, "a worker idles beside a request without a copy"

    def obey(self, action):
        if isinstance(action, Copy):
            self.copy(action)
        elif isinstance(action, Drop):
            self.drop(action)
        else:
            assert not copy_of(action.request_id)[1]
            assert not any(copy_of(r)[1] for r in self.workers[action.worker_id])
            super().obey(action)

    def copy(self, action):
        start, worker = action.start, self.workers[action.start.worker_id]
        request_id, number = copy_of(start.request_id)
        spec = self.requests[request_id]
        assert request_id == action.request_id and number
        assert action.request_id in self.workers[action.worker_id], "it does not run there"
        assert set(self.originals()) == self.submitted - set(self.finished), "something waits"
        assert start.request_id not in self.copies(), "runs twice"
        assert {copy_of(r)[1] for r in worker} <= {number}, "a worker has one method"
        assert (start.max_tokens, start.kv) == (spec.max_new_tokens, Kv.POOL)
        worker[start.request_id] = Running(start, 0)
        assert len(worker) <= min(self.most_requests, self.max_requests)
        assert sum(x.start.reserved_tokens for x in worker.values()) <= self.kv_tokens

    def drop(self, action):
        request_id, number = copy_of(action.request_id)
        worker = self.workers[action.worker_id]
        if not number:
            assert request_id in self.finished
            if request_id not in worker:  # it waited, and was answered: it was never started
                assert request_id not in self.originals()
                return
        running = worker.pop(action.request_id)
        length, chunk = self.lengths[request_id], running.start.chunk
        self.stale.append(Finished(action.request_id, action.worker_id, chunk, length))


def play(scheduler, name, rng, budgeted, most_requests):
    limit = int(rng.integers(2, 40))
    requests, lengths = random_work(
        rng,
        groups=int(rng.integers(1, 6)),
        size=int(rng.integers(1, 4)),
        limit=limit,
        known=name == "oracle",
    )
    kv_tokens = 3 + limit + int(rng.integers(0, 60)) if budgeted else 10**6
    cluster = CopiesCluster(
        *(scheduler, requests, lengths, rng),
        **{"kv_tokens": kv_tokens, "max_requests": int(rng.integers(1, 6)) if budgeted else 99},
        budgeted=budgeted,
    )
    deaths = float(rng.choice([0, 0.02, 0.1]))
    cluster.play(workers=int(rng.integers(1, 6)), deaths=deaths, most_requests=most_requests)
    return cluster


class SometimesBlocked(Divided):
    """A scheduler that lets requests wait now and then, while a worker has room."""

    rng: np.random.Generator

    def _dispatch(self):
        if self._ledger.num_running and self.rng.random() < 0.3:
            return []
        return super()._dispatch()


def random_scheduler(kind, name, seed, rng):
    chunk = int(rng.integers(1, 12))
    if name == "group_fifo":
        inner = GroupFifo(seed=seed)
    elif name == "blocked":
        inner = SometimesBlocked(Fifo(), chunk_tokens=chunk)
        inner.rng = rng
    else:
        inner = Divided(ORDERS[name](seed), chunk_tokens=chunk)
    most = int(rng.integers(1, 5))
    return kind(inner, num_methods=int(rng.integers(1, 4)), most_requests=most), most


@pytest.mark.parametrize("name", ["group_fifo", "blocked", *ORDERS])
def test_each_request_ends_once_whatever_dies(name):
    won = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        scheduler, most = random_scheduler(FastestOfN, name, seed, rng)
        budgeted = name != "group_fifo" and seed % 2 == 0
        won += play(scheduler, name, rng, budgeted, most).won
    assert won > 50, "copies are to be met"


class _KeepsCopies(FastestOfN):
    def _forget(self, request_id):
        return super()._forget(request_id)[1:]


class _KeepsPlaces(FastestOfN):
    """A request starts beside copies."""

    def _drop_copies(self, worker_id):
        return []


class _CopiesSome(FastestOfN):
    """Some workers idle beside requests without a copy."""

    def _copy(self):
        return [a for a in super()._copy() if a.start.request_id % 2 == 0]


class _NeverTells(FastestOfN):
    """The request's own scheduler hears nothing of a copy's answer."""

    def _end(self, start, now_s):
        self._tokens.pop(start.request_id)
        return []


@pytest.mark.parametrize("planted", [_KeepsCopies, _KeepsPlaces, _CopiesSome, _NeverTells])
def test_a_planted_fault_is_found(planted):
    def all_seeds():
        for seed in range(40):
            rng = np.random.default_rng(seed)
            scheduler, most = random_scheduler(planted, "divided_fifo", seed, rng)
            play(scheduler, "divided_fifo", rng, False, most)

    with pytest.raises(AssertionError):
        all_seeds()
