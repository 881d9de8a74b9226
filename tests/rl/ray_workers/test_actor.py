"""Workers in actors, whose programs are threads here: the same tokens, whatever is lost or late."""

import itertools
import sys
import threading
from contextlib import ExitStack

import jax
import pytest
from ray_workers_in_threads import TUNER, Store, make_team, settings_of
from thread_actors import ThreadRoom
from tiny_team import (
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    starts,
)
from tiny_team import play as play_team

from reprise.rl.cluster import ray_session
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, no_drafts
from reprise.rl.ray_workers.actor import WorkerActor
from reprise.rl.ray_workers.place import Shared
from reprise.rl.runtime.waits import ProgramLost
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.sources import Speculation, make_bandits
from reprise.rl.workers.messages import WorkerError
from reprise.sched.protocol import WorkerLost
from reprise.spec.drafter import Source
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group


def play(team, **options):
    return play_team(team, **{"drafts": no_drafts} | options)


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(ray_session, "fetch", found.fetch)
    return found


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "seer"])
def test_tokens_are_those_of_one_engine(store, alone, policy):
    team, _ = make_team(store, 2, policy=policy)
    for _ in range(2):  # a session follows another one
        assert_same_tokens(play(team), alone)
        assert team.stats.tokens == sum(len(t.response_ids) for t in alone.values())
    assert {r.num_slots for r in team.stats.timeline}
    emitted = sum(int(r.emitted_A.sum()) for r in team.stats.timeline)
    assert emitted == team.stats.tokens  # no round is lost on the way, or comes twice
    assert {a.worker_id for a in starts(team)} == {0, 1}


@pytest.mark.parity
def test_drafts_of_all_sources_change_no_token(store, alone):
    """Also if they are right: the history has the very responses."""
    config = SpeculationConfig(budget="fixed:3", sources=("history", "group", "own"))
    keys, cache = [f"q{g}" for g in range(len(PROMPTS))], RolloutCache(vocab_size=MODEL.vocab_size)
    for g, key in enumerate(keys):
        own = [t.response_ids for t in alone.values() if t.group_id == g]
        cache.replace(key, of_group(own, [1.0] * len(own)))
    with Speculation(config, cache, for_others=True) as speculation:
        team, _ = make_team(store, 2, speculation=config)
        drafts = speculation.drafter_factory(keys, PROMPTS, group_size=4)
        assert_same_tokens(play(team, drafts=drafts), alone)
    assert team.stats.accepted_tokens > 20


@pytest.mark.parity
def test_a_drafter_of_a_user_drafts_on_the_workers(store, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "drafts_on_ray.py").write_text(
        "from reprise.spec.drafter import Drafter, no_drafts\n"
        "class Mine(Drafter):\n"
        "    def propose(self, live, max_nodes_A, max_nodes):\n"
        "        drafts = no_drafts(len(live), max_nodes)\n"
        "        drafts.tokens_AN[:, 0], drafts.count_A[:] = 3, 1\n"
        "        return drafts\n"
    )
    monkeypatch.chdir(tmp_path)
    config = SpeculationConfig(budget="fixed:3", sources=("drafts_on_ray.py:Mine", "group"))
    with Speculation(config, RolloutCache(), for_others=True) as speculation:
        team, _ = make_team(store, 2, speculation=config)
        drafts = speculation.drafter_factory(["a"] * len(PROMPTS), PROMPTS, group_size=4)
        assert_same_tokens(play(team, drafts=drafts), alone)
    assert team.stats.drafted_by_source[Source.OTHER] > 0


@pytest.mark.fault
def test_a_worker_without_the_file_of_a_user_does_not_start(tmp_path):
    config = SpeculationConfig(budget="fixed:3", sources=(f"{tmp_path}/gone.py:Mine",))
    with pytest.raises(FileNotFoundError, match="Speculation.sources: there is no file .*gone.py"):
        WorkerActor(settings_of(0, config), None)


