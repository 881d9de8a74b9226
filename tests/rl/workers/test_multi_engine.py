"""Several workers under a scheduler: the same tokens as one engine's, whatever moves or dies."""

from __future__ import annotations

import dataclasses
import threading

import jax
import numpy as np
import pytest
from replay import RecordedTeam, replay
from tiny_team import (
    CONFIG,
    MODEL,
    assert_same_tokens,
    play,
    starts,
    workers,
)

from rl.engine.engine import Engine
from rl.workers.config import SchedConfig
from rl.workers.messages import WorkerError
from rl.workers.multi_engine import make_engines
from sched.policies.divided import make_scheduler
from sched.protocol import ChunkDone, Finished
from sched.request import Kv


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


def test_a_full_pool_has_keys_and_values_recomputed(engines, alone):
    team = workers(engines, 2, chunk=2, kv_tokens=30, pool_bytes=0)
    assert_same_tokens(play(team), alone)
    assert sum(a.kv is Kv.POOL for a in starts(team)) > 3


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


class Unreadable(Engine):
    """Raises when the first request is to leave it, once: its chunk's end is known by then."""

    failed = False

    def read_kv(self, cache, rows, num_tokens):
        if not self.failed:
            self.failed = True
            raise RuntimeError("a device is gone")
        return super().read_kv(cache, rows, num_tokens)


@pytest.mark.fault
def test_a_worker_that_dies_between_a_report_and_its_copy_loses_nothing(engines, alone):
    """What it reported and did not hand over is generated again, by whoever was told to go on."""
    unreadable = Unreadable(MODEL, CONFIG)
    team = workers(
        [unreadable, engines[0], engines[1]], 3, chunk=2, kv_tokens=40, on_error="restart"
    )
    assert_same_tokens(play(team), alone)
    assert unreadable.failed
    assert {a.worker_id for a in starts(team)} >= {0, 1, 2, 3}


@pytest.mark.fault
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
def test_a_worker_that_raises_is_replaced_where_it_may_be(engines, alone, policy):
    team = workers([Failing(MODEL, CONFIG), engines[0]], 2, policy, on_error="restart")
    assert_same_tokens(play(team), alone)
    assert {a.worker_id for a in starts(team)} >= {0, 1, 2}


HANG_LIMIT_S = 1.5  # a round of these engines takes milliseconds


def hanging(method, never):
    """An engine that does not come back from the third call of a method, once."""

    class Hanging(Engine):
        calls = 0

        def hang(self, *args, **options):
            Hanging.calls += 1
            if Hanging.calls == 3:
                never.wait(60)
            return getattr(Engine, method)(self, *args, **options)

    setattr(Hanging, method, Hanging.hang)
    return Hanging(MODEL, CONFIG)


def team_with(first, engines, on_error):
    config = SchedConfig(
        policy="divided_fifo", workers=2, chunk_tokens=2, kv_tokens=40, on_error=on_error
    )
    return RecordedTeam([first, engines[0]], config, hang_limit_s=HANG_LIMIT_S)


@pytest.mark.fault
def test_a_worker_that_hangs_is_named_and_ends_the_rollout(engines):
    never = threading.Event()
    team = team_with(hanging("insert_kv", never), engines, "stop")
    with pytest.raises(WorkerError, match=r"worker 0 failed on .*Hang: no sign of life for 1\."):
        play(team)
    never.set()


@pytest.mark.fault
@pytest.mark.parametrize("method", ["_round", "read_kv"])
def test_a_worker_that_hangs_is_replaced_where_it_may_be(engines, alone, method):
    """What it says once it comes back is not listened to, and nobody else is at its engine."""
    never = threading.Event()
    hung = hanging(method, never)
    team = team_with(hung, engines, "restart")
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


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.skipif(jax.device_count() != 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(("count", "size"), [(4, 2), (8, 1)])
def test_workers_on_eight_devices(alone, count, size):
    config = SchedConfig(workers=count, devices_per_worker=size, chunk_tokens=3, kv_tokens=60)
    engines = make_engines(MODEL, CONFIG, config, dtype=np.float32)
    devices = [e.mesh.devices.flat if size > 1 else [e.device or jax.devices()[0]] for e in engines]
    assert len({d for mine in devices for d in mine}) == 8
    team = RecordedTeam(engines, config)
    assert_same_tokens(play(team), alone)
    found = replay(make_scheduler("seer", seed=0, chunk_tokens=3), team.decisions)
    assert [(d.event, d.actions) for d in found] == [(d.event, d.actions) for d in team.decisions]


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


def test_more_devices_than_there_are_is_refused():
    config = SchedConfig(workers=5, devices_per_worker=2)
    with pytest.raises(ValueError, match="expected 10 devices for .* got 8; mend: fewer"):
        make_engines(MODEL, CONFIG, config, dtype=np.float32)


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
