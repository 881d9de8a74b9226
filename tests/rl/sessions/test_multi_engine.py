"""Several workers under a scheduler: the same tokens as one engine's, whatever moves or dies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading

import pytest
from replay import replay
from tiny_team import (
    CONFIG,
    MODEL,
    assert_same_tokens,
    play,
    starts,
    workers,
)

from reprise.rl.engine.engine import Engine
from reprise.rl.sessions import multi_engine
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.messages import WorkerError
from reprise.rl.workers.pool import ThreadPlace
from reprise.sched.policies.divided import make_scheduler
from reprise.sched.protocol import ChunkDone, Finished
from reprise.sched.request import Kv


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
@pytest.mark.parametrize(("count", "chunk"), [(1, 3), (2, 1), (3, 5)])
def test_tokens_are_those_of_one_engine(engines, alone, policy, count, chunk):
    team = workers(engines, count, policy, chunk)
    assert_same_tokens(play(team), alone)
    assert team.stats.tokens == sum(len(t.response_ids) for t in alone.values())
    assert {a.worker_id for a in starts(team)} == set(range(count))
    chunks = sum(isinstance(d.event, ChunkDone) for d in team.decisions)
    assert (chunks > 0) == (policy != "group_fifo")


@pytest.mark.parity
def test_chunks_that_move_come_from_the_pool(engines, alone):
    team = workers(engines, 3, chunk=2, kv_tokens=40)
    assert_same_tokens(play(team), alone)
    later = [a for a in starts(team) if a.chunk > 1]
    assert {a.kv for a in later} <= {Kv.POOL, Kv.HELD}
    assert sum(a.kv is Kv.POOL for a in later) > 3
    ran_on: dict[int, set[int]] = {}
    for a in starts(team):
        ran_on.setdefault(a.request_id, set()).add(a.worker_id)
    assert max(map(len, ran_on.values())) > 1, "a request must move"
    assert team.stats.pool.moved_bytes > 0 == team.stats.pool.dropped_bytes


def test_a_full_pool_has_keys_and_values_recomputed(engines, alone):
    team = workers(engines, 2, chunk=2, kv_tokens=30, pool_bytes=0)
    assert_same_tokens(play(team), alone)
    assert sum(a.kv is Kv.POOL for a in starts(team)) > 3
    assert team.stats.pool.moved_bytes == team.stats.pool.dropped_bytes > 0
    assert team.stats.pool.dropped_tokens > 3


@pytest.mark.parity
@pytest.mark.parametrize("rounds", [1, 2])
def test_preempted_requests_resume_with_the_same_tokens(engines, alone, rounds):
    """`group_fifo` promises no room: rows are given up as others grow, and computed anew."""
    config = dataclasses.replace(CONFIG, rounds_per_fetch=rounds)
    held = []

    class Watched(Engine):
        def _round(self, *args):
            table = self._table
            super()._round(*args)
            held.append(int(table.total_tokens_B[table.busy_B].sum()))

    team = workers([Watched(MODEL, config), engines[0]], 2, "group_fifo", kv_tokens=40)
    assert_same_tokens(play(team), alone)
    assert team.stats.preemptions > 2
    assert 20 < max(held) <= 40


def test_a_budget_that_holds_no_request_is_refused(engines):
    with pytest.raises(ValueError, match="come to 21 positions.* holds Sched.kv_tokens=20: raise"):
        play(workers(engines, 2, kv_tokens=20))


@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
def test_the_simulator_decides_as_the_workers_did_given_their_durations(engines, policy):
    team = workers(engines, 3, policy, kv_tokens=40)
    done = play(team)

    def scheduler():
        return make_scheduler(policy, seed=0, chunk_tokens=3)

    assert policy == "group_fifo" or team.stats.preemptions == 0, "chunks are reserved"
    found = replay(scheduler(), team.decisions)
    assert [(d.event, d.actions) for d in found] == [(d.event, d.actions) for d in team.decisions]
    finished = [d.event.request_id for d in found if isinstance(d.event, Finished)]
    assert sorted(finished) == sorted(t.request_id for t in done)
    # a start that takes longer is reported later: the comparison can fail
    late = list(team.decisions)
    first = next(i for i, d in enumerate(late) if isinstance(d.event, Finished | ChunkDone))
    late[first] = late[first]._replace(now_s=late[first].now_s + 10)
    try:
        later = [d.event for d in replay(scheduler(), late)]
    except KeyError:  # a start that the workers did not make
        later = []
    assert later != [d.event for d in found]


class Failing(Engine):
    """Raises in its third round, once."""

    rounds = 0

    def _round(self, *args):
        self.rounds += 1
        if self.rounds == 3:
            raise RuntimeError("a device is gone")
        super()._round(*args)


@pytest.mark.fault
def test_a_worker_that_raises_stops_the_rollout_and_names_its_requests(engines):
    team = workers([Failing(MODEL, CONFIG), engines[0]], 2)
    with pytest.raises(WorkerError, match=r"worker 0 failed on requests .*\d.*a device is gone"):
        play(team)


@pytest.mark.fault
def test_a_worker_that_raises_is_replaced_where_it_may_be(engines, alone):
    """Of other policies, at other moments: test_driver.py."""
    team = workers([Failing(MODEL, CONFIG), engines[0]], 2, "seer", on_error="restart")
    assert_same_tokens(play(team), alone)
    assert {a.worker_id for a in starts(team)} >= {0, 1, 2}


def hanging(method, never):
    """An engine whose third call of a method, or of its memory, hangs once."""
    engine, calls = Engine(MODEL, CONFIG), itertools.count(1)
    owner = engine if hasattr(engine, method) else engine._rows.memory
    run = getattr(owner, method)

    def hang(*args):
        if next(calls) == 3:
            engine.is_hung = True
            never.wait(60)
        return run(*args)

    setattr(owner, method, hang)
    return engine


class Impatient(ThreadPlace):
    """Gives up an engine as soon as it hangs, and no other one, however slow it is."""

    @property
    def hang_limit_s(self):
        return -1.0 if getattr(self.engine, "is_hung", False) else math.inf

    @hang_limit_s.setter
    def hang_limit_s(self, seconds): ...


@pytest.fixture
def never(monkeypatch):
    monkeypatch.setattr(multi_engine, "ThreadPlace", Impatient)
    yield (event := threading.Event())
    event.set()


@pytest.mark.fault
def test_a_worker_that_hangs_is_named_and_ends_the_rollout(engines, never):
    team = workers([hanging("insert", never), engines[0]], 2, chunk=2, kv_tokens=40)
    with pytest.raises(WorkerError, match=r"worker 0 failed on .*Hang: no sign of life for \d"):
        play(team)


@pytest.mark.fault
@pytest.mark.parametrize("method", ["_round", "read"])
def test_a_worker_that_hangs_is_replaced_where_it_may_be(engines, alone, method, never):
    """What it says once it comes back is not listened to, and nobody else is at its engine."""
    hung = hanging(method, never)
    team = workers([hung, engines[0]], 2, chunk=2, kv_tokens=40, on_error="restart")
    assert_same_tokens(play(team), alone)
    assert {a.worker_id for a in starts(team)} == {0, 1, 2}
    assert team.engines[0] is not hung
    never.set()
    assert_same_tokens(play(team), alone)


def test_an_aborted_rollout_leaves_the_engines_usable(engines, alone):
    class Stop(Exception):
        pass

    def stop(finished, tokens):
        raise Stop

    team = workers(engines, 2)
    with pytest.raises(Stop):
        play(team, on_round=stop)
    seen = []
    assert_same_tokens(play(team, on_finish=seen.append), alone)
    assert sorted(t.request_id for t in seen) == sorted(alone)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_error": "ignore"}, "expected on_error of stop, restart, got 'ignore'"),
        ({"policy": "lifo"}, "expected policy of group_fifo"),
        ({"policy": "oracle"}, "got 'oracle'"),
        ({"workers": 0}, "expected at least one worker, device"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedConfig(**settings)


def test_idle_workers_train_only_in_rollouts_that_are_learnt_from(engines, alone):
    """An evaluation leaves the drafter as it is: it has no sink."""
    asked = []

    class Spot:
        def __getattr__(self, name):
            return lambda *args, **options: asked.append(name)

    class Sink:
        def wants(self, request_id, num_tokens):
            return False

    team = workers(engines, 2)
    team.spot = Spot()
    assert_same_tokens(play(team), alone)
    assert asked == []
    assert_same_tokens(play(team, sink=Sink()), alone)
    assert {"rollout_began", "joined", "rollout_ended"} <= set(asked)
