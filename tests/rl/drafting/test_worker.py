"""Drafting workers as threads: who gets whose blocks, and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl.drafting.config import DraftingConfig
from rl.drafting.plans import Planner
from rl.drafting.threads import MOST_RESTARTS, DraftingThreads
from rl.drafting.worker import MOST_ROLLOUTS, MOST_WORDS, DraftingWorker, WorkerLink
from rl.drafting.workers import DraftingWorkers, share
from rl.engine.worker_record import WorkerPart
from rl.speculation.config import DraftModelConfig
from rl.speculation.draft_model import DraftModel
from spec.budget.config import MODEL
from spec.config import SamplingConfig
from spec.decoupled.messages import Block, Commit, DraftPlan

LIMIT_S = 30.0  # of a wait for a thread
TOKENS = np.arange(4, dtype=np.int32)


class FakeEngine:
    """An engine for threads that compute nothing."""

    def __init__(self, number=0):
        self.number, self.where = number, f"device {number}"

    def mesh_context(self):
        return contextlib.nullcontext()

    def abandoned(self):
        return FakeEngine(self.number + 100)


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Echo:
    """Answers each commit with one block that names its round; `step` may do something before."""

    def __init__(self, before_step=lambda: None):
        self.heard, self.closed, self.pending = [], [], []
        self._before_step = before_step

    def hear(self, commits, closed):
        self.heard += commits
        self.closed += closed
        self.pending += commits

    def step(self):
        pending, self.pending = self.pending, []
        if pending:
            self._before_step()
        return [Block(c.request_id, c.round, c.total_tokens, *3 * [TOKENS]) for c in pending]


def commit(request_id, round=1, first=0):
    return Commit(request_id, round, first, TOKENS, 1, 9, TOKENS[:0], DraftPlan(2), (1.0, 0.0, 1.0))


def blocks_of(link, count=1):
    """The blocks that come to a link, once there are so many."""
    found, began_s = [], time.monotonic()
    while len(found) < count:
        link.wait(0.05)
        found += link.take()
        assert time.monotonic() - began_s < LIMIT_S, f"{len(found)} of {count} blocks"
    return [(b.request_id, b.round) for b in found]


def wait_until(condition):
    began_s = time.monotonic()
    while not condition():
        time.sleep(0.002)
        assert time.monotonic() - began_s < LIMIT_S


class Made:
    """Makes what drafts for a rollout, and keeps it."""

    def __init__(self, before_step=lambda: None):
        self.all, self._before_step = [], before_step

    def __call__(self, engine):
        self.all.append(Echo(self._before_step))
        return self.all[-1]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def worker(clock):
    worker = DraftingWorker(FakeEngine(), clock)
    yield worker
    worker.close(LIMIT_S)


def link_to(worker, made, rollout="a", look=lambda: None):
    return WorkerLink(worker, rollout, made, look)


def test_blocks_reach_the_link_that_asked(worker):
    """Two verifying workers of one rollout share what drafts; another rollout has its own."""
    made, other = Made(), Made()
    links = [link_to(worker, made), link_to(worker, made), link_to(worker, other, "b")]
    assert all(link.generation == 0 for link in links)
    for k, link in enumerate(links):
        link.tell([commit(10 * k), commit(10 * k + 1)], [])
    assert [sorted(blocks_of(link, 2)) for link in links] == [
        [(10 * k, 1), (10 * k + 1, 1)] for k in range(3)
    ]
    # a request that has moved is drafted for where it is
    links[1].tell([commit(0, round=2, first=4)], [])
    assert blocks_of(links[1]) == [(0, 2)]
    assert not links[0].take()
    assert len(made.all) == len(other.all) == 1, "once a rollout"
    assert len(made.all[0].heard) == 5
    wait_until(lambda: worker.alive_s is None)  # it waits: nothing is asked of it
    assert 2 <= worker.steps <= 4
    assert worker.error is None


def test_nothing_is_sent_for_requests_that_have_left(worker):
    made = Made()
    link = link_to(worker, made)
    link.tell([commit(1), commit(2)], [])
    blocks_of(link, 2)
    link.tell([commit(3)], [1])
    assert blocks_of(link) == [(3, 1)]
    assert made.all[0].closed == [1]
    made.all[0].pending = [commit(1, round=2), commit(2, round=2)]  # a late one of its own
    link.tell([], [9])
    assert blocks_of(link) == [(2, 2)]


def test_a_rollout_that_only_says_goodbye_is_not_begun(worker):
    made = Made()
    link = link_to(worker, made)
    link.tell([], [1])
    other = link_to(worker, made, "b")
    other.tell([commit(1)], [])
    blocks_of(other)
    assert len(made.all) == 1


def test_old_rollouts_are_forgotten(worker):
    made, links = Made(), []
    for rollout in range(MOST_ROLLOUTS + 1):
        links.append(link_to(worker, made, rollout))
        links[-1].tell([commit(rollout)], [])
        blocks_of(links[-1])
    assert len(made.all) == MOST_ROLLOUTS + 1
    links[1].tell([commit(1, round=2)], [])
    blocks_of(links[1])
    assert len(made.all) == MOST_ROLLOUTS + 1, "the last ones are there"
    links[0].tell([commit(0, round=2)], [])
    blocks_of(links[0])
    assert len(made.all) == MOST_ROLLOUTS + 2, "the first one is not"


def test_what_an_old_rollout_had_is_not_kept(worker):
    """Its requests may never be closed, as where it was aborted."""
    first = link_to(worker, Made(), 0)
    first.tell([commit(0)], [])
    blocks_of(first)
    gone = weakref.ref(first)
    del first
    for rollout in range(1, MOST_ROLLOUTS + 2):
        link = link_to(worker, Made(), rollout)
        link.tell([commit(rollout)], [])
        blocks_of(link)
    gc.collect()
    assert gone() is None


def test_one_that_falls_behind_is_told_no_more_until_it_has_heard_all(worker):
    """What waits for it may hold hidden states of the policy; who has left is said all the same."""
    goes_on = threading.Event()
    made = Made(lambda: goes_on.wait(LIMIT_S))
    link = link_to(worker, made)
    link.tell([commit(1)], [])
    wait_until(lambda: made.all and made.all[0].heard and worker._inbox.empty())
    for round in range(2, MOST_WORDS + 9):
        link.tell([commit(1, round)], [])
    link.tell([commit(2, 99)], [1])
    assert worker._inbox.qsize() == MOST_WORDS + 1 and link.generation == 0
    goes_on.set()
    wait_until(lambda: link.generation == 1)
    (echo,) = made.all
    assert [c.round for c in echo.heard] == [*range(1, MOST_WORDS + 2)] and echo.closed == [1]
    link.tell([commit(2, 100)], [])
    wait_until(lambda: (2, 100) in [(c.request_id, c.round) for c in echo.heard])
    assert (link.generation, worker.restarts, worker.error) == (1, 0, None)


def test_a_link_waits_no_longer_than_it_is_told(worker):
    link = link_to(worker, Made())
    link.wait(0.001)
    assert list(link.take()) == []


def test_close_ends_the_thread(clock):
    worker = DraftingWorker(FakeEngine(), clock)
    link = link_to(worker, Made())
    link.tell([commit(1)], [])
    worker.close(LIMIT_S)
    assert not worker._thread.is_alive()
    link.tell([commit(2)], [])  # it takes what it is told


# --- losses -----------------------------------------------------------------------------


class Broken(RuntimeError):
    """A fault that was planted."""


def fails():
    raise Broken("a device is gone")


@pytest.fixture
def team(clock):
    """Two drafting workers of a run, for verifying workers 0 and 1."""
    lines = []
    planner = Planner(DraftingConfig(workers=2), 4, 8, 3)
    options = {"clock": clock, "told": lines.append, "hang_limit_s": 10.0}
    model = DraftModel(None, None, DraftModelConfig())  # nothing is drafted with it
    workers = DraftingWorkers({MODEL: model}, planner, 16, **options)
    engines = [FakeEngine(k) for k in range(2)]
    workers._threads = DraftingThreads(engines, **options)
    workers._verifying, workers.lines = [0, 1], lines
    with workers:
        yield workers
    assert all(not w._thread.is_alive() for w in workers.workers)


@pytest.mark.fault
def test_a_worker_that_raises_is_replaced(team):
    """The next who tells it something sees to that, and is told of the new one."""
    broken, other = Made(fails), Made()
    links = [
        link_to(w, m, look=team._threads.look)
        for w, m in zip(team.workers, (broken, other), strict=True)
    ]
    links[0].tell([commit(1)], [])
    links[1].tell([commit(2)], [])
    assert blocks_of(links[1]) == [(2, 1)]
    wait_until(lambda: team.workers[0].error is not None)
    assert links[0].generation == 0
    links[0]._make = again = Made()
    links[0].tell([], [])
    assert (links[0].generation, links[1].generation) == (1, 0)
    assert team.lines == [
        "warning: drafting worker 0 failed: Broken: a device is gone; it is replaced"
    ]
    links[0].tell([commit(1, round=2)], [])
    assert blocks_of(links[0]) == [(1, 2)]
    assert len(again.all) == 1, "the new one knows nothing of what was said before"


@pytest.mark.fault
def test_so_does_one_that_cannot_make_what_drafts(team):
    def make(engine):
        raise Broken("no room")

    link = link_to(team.workers[0], make, look=team._threads.look)
    link.tell([commit(1)], [])
    wait_until(lambda: team.workers[0].error is not None)
    link.tell([], [])
    assert "failed: Broken: no room" in team.lines[0]


@pytest.mark.fault
def test_one_that_always_fails_is_given_up_at_last(team):
    link, worker = link_to(team.workers[0], Made(fails), look=team._threads.look), team.workers[0]
    for generation in range(MOST_RESTARTS + 1):
        assert link.generation == generation
        link.tell([commit(1, round=generation + 1)], [])
        wait_until(lambda: worker.error is not None)
        link.tell([], [])
    assert link.generation == MOST_RESTARTS + 1
    assert [line.rpartition("; ")[2] for line in team.lines] == [
        *["it is replaced"] * MOST_RESTARTS,
        "verifying workers go on without it",
    ]
    told = list(team.lines)
    for round in range(5):
        link.tell([commit(1, round)], [])
    assert team.lines == told and link.generation == MOST_RESTARTS + 1
    assert not link.take()
    assert worker._inbox.empty(), "nobody would read it"


@pytest.mark.fault
def test_one_that_hangs_is_replaced_and_says_nothing_any_more(team, clock):
    comes_back, back = threading.Event(), threading.Event()
    hang = [True]

    def hangs():
        if hang:
            hang.clear()
            assert comes_back.wait(LIMIT_S)
            back.set()

    made, worker = Made(hangs), team.workers[0]
    link = link_to(worker, made, look=team._threads.look)
    link.tell([commit(1)], [])
    wait_until(lambda: not hang)
    clock.now_s = 9.9
    link.tell([commit(1, round=2)], [])
    assert link.generation == 0, "it may take so long"
    clock.now_s = 12.5
    link.tell([], [])
    assert link.generation == 1
    assert team.lines == [
        "warning: drafting worker 0 hangs: no sign of life for 12.5 s; it is replaced"
    ]
    assert worker.engine.number == 100, "the engine is left to it"
    link.tell([commit(1, round=3)], [])
    assert blocks_of(link) == [(1, 3)]
    steps = worker.steps
    left = [t for t in threading.enumerate() if t.name == "drafting"]
    comes_back.set()
    assert back.wait(LIMIT_S)
    wait_until(lambda: sum(t.is_alive() for t in left) == 2)  # it ends: nobody asks it
    assert (worker.steps, worker.error) == (steps, None)


@pytest.mark.fault
def test_what_one_left_behind_raises_is_nobodys_error(team, clock):
    comes_back = threading.Event()

    def hangs():
        assert comes_back.wait(LIMIT_S)
        raise Broken("late")

    link = link_to(team.workers[0], Made(hangs), look=team._threads.look)
    link.tell([commit(1)], [])
    first = team.workers[0]._thread
    clock.now_s = 20.0
    link.tell([], [])
    assert link.generation == 1
    comes_back.set()
    first.join(LIMIT_S)
    assert team.workers[0].error is None


def test_one_that_nobody_asks_does_not_hang(team, clock):
    link = link_to(team.workers[0], Made(), look=team._threads.look)
    link.tell([commit(1)], [])
    blocks_of(link)
    wait_until(lambda: team.workers[0].alive_s is None)
    clock.now_s = 1000.0
    link.tell([commit(1, round=2)], [])
    assert blocks_of(link) == [(1, 2)]
    assert link.generation == 0 and not team.lines


def test_workers_are_shared_out(team, clock):
    """More verifying workers than drafting ones share one; fewer have several each."""
    first, second = team.workers
    assert [share(team.workers, k, 2) for k in (0, 1)] == [[first], [second]]
    assert [share(team.workers, k, 3) for k in range(3)] == [[first], [second], [first]]
    assert share(team.workers, 0, 1) == [first, second]


def test_links_keep_no_weights(team):
    """A drafting worker keeps what it was told last; the policy's weights are not among it."""

    class Weights:
        pass

    weights = Weights()
    spec = SimpleNamespace(params=weights, key=jax.random.key(0), sampling=SamplingConfig())
    runner = SimpleNamespace(number=1)
    drafter = team.drafter_for(SimpleNamespace(spec=spec, runner=runner))
    gone = weakref.ref(weights)
    del weights, spec
    gc.collect()
    assert gone() is None
    del drafter  # it was there until now


def test_steps_and_seconds_are_counted(team, clock):
    def takes_time():
        clock.now_s += 3.0

    link = link_to(team.workers[0], Made(takes_time), look=team._threads.look)
    link.tell([commit(1)], [])
    blocks_of(link)
    wait_until(lambda: team.workers[0].steps == 1)
    clock.now_s = 6.0
    metrics = team.metrics()
    assert (metrics["drafting/steps"], metrics["drafting/busy_fraction"]) == (1.0, 0.25)
    assert metrics["drafting/by_model"] == 1.0
    assert team.parts(7) == [
        WorkerPart("drafting 0", "device 0", 7, ((0.0, 3.0),)),
        WorkerPart("drafting 1", "device 1", 7, ()),
    ]
    assert team.parts(8)[0].busy_s == (), "once"
    clock.now_s = 7.0
    metrics = team.metrics()
    assert (metrics["drafting/steps"], metrics["drafting/busy_fraction"]) == (0.0, 0.0)
