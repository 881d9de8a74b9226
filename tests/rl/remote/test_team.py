"""Workers in other programs: the tokens of one engine, whatever is killed, hangs or comes late."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
import rollouts
from remote_faults import Killing, Lying, other_report, wait_until
from remote_workers import IDENTITY, Programs, hello, make_team
from tiny_team import (
    CONFIG,
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    play,
    starts,
)

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec, draft_with, no_drafts
from rl.remote import messages
from rl.remote.messages import CODEC
from rl.remote.run_messages import Answered, ChunkEnded, Parked
from rl.remote.team import Mismatch
from rl.runtime.waits import ProgramLost
from rl.speculation.config import SpeculationConfig
from rl.speculation.sources import Speculation
from rl.workers.messages import WorkerError
from sched.policies.steps import StepOrder
from sched.protocol import ChunkDone, WorkerJoined, WorkerLost
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache


@pytest.fixture(scope="module")
def alone():
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    return {t.request_id: t for t in done}


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "seer"])
def test_tokens_are_those_of_one_engine(alone, policy):
    multi, team = make_team(Programs(), 3, policy=policy, kv_tokens=40)
    with team:
        team.start()
        for _ in range(2):
            assert_same_tokens(play(multi, drafts=no_drafts), alone)
    assert team.losses == []
    assert multi.stats.tokens == sum(t.num_tokens for t in alone.values())
    assert sum(r.emitted_A.sum() for r in multi.stats.timeline) == multi.stats.tokens
    moved = [a for a in starts(multi) if a.chunk > 1]
    assert bool(moved) == (policy == "seer")


@pytest.mark.parity
def test_drafts_of_all_sources_change_no_token(alone):
    """Also where they are right: the history has the very responses, and siblings are heard."""
    config = SpeculationConfig(budget="fixed:3", sources=("history", "group", "own"))
    cache, keys = RolloutCache(), [f"q{g}" for g in range(len(PROMPTS))]
    for g, key in enumerate(keys):
        own = [t for t in alone.values() if t.group_id == g]
        responses = tuple(CachedResponse(t.sample_index, t.response_ids, 1.0) for t in own)
        cache.replace(key, CachedGroup(np.asarray(PROMPTS[g], np.int32), responses))
    programs = Programs()
    multi, team = make_team(programs, 2, speculation=config)
    with Speculation(config, cache) as speculation, team:
        speculation.for_others = True
        team.start()
        drafts = speculation.drafter_factory(keys, PROMPTS, group_size=4)
        assert_same_tokens(play(multi, drafts=drafts), alone)
    assert multi.stats.accepted_tokens > 20
    assert speculation.history_metrics()["spec/history_index_tokens"] > 0


@pytest.mark.fault
@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "nth", "how"),
    [
        (messages.Begin, 1, "kill"),
        (messages.Give, 1, "kill"),
        (messages.Poll, 2, "kill"),
        (messages.Give, 3, "kill"),
        (messages.Give, 6, "kill"),
        (messages.Poll, 3, "stop"),
    ],
)
def test_a_lost_program_costs_no_token(alone, kind, nth, how):
    """Its requests go on elsewhere from their last chunks, and another program takes its seat."""
    killing, said = Killing(kind, nth, how), []
    multi, team = make_team(
        Programs(changed=killing), 2, deadline_s=1.0, said=said, chunk_tokens=2, kv_tokens=40
    )
    with team:
        team.start()
        assert_same_tokens(play(multi, drafts=no_drafts), alone)
        (victim,) = killing.victims
        assert victim.ended == 1
        lost = [d.event for d in multi.decisions if isinstance(d.event, WorkerLost)]
        assert len(lost) == 1
        wait_until(lambda: all(e.is_ready for e in multi.engines))
        assert_same_tokens(play(multi, drafts=no_drafts), alone)
    (line,) = said
    assert "started again" in line and ("no answer" in line if how == "stop" else "killed" in line)


@pytest.mark.fault
@pytest.mark.parity
def test_all_programs_may_be_lost_at_once_and_one_may_come_late(alone):
    programs, killing = Programs(), Killing(messages.Give, 2, numbers=(0, 1))
    programs._changed = killing
    multi, team = make_team(programs, 2, deadline_s=5.0)
    with team:
        team.start()
        programs.hold[1] = threading.Event()  # the second one stays away

        def release(finished, tokens):
            if finished >= 4:
                programs.hold[1].set()

        assert_same_tokens(play(multi, drafts=no_drafts, on_round=release), alone)
    assert len(killing.victims) == 2
    joined = [d.event.worker_id for d in multi.decisions if isinstance(d.event, WorkerJoined)]
    assert joined[:3] == [0, 1, 2]


@pytest.mark.parity
def test_a_further_worker_joins_in_mid_rollout(alone):
    multi, team = make_team(Programs(), 2, chunk_tokens=1, kv_tokens=40)
    with team:
        team.start()
        late = multi.engines.pop()
        late_joins = iter([late])

        def join(finished, tokens):
            if finished >= 2:
                multi.engines.extend(late_joins)

        assert_same_tokens(play(multi, drafts=no_drafts, on_round=join), alone)
    assert {a.worker_id for a in starts(multi)} == {0, 1}


@pytest.mark.parity
def test_steps_follow_one_another_in_a_pipeline(alone):
    """A worker that has ended a step waits for the next one, for as long as it takes."""
    multi, team = make_team(Programs(), 2)
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, 7)
    scheduler = StepOrder(multi.make_scheduler(), "one_step_off")
    with team:
        team.start()
        with multi.session(scheduler, len(REQUESTS), 21) as group:
            for step in range(3):
                ids = {1000 * step + r.request_id: r for r in REQUESTS}
                renamed = [dataclasses.replace(r, request_id=i) for i, r in ids.items()]
                group.submit(step, spec, renamed)
                found = []
                while len(found) < len(REQUESTS):
                    if (result := group.next_result(0.05)) is not None:
                        found.append(result)
                assert {t.request_id for t in found} == set(ids)
                if not step:  # later ones have noise of their own
                    assert_same_tokens(sorted(found, key=place), alone)
                time.sleep(1.2)  # longer than a worker waits at a time
                group.trained(step)
    assert team.losses == []


def test_weights_come_as_what_has_changed_and_whole_where_that_does_not_do(alone):
    sent = []

    def noted(channel):
        channel._heard = lambda message: sent.append(message)

    programs = Programs(changed=noted)
    multi, team = make_team(programs, 1)
    changed = [x.copy() for x in jax.tree.leaves(PARAMS)]
    max(changed, key=np.size).flat[::7] *= np.float32(1.25)
    params = jax.tree.unflatten(jax.tree.structure(PARAMS), changed)
    own = rollouts.run(Engine(MODEL, CONFIG), params, REQUESTS, SAMPLING, KEY, STOP)
    assert any(t.response_ids.tolist() != alone[t.request_id].response_ids.tolist() for t in own)

    def offered():
        found = [m for m in map(CODEC.decode, sent) if isinstance(m, messages.Offered)]
        sent.clear()
        return [sum(x.nbytes for p in m.payloads.values() for x in p) for m in found]

    def answers(given):
        done = rollouts.run(
            multi, given, REQUESTS, SAMPLING, KEY, STOP, policy_version=7, drafts=no_drafts
        )
        return {t.request_id: t.response_ids.tolist() for t in done}

    wanted = {t.request_id: t.response_ids.tolist() for t in own}
    with team:
        team.start()
        assert answers(PARAMS) == {i: t.response_ids.tolist() for i, t in alone.items()}
        (whole,) = offered()
        assert answers(params) == wanted
        (delta,) = offered()
        assert 0 < delta < whole / 4
        (program,) = [channel.program for channel in programs.channels[0]]
        program._subscriber._in_use = None  # the base is lost: deltas do not apply
        back = jax.tree.map(np.copy, PARAMS)
        assert answers(back) == {i: t.response_ids.tolist() for i, t in alone.items()}
        deltas_and_whole = offered()
        assert deltas_and_whole[-1] == whole and len(deltas_and_whole) == 2
        # a version that is not the newest any more, and is not there, is sent as it is
        newer = jax.tree.map(np.copy, params)
        multi.engines[0]._jobs.weights.publish(newer)
        multi.engines[0]._versions.clear()
        program._weights.clear()
        program._placed = None
        assert answers(back) == {i: t.response_ids.tolist() for i, t in alone.items()}
        assert any(isinstance(CODEC.decode(m), messages.Weights) for m in sent)
        assert answers(newer) == wanted
    assert team.losses == []


def place(trajectory):
    return [r.request_id for r in REQUESTS].index(trajectory.request_id)


@pytest.mark.fault
def test_a_program_that_never_does_a_round_is_given_up(alone):
    said = []
    multi, team = make_team(
        Programs(changed=Killing(messages.Begin, 1, numbers=range(100))), 1, said=said
    )
    with team:
        team.start()
        with pytest.raises(WorkerError, match="worker program 0 .*: .*killed"):
            play(multi, drafts=no_drafts)
    assert "is given up: it was lost 3 times before its first round" in said[-1]


@pytest.mark.fault
def test_what_an_engine_raises_there_is_raised_here_and_the_program_goes_on(alone):
    programs = Programs()
    multi, team = make_team(programs, 2)
    with team:
        team.start()
        with pytest.raises(WorkerError, match="expected drafters of rl.speculation.*got function"):
            play(multi, drafts=draft_with(None))
        engine = programs.channels[1][0].program.engine
        engine.slots_for = no_slots
        with pytest.raises(WorkerError, match="worker 1 .*RuntimeError: a device is gone"):
            play(multi, drafts=no_drafts)
        del engine.slots_for
        with pytest.raises(RuntimeError, match="stop here"):
            play(multi, drafts=no_drafts, on_finish=stop)
        assert_same_tokens(play(multi, drafts=no_drafts), alone)
    assert team.losses == []


def no_slots(num_requests):
    raise RuntimeError("a device is gone")


def stop(trajectory):
    raise RuntimeError("stop here")


def of_another(event):
    if isinstance(event, Answered):
        return Answered(dataclasses.replace(event.trajectory, sample_index=77))
    return event


def beyond(event):
    if isinstance(event, Answered):
        event.trajectory.response_ids[-1] = MODEL.vocab_size
    return event


LIES = {
    "is to another one": other_report(of_another),
    "outside of the vocabulary": other_report(beyond),
    "which it does not have": other_report(
        lambda e: ChunkEnded(999, 3) if isinstance(e, Answered) else e
    ),
    "left without being told to": other_report(
        lambda e: Parked(e.request_id, None, None) if isinstance(e, ChunkEnded) else e
    ),
    "ended a chunk at 99 tokens": other_report(
        lambda e: ChunkEnded(e.request_id, 99) if isinstance(e, ChunkEnded) else e
    ),
    "expected Report, got Pong": lambda report: messages.Pong(0.0, ()),
}


@pytest.mark.fault
@pytest.mark.parametrize("why", LIES)
def test_a_program_that_lies_is_lost_and_changes_nothing(alone, why):
    programs, said = Programs(), []
    first = iter([Lying(LIES[why])])
    programs._changed = lambda channel: next(first, lambda _: None)(channel)
    multi, team = make_team(programs, 2, said=said)
    with team:
        team.start()
        for _ in range(5):  # on a busy machine the others may have done all of it
            assert_same_tokens(play(multi, drafts=no_drafts), alone)
            if said:
                break
    assert why in said[0]


@pytest.mark.fault
def test_programs_that_differ_do_not_work_together_and_say_what_differs():
    other = IDENTITY | {"code of Reprise": "0000"}
    _, team = make_team(Programs(), 1)
    team._hello = lambda number: hello(number, identity=other)
    with team, pytest.raises(Mismatch, match="expected the same code of Reprise .* got .*0000"):
        team.start()


@pytest.mark.fault
def test_a_program_that_does_not_answer_at_the_start_is_named_in_time():
    _, team = make_team(Programs(changed=lambda c: setattr(c, "stopped", True)), 1)
    team._deadlines = team._deadlines.__class__(0.3, 0.3, 0.3)
    with team, pytest.raises(ProgramLost, match="worker program 0: no answer to Hello for 0.3 s"):
        team.start()


@pytest.mark.fault
def test_an_idle_program_that_stops_is_replaced_before_it_is_needed(monkeypatch):
    monkeypatch.setattr("rl.remote.team.BEAT_S", 0.05)
    programs, said = Programs(), []
    multi, team = make_team(programs, 1, deadline_s=0.3, said=said)
    with team:
        team.start()
        programs.channels[0][0].stopped = True
        wait_until(lambda: len(programs.channels[0]) == 2 and multi.engines[0].is_ready)
    assert "no sign of life for 0." in said[0]


def test_late_reports_of_a_lost_program_are_not_heard(alone):
    """A program that was only slow, and answers once it is declared lost."""
    programs = Programs(changed=Killing(messages.Poll, 2, "stop"))
    multi, team = make_team(programs, 2, deadline_s=0.5)
    finished = []
    with team:
        team.start()
        done = play(multi, drafts=no_drafts, on_finish=lambda t: finished.append(t.request_id))
        slow = programs.channels[0][0]
        slow.program.answer(CODEC.encode(messages.Poll(1, 0.0)))  # what it has said since
    assert_same_tokens(done, alone)
    assert sorted(finished) == sorted(alone)
    ended = [d.event.request_id for d in multi.decisions if isinstance(d.event, ChunkDone)]
    assert set(ended) <= set(alone)