def rooms_that_lose(nth, how):
    """A room whose first program is lost in its nth step, and what is to have its actor."""
    actors, steps = [], itertools.count(1)

    def changed(index, handle):
        def submit(member, *args):
            if index == 0 and args[:1] == ("step",) and next(steps) == nth:
                handle.is_stopped = True
                if how == "killed":
                    threading.Thread(target=handle.kill).start()
                else:
                    for call in actors[0]._calls:
                        call.until_s = 0.0  # its time is up
            return type(handle).submit(handle, member, *args)

        handle.submit = submit

    return ThreadRoom(changed), actors


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize(("nth", "how"), [(1, "killed"), (2, "stopped"), (4, "killed")])
def test_a_lost_program_costs_no_token(store, alone, nth, how):
    """Its requests continue elsewhere from their last chunks, and another program joins."""
    room, actors = rooms_that_lose(nth, how)
    team, _ = make_team(store, 2, room=room)
    actors.append(team.places[0].actor)
    assert_same_tokens(play(team), alone)
    assert sum(isinstance(d.event, WorkerLost) for d in team.decisions) == 1
    assert [e.kind for e in team.stats.events if e.kind != "joined"] == [
        "killed" if how == "killed" else "hung"
    ]


@pytest.mark.fault
def test_a_program_that_is_lost_again_and_again_is_given_up(store, alone):
    def changed(index, handle):
        if index == 0:
            handle.kill()

    team, _ = make_team(store, 2, room=ThreadRoom(changed))
    assert_same_tokens(play(team), alone)
    assert not team.places[0].may_return


@pytest.mark.fault
def test_programs_that_get_no_weights_are_given_up(store, monkeypatch):
    """They are lost each time that they try, and started again."""
    team, room = make_team(store, 2)
    lost = [ProgramLost("the owner of the value is lost")]
    monkeypatch.setattr(ray_session, "fetch", lambda references, limit_s: lost * len(references))
    with pytest.raises(WorkerError, match="given up: it was lost 3 times"):
        play(team)
    assert [len(room.started[i]) for i in range(2)] == [3, 3]


@pytest.mark.fault
def test_an_error_of_an_engine_names_its_requests(store, alone, monkeypatch):
    def fail(self, *args):
        raise RuntimeError("a device is gone")

    team, _ = make_team(store, 2)
    with monkeypatch.context() as broken, pytest.raises(WorkerError, match="a device is gone"):
        broken.setattr(Engine, "_round", fail)
        play(team)
    assert_same_tokens(play(team), alone)  # the programs are still there


def test_a_worker_s_bandit_keeps_what_it_learns_while_its_program_runs(store):
    """A message has the state of when it was sent: it counts only where a program begins."""
    config = SpeculationConfig(budget="bandit", sources=("own",))
    shared = Shared(store.share, bandits=make_bandits(config, {}, TUNER, 0))
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, drafts=no_drafts)
    actor = WorkerActor(settings_of(0, config), None)
    learned = make_bandits(config, {}, TUNER, 0).of(0)
    learned.record(learned.select(1), 1.0, [2.0], 1)
    shared.tuned(0, learned.state())
    with ExitStack() as stack:
        message = shared.message(spec, 0, 0)
        actor._spec(message, stack)
        own = actor._bandits.of(0)
        assert own.state() == learned.state()
        own.record(own.select(1), 1.0, [3.0], 1)
        state = own.state()
        actor._spec(message, stack)  # a step that opens again
        assert own.state() == state != learned.state()


def test_weights_are_published_before_the_driver_sends_them(store):
    """Copies and checksums of large weights would keep its thread from all other workers."""
    threads, share = [], store.share

    def noting(value):
        threads.append(threading.current_thread().name)
        return share(value)

    store.share = noting
    team, _ = make_team(store, 1)
    with team.session(team.make_scheduler(), len(REQUESTS), 60) as driver:
        new = jax.tree.map(lambda x: x + 1, PARAMS)
        driver.submit(0, RolloutSpec(new, SAMPLING, KEY, STOP, drafts=no_drafts), REQUESTS)
        while driver.next_result(0.1) is None:
            pass
    assert len(threads) > 1 and "driver" not in threads
