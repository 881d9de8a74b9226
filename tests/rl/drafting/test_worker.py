"""A drafting worker and the links that call it: whose blocks, and what a failure costs."""

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_ahead import commit

from reprise.rl.cluster.actors import ActorDied
from reprise.rl.drafting.config import DraftingConfig
from reprise.rl.drafting.plans import Planner
from reprise.rl.drafting.worker import (
    LATE_S,
    MAX_RESTARTS,
    MAX_ROLLOUTS,
    DraftingLink,
    DraftingWorker,
    Peer,
    Rollout,
)
from reprise.rl.drafting.workers import DraftingWorkers, share
from reprise.rl.records.worker_record import WorkerPart
from reprise.rl.speculation.config import DraftModelConfig
from reprise.rl.speculation.device_drafters import DraftModel
from reprise.spec.budget.config import MODEL
from reprise.spec.config import SamplingConfig
from reprise.spec.decoupled.messages import Block

LIMIT_S = 30.0  # of a wait for a thread
NONE = np.zeros(0, np.int32)
UNUSED = DraftModel(None, None, DraftModelConfig())  # nothing is drafted with it
A, B, *OTHERS = (Rollout(MODEL, (n, 0), SamplingConfig()) for n in range(2 + MAX_ROLLOUTS))


class FakeEngine:
    """An engine for workers that compute nothing."""

    number, where, is_left = 0, "a device", False

    def mesh_context(self):
        return contextlib.nullcontext()

    def abandoned(self):
        engine = FakeEngine()
        engine.is_left = True
        return engine


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


class Echo:
    """Drafts one block for each commit; `goes_on` steps draft for nobody's commit."""

    def __init__(self, before_step, goes_on=0):
        self.commits, self.closed, self.wanted = [], [], []
        self.before_step, self.goes_on = before_step, goes_on

    def update(self, commits, closed):
        self.commits += commits
        self.closed += closed
        self.wanted += commits

    def step(self):
        wanted, self.wanted = self.wanted, []
        if wanted:
            self.before_step()
        elif self.commits and self.goes_on:
            self.goes_on, wanted = self.goes_on - 1, self.commits[-1:]
        return [Block(c.request_id, c.round, c.total_tokens, *3 * [NONE]) for c in wanted]


class EchoWorker(DraftingWorker):
    """A drafting worker of `Echo`, kept in `made`."""

    def __init__(self, before_step=lambda: None, *, clock=None, goes_on=0, engine=None):
        config = DraftingConfig(workers=1, ahead="free_running")
        super().__init__(engine or FakeEngine(), [UNUSED], config, 3, clock or Clock())
        self.made, self.before_step, self.goes_on = [], before_step, goes_on

    def make_ahead(self, rollout):
        self.made.append(Echo(lambda: self.before_step(), self.goes_on))
        return self.made[-1]


class Gate:
    """Holds a step until it is opened."""

    def __init__(self):
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self):
        self.is_reached.set()
        assert self.is_open.wait(LIMIT_S)


def numbers(blocks):
    return [(b.request_id, b.round) for b in blocks]


def drafted(worker, link, *commits, rollout=A, closed=()):
    return numbers(worker.draft(rollout, link, commits, closed).blocks)


def fails():
    raise RuntimeError("a device is gone")


# --- the worker -------------------------------------------------------------------------


def test_each_link_receives_the_blocks_of_its_requests():
    worker = EchoWorker()
    assert drafted(worker, "x", commit([1], request=1), commit([1], request=2)) == [(1, 1), (2, 1)]
    assert drafted(worker, "y", commit([1], request=3)) == [(3, 1)]
    assert drafted(worker, "z", commit([1], request=1), rollout=B) == [(1, 1)]
    first, other = worker.made  # one for each rollout
    assert len(first.commits) == 3 and len(other.commits) == 1
    # a request has moved: its blocks follow it, and its last worker closes it too late
    assert drafted(worker, "y", commit([2], request=1, round=2)) == [(1, 2)]
    assert first.closed == [1], "what the other one said of it is forgotten"
    assert drafted(worker, "x", closed=[1, 2, 9]) == [] and first.closed == [1, 2]
    first.wanted = [commit([3], request=1, round=3), commit([3], request=2, round=3)]
    assert drafted(worker, "y") == [(1, 3)], "nothing is sent for a closed request"


def test_calls_that_wait_share_a_step():
    gate, answers = Gate(), {}
    worker = EchoWorker(gate)

    def call(link, request):
        answers[link] = drafted(worker, link, commit([1], request=request))

    threads = [
        threading.Thread(target=call, args=given) for given in (("x", 1), ("y", 2), ("z", 3))
    ]
    threads[0].start()
    assert gate.is_reached.wait(LIMIT_S)
    for thread in threads[1:]:
        thread.start()
    while len(worker._calls) < 2:
        threading.Event().wait(0.001)
    gate.is_open.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == {"x": [(1, 1)], "y": [(2, 1)], "z": [(3, 1)]} and worker.num_steps == 2


