"""The coordinator's events in every order that threads can bring about: nothing is lost."""

from __future__ import annotations

import collections
import threading

import pytest
from fake_workers import POLICIES, Played, begun, draw_work, limits_of, trajectory
from held_entries import held_entries
from interleavings import SCHEDULERS, WRONG, Rollout, all_of

from rl.runtime.waits import Hang
from rl.trajectory import Request, Trajectory
from rl.workers import worker_source
from rl.workers.coordinator import Coordinator
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import Aborted
from rl.workers.worker_source import WorkerSource
from sched.policies.divided import make_scheduler
from sched.protocol import ChunkDone, Copy, Drop, Finished, Profiled, Start, Submitted, WorkerLost
from sched.request import COPIES, Kv
from spec.config import SamplingConfig


@pytest.mark.fault
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_order_of_two_events_loses_a_result_or_waits_for_ever(scheduler):
    runs, pairs, total = 0, set(), collections.Counter()
    for first, second, at, counts in all_of(scheduler):
        assert not any(counts[name] for name in WRONG), (first, second, at, counts)
        runs += 1
        pairs.add((first, second))
        total.update(counts)
    # the script reaches what it is about; whole groups have one start a request
    assert runs > 300 and len(pairs) > 125
    moves = scheduler not in ("group_fifo", "histopipe")
    assert (total["waited"] > 0) == moves
    assert (total["deferred"] > 0) == (scheduler == "histopipe")


class PopsOutsideTheLock(Coordinator):
    """The order of before: between the two steps others may be handed to the lost worker."""

    def lose(self, worker_id):
        with self._lock:
            del self._workers[worker_id]
        with self._lock:
            self._pool.withdraw_all(worker_id)
            self._tell(WorkerLost(worker_id))


class BelievesTheLost(Coordinator):
    """Reports of a worker that was given up count."""

    def _alive(self, worker_id, doing):
        if self._aborted:
            raise Aborted
        return self._workers[worker_id]


class PromisesTooLate(Coordinator):
    """The scheduler hears of a chunk's end before the pool does."""

    def chunk_ended(self, worker_id, request_id, response_tokens):
        promise, self._pool.promise = self._pool.promise, lambda *_: None
        try:
            more = super().chunk_ended(worker_id, request_id, response_tokens)
        finally:
            self._pool.promise = promise
        if not more:
            self._pool.promise(request_id, worker_id)
        return more


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (PopsOutsideTheLock, "results_lost"),
        (BelievesTheLost, "errors"),
        (PromisesTooLate, "errors"),
    ],
)
def test_planted_faults_are_found(planted, found):
    runs = (run for scheduler in SCHEDULERS for run in all_of(scheduler, planted))
    assert any(counts[found] for *_, counts in runs)


def test_a_result_is_handed_over_whatever_the_scheduler_says_of_it():
    rollout = Rollout("group_fifo")
    rollout.coordinator._scheduler.handle = None  # raises where it is called
    assert rollout.do("finish 0")
    assert len(rollout.errors) == 1
    assert isinstance(rollout.coordinator.next_result(0.0), Trajectory)


# --- many steps, many workers -----------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_session_of_300_steps_holds_no_more_than_one_of_few(name):
    """Entries are counted after each step; every worker is lost once, and another joins."""
    played = Played(name, draw_work(4, 300, per_worker=8, mean_tokens=8), lost_share=1.0)
    sizes = []

    def each_turn():
        if len(sizes) < played.owner.trained:
            sizes.append(held_entries([played.coordinator, played.scheduler._scheduler]))

    played.play(each_turn)
    assert played.num_lost == 4
    assert len(sizes) > 150
    assert max(sizes[-50:]) <= 1.1 * max(sizes[5:60]), sizes
    assert not played.coordinator.decisions


@pytest.mark.fault
@pytest.mark.parametrize("name", POLICIES)
def test_half_of_many_workers_are_lost_and_each_request_finishes_once(name):
    work = draw_work(100, 3, per_worker=16, mean_tokens=32)
    played = Played(name, work, lost_share=0.5, seed=1)
    played.play()  # which checks it
    assert played.scheduler.events["WorkerLost"] == 50
    assert played.scheduler.events["WorkerJoined"] > 100
    assert played.scheduler.num_actions > work.num_requests, "what was lost started again"
    assert bool(played.scheduler.events["ChunkDone"]) == (name != "group_fifo")


# --- waits ------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when somebody looks."""

    def __init__(self, step_s=0.0):
        self.now_s, self._step_s = 0.0, step_s

    def __call__(self):
        self.now_s += self._step_s
        return self.now_s