def test_old_rollouts_are_forgotten_and_none_begins_without_a_commit():
    worker = EchoWorker()
    drafted(worker, "x", rollout=B, closed=[1])
    assert not worker.made
    for rollout in (A, *OTHERS):
        drafted(worker, "x", commit([1]), rollout=rollout)
    assert len(worker.made) == 1 + MAX_ROLLOUTS
    drafted(worker, "x", commit([2], round=2), rollout=OTHERS[0])
    assert len(worker.made) == 1 + MAX_ROLLOUTS, "the last ones are there"
    drafted(worker, "x", commit([2], round=2))
    assert len(worker.made) == 2 + MAX_ROLLOUTS, "the first one is not"


def test_a_failed_step_forgets_all_requests():
    worker = EchoWorker()
    start = worker.draft(A, "x", [commit([1])], ()).start
    worker.before_step = fails
    with pytest.raises(RuntimeError, match="a device is gone"):
        drafted(worker, "x", commit([2], round=2))
    worker.before_step = lambda: None
    answer = worker.draft(A, "x", [commit([1, 2], round=3)], ())
    assert answer.start != start and numbers(answer.blocks) == [(0, 3)] and len(worker.made) == 2


def test_a_closed_worker_drafts_no_more():
    worker = EchoWorker()
    worker.close()
    assert drafted(worker, "x", commit([1])) == [] and not worker.made


# --- links ------------------------------------------------------------------------------


class Linked:
    """A worker, a peer and a link to it."""

    def __init__(self, worker, **options):
        self.clock, self.lines, self.worker = Clock(), [], worker
        name, report = "drafting worker 0", self.lines.append
        self.peer = Peer(name, worker.draft, report, clock=self.clock, hang_limit_s=10.0, **options)
        self.link = DraftingLink(self.peer, A)

    def send(self, *commits, closed=()):
        """Send, and return the blocks that have come once the link is idle."""
        self.link.send(commits, closed)
        return self.settled()

    def settled(self):
        until_s = time.monotonic() + LIMIT_S
        while self.link._call is not None:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        return numbers(self.link.take())


def test_a_link_calls_until_no_block_comes():
    linked = Linked(EchoWorker(goes_on=2))
    assert linked.send(commit([1])) == [(0, 1)] * 3
    assert linked.worker.num_steps == 3 and linked.link.generation == 0
    assert linked.send() == []


def test_a_slow_worker_has_no_backlog():
    """What comes during a call is one commit of each request, and none of those that have left."""
    gate = Gate()
    linked = Linked(EchoWorker(gate))
    linked.link.send([commit([1]), commit([7], request=2)], ())
    assert gate.is_reached.wait(LIMIT_S)
    for n in range(2, 100):
        linked.link.send([commit([n], first=n - 1, round=n), commit([n], request=3)], ())
    linked.link.send((), [2, 3])
    gate.is_open.set()
    assert linked.settled() == [(0, 1), (2, 1), (0, 99)]
    (echo,) = linked.worker.made
    *_, last = echo.commits
    assert (len(echo.commits), last.first, last.round) == (3, 1, 99) and echo.closed == [2]
    assert last.tokens.tolist() == list(range(2, 100))


def test_a_commit_that_does_not_follow_replaces_the_one_before():
    gate = Gate()
    linked = Linked(EchoWorker(gate))
    linked.link.send([commit([1])], ())
    assert gate.is_reached.wait(LIMIT_S)
    linked.link.send([commit([2], first=1, round=2)], ())
    linked.link.send([commit([1, 2, 3], round=3)], ())  # all of it, as after a failure
    gate.is_open.set()
    linked.settled()
    assert linked.worker.made[0].commits[-1].tokens.tolist() == [1, 2, 3]


def test_a_round_waits_for_a_call_alone_and_not_for_a_late_one():
    gate = Gate()
    linked = Linked(EchoWorker(gate))
    linked.link.wait(LIMIT_S)  # nothing is under way
    linked.link.send([commit([1])], ())
    assert gate.is_reached.wait(LIMIT_S)
    linked.clock.now_s = LATE_S + 1
    linked.link.wait(LIMIT_S)
    gate.is_open.set()
    assert linked.settled() == [(0, 1)]


@pytest.mark.fault
def test_after_a_failure_all_is_sent_anew():
    linked = Linked(EchoWorker(fails))
    assert linked.send(commit([1])) == [] and linked.link.generation == 1
    assert linked.lines == [
        "warning: drafting worker 0 failed: RuntimeError: a device is gone; it starts again"
    ]
    linked.worker.before_step = lambda: None
    assert linked.send(commit([1, 2], round=2)) == [(0, 2)]
    assert linked.peer.failures == 0 and len(linked.lines) == linked.link.generation == 1


@pytest.mark.fault
def test_another_link_notices_that_the_worker_has_forgotten_its_requests():
    linked = Linked(EchoWorker())
    linked.send(commit([1]))
    linked.worker._forget()
    linked.send(commit([2], first=1, round=2))
    assert linked.link.generation == 1 and not linked.lines


@pytest.mark.fault
def test_a_worker_that_fails_in_a_row_is_given_up():
    linked = Linked(EchoWorker(fails))
    for n in range(MAX_RESTARTS + 1):
        assert linked.link.generation == n
        linked.send(commit([1], round=n + 1))
    assert [line.rpartition("; ")[2] for line in linked.lines] == [
        *["it starts again"] * MAX_RESTARTS,
        "verifying workers go on without it",
    ]
    assert linked.peer.draft is None and linked.send(commit([1])) == []
    DraftingLink(linked.peer, B).send([commit([1])], ())
    assert len(linked.worker.made) == len(linked.lines), "it is called no more"


@pytest.mark.fault
def test_a_program_that_has_ended_is_called_no_more():
    def ends():
        raise ActorDied("killed")

    linked = Linked(EchoWorker(ends))
    linked.send(commit([1]))
    assert linked.peer.draft is None and linked.lines == [
        "warning: drafting worker 0 failed: ActorDied: killed; verifying workers go on without it"
    ]


@pytest.mark.fault
@pytest.mark.parametrize("fails_late", [True, False])
def test_one_that_hangs_is_replaced_and_its_late_answer_is_dropped(fails_late):
    gate = Gate()

    def hang():
        gate()
        if fails_late:
            raise RuntimeError("late")

    other = EchoWorker()
    linked = Linked(EchoWorker(hang), replace=lambda: other.draft)
    linked.link.send([commit([1])], ())
    assert gate.is_reached.wait(LIMIT_S)
    [hung] = [t for t in threading.enumerate() if t.name == "drafting"]
    linked.clock.now_s = 9.9
    linked.link.send([commit([2], first=1)], ())
    assert not linked.lines, "it may take as long"
    linked.clock.now_s = 12.5
    linked.send()
    assert linked.lines == [
        "warning: drafting worker 0 failed: TimeoutError: no answer for 12.5 s; it starts again"
    ]
    assert linked.link.generation == 1
    assert linked.send(commit([1, 2], round=3)) == [(0, 3)]
    gate.is_open.set()
    hung.join(LIMIT_S)
    assert linked.link.take() == [] and len(linked.lines) == 1 and linked.link.generation == 1


# --- the workers of a run ---------------------------------------------------------------


@pytest.fixture
def team():
    """Two drafting workers, for verifying workers 0 and 1."""
    clock = Clock()
    planner = Planner(DraftingConfig(workers=2), 4, 8, 3)
    team = DraftingWorkers({MODEL: UNUSED}, planner, 16, report=print, clock=clock)
    team._worker = lambda engine: EchoWorker(clock=clock, engine=engine)
    team._verifying, team.clock = [0, 1], clock
    team.start([FakeEngine(), FakeEngine()])
    with team:
        yield team
    assert all(worker._is_closed for worker in team.workers)


def test_workers_are_shared_out():
    """More verifying workers than drafting ones share one; fewer have several each."""
    assert [share("ab", k, 2) for k in (0, 1)] == ["a", "b"]
    assert [*map(list, (share("ab", k, 3) for k in range(3)))] == [["a"], ["b"], ["a"]]
    assert share("ab", 0, 1) == "ab"


def drafter(team, params=None):
    spec = SimpleNamespace(params=params, key=jax.random.key(0), sampling=SamplingConfig())
    return team.drafter_for(SimpleNamespace(spec=spec, runner=SimpleNamespace(number=1)))


def test_drafters_keep_no_weights(team):
    class Weights:
        pass

    weights = Weights()
    made, gone = drafter(team, weights), weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None and made._links[0]._rollout.method == MODEL


@pytest.mark.fault
def test_the_engine_of_a_hung_worker_is_left_to_it(team):
    hung = team.workers[1]
    hung.num_steps = 7
    assert team.peers[1]._replace() == (new := team.workers[1]).draft
    assert new is not hung and new.engine.is_left
    assert (new.num_steps, team.workers[0].engine.is_left) == (7, False)


def test_steps_and_seconds_are_counted(team):
    def takes_time():
        team.clock.now_s += 3.0

    team.workers[0].before_step = takes_time
    drafted(team.workers[0], "x", commit([1]))
    team.clock.now_s = 6.0
    metrics = team.metrics()
    assert (metrics["drafting/steps"], metrics["drafting/busy_fraction"]) == (1.0, 0.25)
    assert metrics["drafting/by_model"] == 1.0
    assert team.parts(7) == [
        WorkerPart("drafting 0", "a device", 7, ((0.0, 3.0),)),
        WorkerPart("drafting 1", "a device", 7, ()),
    ]
    assert team.parts(8)[0].busy_s == (), "once"
    team.clock.now_s = 7.0
    assert team.metrics()["drafting/busy_fraction"] == 0.0