def coordinator(clock, **options):
    scheduler = make_scheduler("group_fifo", seed=0, chunk_tokens=4)
    return Coordinator(scheduler, clock, KvPool(0), **options)


def source(books, inbox):
    return WorkerSource(0, inbox, books, limits_of(draw_work(1, 1, 8, 8)), engine=None)


def test_a_worker_that_hangs_is_named_once_while_others_answer():
    clock = Clock()
    books = coordinator(clock)
    for worker_id in range(3):
        books.join(worker_id, 100, 4)
    books.submit(
        0, [Request(0, (1,), 0), Request(1, (1,), 1)], SamplingConfig(max_new_tokens=4), {}
    )
    books.alive(0)
    books.alive(1)  # and worker 2 waits: it may be silent
    for now_s in (9.0, 10.0):
        clock.now_s = now_s
        assert books.hung(10.0) is None
        books.alive(1)
    clock.now_s = 10.5
    hung = books.hung(10.0)
    assert "worker 0 failed on requests" in str(hung)
    assert "Hang: no sign of life for 10.5 s, while generating" in str(hung)
    assert books.hung(10.0) is None, "it has been said"
    clock.now_s = 20.5
    assert "worker 1" in str(books.hung(10.0))
    books.alive(2)
    clock.now_s = 40.0
    assert "worker 2" in str(books.hung(10.0))


START = Start(1, 0, 1, 4, 8, Kv.POOL)


def test_a_worker_that_waits_for_one_that_hangs_is_innocent():
    clock = Clock()
    books = coordinator(clock)
    for worker_id in range(3):
        books.join(worker_id, 100, 4)
    books.alive(1)
    books.alive(2)
    books._waits_for(0, 2, START)
    clock.now_s = 5.0
    books.alive(1)
    clock.now_s = 11.0
    books._waits_for(0, 2, START)
    assert "worker 2" in str(books.hung(10.0))
    assert books.hung(10.0) is None, "worker 0 waits until that one is lost"
    books.lose(2)
    assert books.hung(10.0) is None, "and has not had the time to go on"
    clock.now_s = 22.0
    books.alive(1)
    assert "worker 0" in str(books.hung(10.0))


def test_two_workers_that_wait_for_one_another_are_found():
    clock = Clock()
    books = coordinator(clock)
    for worker_id in range(2):
        books.join(worker_id, 100, 4)
        books.alive(worker_id)
    books._waits_for(0, 1, START)
    books._waits_for(1, 0, START)
    clock.now_s = 11.0
    assert "waiting for keys and values from worker 1" in str(books.hung(10.0))


def test_workers_are_looked_at_only_where_one_can_have_been_silent_for_so_long():
    class Counts(dict):
        looks = 0

        def items(self):
            self.looks += 1
            return super().items()

    clock = Clock()
    books = coordinator(clock)
    books._workers = Counts()
    for worker_id in range(3):
        books.join(worker_id, 100, 4)
    for _ in range(1000):
        clock.now_s += 0.1
        for worker_id in range(3):
            books.alive(worker_id)
        assert books.hung(10.0) is None
    assert books._workers.looks <= 100.0 / 10.0


def waits(books, inbox):
    """A worker's thread that waits for its first request, and how that ended."""
    ends = []

    def wait():
        try:
            ends.append(source(books, inbox).next_step())
        except (Aborted, Hang) as error:
            ends.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, ends


@pytest.mark.fault
def test_a_worker_without_requests_ends_once_it_is_lost():
    books = coordinator(Clock())
    thread, ends = waits(books, books.join(0, 100, 4))
    books.lose(0)
    thread.join(30)
    assert not thread.is_alive()
    assert ends == [None] or isinstance(ends[0], Aborted)


@pytest.mark.fault
def test_a_worker_without_requests_does_not_wait_for_an_owner_that_says_nothing(monkeypatch):
    monkeypatch.setattr(worker_source, "LOOK_S", 0.001)
    books = coordinator(Clock(step_s=1.0), owner_limit_s=20.0)
    thread, ends = waits(books, books.join(0, 100, 4))
    thread.join(30)
    assert not thread.is_alive()
    assert "worker 0 waits for requests: nothing asked for 2" in str(ends[0])


def test_an_owner_that_collects_results_is_waited_for():
    clock = Clock()
    books = coordinator(clock, owner_limit_s=20.0)
    books.join(0, 100, 4)
    for _ in range(10):
        clock.now_s += 15.0
        books.next_result(0.0)
        books.alive(0, None)
    clock.now_s += 21.0
    books.alive(0)  # one that has work waits for nobody
    with pytest.raises(Hang):
        books.alive(0, None)


# --- copies of requests -----------------------------------------------------------------

COPY = 5 + COPIES  # the number of request 5's first copy


class Told:
    """Answers with what it is told to, and keeps the events."""

    num_unfinished = 1

    def __init__(self):
        self.events, self.answers = [], collections.defaultdict(list)

    def handle(self, event, now_s):
        self.events.append(event)
        return self.answers.pop(type(event), [])


def begin_copy(worker_id=1):
    return Copy(5, 0, Start(COPY, worker_id, 1, 8, 9, Kv.POOL))


@pytest.fixture
def copied():
    """Request 5 on worker 0, a copy of it on worker 1, and their inboxes."""
    scheduler, pool = Told(), KvPool(1000)
    books = Coordinator(scheduler, Clock(), pool)
    inboxes = [books.join(worker_id, 100, 4) for worker_id in range(2)]
    scheduler.answers[Submitted] = [Start(5, 0, 1, 8, 9, Kv.PREFILL), begin_copy()]
    books.submit(3, [Request(5, (1,), 2, 1)], SamplingConfig(max_new_tokens=8), {})
    for worker_id in range(2):
        books.begin_step(worker_id, 3)
    return books, scheduler, pool, inboxes


def heard(inbox):
    found = []
    while not inbox.empty():
        found.append(inbox.get())
    return found


def test_a_copy_begins_where_its_request_is(copied):
    """Its noise, its group and what it has by then; of the tokens of the start the rest."""
    books, _, pool, inboxes = copied
    assert heard(inboxes[0]) == [(3, Start(5, 0, 1, 8, 9, Kv.PREFILL)), (3, begin_copy())]
    assert heard(inboxes[1]) == [(3, begin_copy().start)]
    books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 3))
    found = books.chunk(1, begin_copy().start)
    assert (found.request.request_id, found.request.group_id) == (COPY, 2)
    assert (found.num_tokens, found.max_tokens) == (3, 5)
    assert len(pool) == 0


def test_a_copy_of_what_does_not_run_begins_anew(copied):
    books, _, pool, _ = copied
    books.copied(0, COPY, None)
    assert len(pool) == 0
    found = books.chunk(1, begin_copy().start)
    assert (found.request.request_id, found.prefix, found.max_tokens) == (COPY, None, 8)


@pytest.mark.parametrize("first", [5, COPY])
def test_the_first_answer_counts_and_others_are_not_there(copied, first):
    books, scheduler, pool, inboxes = copied
    for inbox in inboxes:
        heard(inbox)
    if first == COPY:
        books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 3))
        books.chunk(1, begin_copy().start)
    workers = {5: 0, COPY: 1}
    (other,) = workers.keys() - {first}
    scheduler.answers[Finished] = [Drop(other, workers[other])]
    books.finished(workers[first], trajectory(Request(first, (1,), 2, 1), 4))
    assert heard(inboxes[workers[other]]) == [(3, Drop(other, workers[other]))]
    books.finished(workers[other], trajectory(Request(other, (1,), 2, 1), 4))
    result = books.next_result(0.0)
    assert (result.request_id, result.group_id) == (5, 2)
    assert books.next_result(0.0) is None, "there is one answer"
    ended = [event.request_id for event in scheduler.events if isinstance(event, Finished)]
    assert ended == [first]
    assert not books._asked
    assert len(pool) == 0, "a promise of what was dropped is none"


def test_what_was_dropped_neither_starts_nor_goes_on(copied):
    books, scheduler, pool, _ = copied
    scheduler.answers[Profiled] = [Drop(COPY, 1)]
    books.profiled({5: 0.3, 6: 0.9})
    assert scheduler.events[-1] == Profiled({5: 0.3}), "of those that have not ended"
    assert books.chunk(1, begin_copy().start) is None
    assert books.chunk_ended(1, COPY, 3) == 0
    books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 3))  # which was under way
    assert len(pool) == 0
    assert books.chunk(0, Start(5, 0, 1, 8, 9, Kv.PREFILL)).request.request_id == 5


@pytest.mark.fault
@pytest.mark.parametrize("handed", [False, True])
def test_a_lost_copy_may_be_begun_again(copied, handed):
    """By the same number, whatever of the first one is in the pool."""
    books, scheduler, pool, _ = copied
    if handed:
        books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 3))
    books.join(2, 100, 4)
    books.begin_step(2, 3)
    scheduler.answers[WorkerLost] = [begin_copy(2)]
    books.lose(1)
    books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 4))
    assert books.chunk(2, begin_copy(2).start).num_tokens == 4
    books.copied(0, COPY, begun(Request(5, (1,), 2, 1), 5))  # of the second one
    assert len(pool) == 0
    with pytest.raises(Aborted):
        books.finished(1, trajectory(Request(COPY, (1,), 2, 1), 8))


@pytest.mark.fault
def test_the_copies_of_a_lost_workers_requests_go_on(copied):
    """What that worker has not handed over is computed anew."""
    books, scheduler, pool, _ = copied
    scheduler.answers[WorkerLost] = []
    books.lose(0)
    found = books.chunk(1, begin_copy().start)
    assert (found.prefix, found.max_tokens) == (None, 8)
    scheduler.answers[Finished] = []
    books.finished(1, trajectory(Request(COPY, (1,), 2, 1), 8))
    assert books.next_result(0.0).request_id == 5
    assert len(pool) == 0


def test_workers_sort_what_they_are_told(copied):
    """Starts are taken; what is to be copied and dropped is the engine's, in between."""
    books, scheduler, _, inboxes = copied
    scheduler.answers[Profiled] = [Drop(COPY, 1)]
    limits = limits_of(draw_work(1, 1, 8, 8))
    first = WorkerSource(0, inboxes[0], books, limits, engine=None)
    # no engine runs yet: there is nothing to copy, and it says so
    assert first.next_step() == 3
    assert first.copies() == () or list(first.copies()) == []
    assert [p.request.request_id for p in first.take(wait=True)] == [5]
    second = WorkerSource(1, inboxes[1], books, limits, engine=None)
    assert second.next_step() == 3
    books.profiled({})
    assert second.take(wait=False) == [], "it was dropped meanwhile"
    assert second.dropped() == [COPY]
    assert second.dropped() == []
    inboxes[0].put((3, begin_copy()))
    assert first.take(wait=True) == [], "the engine is to see to it"
    assert list(first.copies()) == [(5, COPY)]
    assert list(first.copies()) == []


@pytest.mark.fault
def test_a_worker_does_not_wait_for_a_number_that_was_given_again(copied):
    """It moved: the worker that waits for a copy is now to hand it over, and would for ever."""
    books, scheduler, pool, _ = copied
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(books.chunk(1, begin_copy().start)), daemon=True
    )
    thread.start()
    while COPY not in pool._awaited:
        assert thread.is_alive()
    moved = [Drop(COPY, 1), Start(5, 1, 2, 8, 9, Kv.POOL)]
    moved.append(Copy(5, 1, Start(COPY, 0, 1, 8, 9, Kv.POOL)))
    scheduler.answers[ChunkDone] = moved
    assert books.chunk_ended(0, 5, 3) == 0
    thread.join(10.0)
    assert ended == [None]


@pytest.mark.fault
def test_late_reports_of_a_step_are_not_of_the_next_ones_request(copied):
    """A copy has answered request 5, and the next step gives its number to the same worker."""
    books, scheduler, _, _ = copied
    again = Request(5, (1,), 2, 1)
    books.copied(0, COPY, None)
    books.chunk(1, begin_copy().start)
    scheduler.answers[Finished] = [Drop(5, 0)]
    books.finished(1, trajectory(Request(COPY, (1,), 2, 1), 4))
    assert books.next_result(0.0).num_tokens == 4
    scheduler.answers[Submitted] = [Start(5, 0, 1, 8, 9, Kv.PREFILL), begin_copy()]
    books.submit(5, [again], SamplingConfig(max_new_tokens=8), {})
    books.finished(0, trajectory(again, 4))  # which was under way
    assert books.chunk_ended(0, 5, 3) == 0
    books.copied(0, COPY, begun(again, 3))
    assert books.chunk(0, Start(5, 0, 1, 8, 9, Kv.PREFILL)) is None
    assert books.next_result(0.0) is None
    books.begin_step(0, 5)
    assert books.chunk(0, Start(5, 0, 1, 8, 9, Kv.PREFILL)).prefix is None
    books.copied(0, COPY, begun(again, 2))
    books.begin_step(1, 5)
    assert books.chunk(1, begin_copy().start).num_tokens == 2
    scheduler.answers[Finished] = [Drop(COPY, 1)]
    books.finished(0, trajectory(again, 6))
    assert books.next_result(0.0).num_tokens == 6


def test_a_number_that_is_dropped_and_given_again_starts_once(copied):
    """The worker has heard of neither yet: of the first start nothing is left."""
    books, scheduler, _, inboxes = copied
    scheduler.answers[Profiled] = [Drop(COPY, 1), begin_copy()]
    worker = WorkerSource(1, inboxes[1], books, limits_of(draw_work(1, 1, 8, 8)), engine=None)
    assert worker.next_step() == 3
    books.profiled({})
    books.copied(0, COPY, None)
    assert [p.request.request_id for p in worker.take(wait=False)] == [COPY]
    assert worker.dropped() == [COPY]
