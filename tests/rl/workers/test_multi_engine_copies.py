"""Requests that idle workers answer a second time: the same tokens, and each result once."""

from __future__ import annotations

import threading
import time

import pytest
import rollouts
from tiny_team import (
    CONFIG,
    KEY,
    MODEL,
    PARAMS,
    REQUESTS,
    SAMPLING,
    STOP,
    with_cached,
    workers,
)

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.sessions.multi_engine import Helpers
from reprise.sched.protocol import Copy, Drop, Finished
from reprise.sched.request import Kv, copy_of
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.decoupled.copies import CopiesDrafter, Progress
from reprise.spec.drafter import Source
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.reuse.prefix_rule import PrefixRule, parse_mode

LIMIT_S = 60.0  # of a wait for another worker: rounds take milliseconds
LONG = [r for r in REQUESTS if r.group_id == 0]  # of one worker, under group_fifo


def helped(engines, policy="group_fifo", **options):
    team = workers(engines, len(engines), policy, kv_tokens=200, **options)
    team.helpers = Helpers(2, 4, lambda held, left: True, dict)
    for i, engine in enumerate(engines):
        if isinstance(gates := getattr(engine, "gates", None), Gates):
            gates.has_mail = lambda i=i: team.places[i]._worker.has_mail
    return team


def copies(team):
    return [a for d in team.decisions for a in d.actions if isinstance(a, Copy)]


def drops(team):
    return [a for d in team.decisions for a in d.actions if isinstance(a, Drop)]


def winners(team):
    """Which copy of a request was first, 0 for the request itself; by request."""
    ended = [d.event.request_id for d in team.decisions if isinstance(d.event, Finished)]
    return dict(map(copy_of, ended))


class Noted(CopiesDrafter):
    """Counts the draft tokens that come of other copies."""

    def __init__(self, *given):
        super().__init__(*given)
        self.num_copied = 0

    def propose(self, live, max_nodes_A, max_nodes):
        drafts = super().propose(live, max_nodes_A, max_nodes)
        for a, n in enumerate(drafts.count_A.tolist()):
            self.num_copied += int((drafts.sources_AN[a, :n] == Source.COPY).sum())
        return drafts


def drafting(made):
    """A factory of drafters that know of one another's progress."""
    progress = Progress()

    def drafts(context):
        methods = [NgramDrafter(), NgramDrafter()]
        made.append(Noted(NgramDrafter(), methods, copy_of, progress))
        return made[-1], FixedBudget()

    return drafts


def play(team, requests=REQUESTS, **options):
    """The trajectories, and the numbers of the results as they came."""
    seen, on_finish = [], options.pop("on_finish", lambda trajectory: None)

    def note(trajectory):
        seen.append(trajectory.request_id)
        on_finish(trajectory)

    given = PARAMS, requests, SAMPLING, KEY, STOP
    options = {"drafts": drafting([]), "policy_version": 7} | options
    done = rollouts.run(team, *given, on_finish=note, **options)
    return done, seen


def assert_answered(done, seen, alone, requests=REQUESTS):
    """Each request has its own tokens, and was given back once."""
    assert sorted(seen) == sorted(r.request_id for r in requests)
    assert [t.request_id for t in done] == [r.request_id for r in requests]
    for t in done:
        wanted = alone[t.request_id]
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.finish_reason == wanted.finish_reason
        assert t.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert (t.group_id, t.sample_index) == (wanted.group_id, wanted.sample_index)


@pytest.mark.parity
@pytest.mark.parametrize("policy", ["group_fifo", "divided_fifo", "seer"])
@pytest.mark.parametrize("count", [2, 3])
def test_tokens_are_those_of_one_engine(engines, alone, policy, count):
    team = helped(engines[:count], policy, chunk=5)
    assert_answered(*play(team), alone)
    found = copies(team)
    assert found and drops(team), "the last request leaves a worker dry"
    assert {copy_of(c.start.request_id)[0] for c in found} <= set(alone)
    assert all(c.start.worker_id != c.worker_id for c in found)


class Gates:
    """What a worker waits for, and what it has done."""

    def __init__(self):
        self.began, self.copy_ended = threading.Event(), threading.Event()
        self.handed: list[int] = []  # copies' numbers of positions that were handed over
        self.inserted: list[int] = []
        self.has_mail = lambda: False  # of the first worker

    def on_finish(self, trajectory):
        if trajectory.group_id == LONG[0].group_id:
            self.copy_ended.set()


def held_up(gates):
    """An engine that stays behind its copies: with all prompts in, and with keys and values handed
    over, it waits until a copy has ended or mail has come.
    """

    class HeldUp(Engine):
        num_added = 0

        def add(self, requests):
            super().add(requests)
            self.num_added += len(requests)

        @property
        def has_work(self):  # else the first would end while the others are still on their way
            return super().has_work and (gates.began.is_set() or self.num_added >= len(LONG))

        def copy(self, request_id):
            partial = super().copy(request_id)
            if partial is not None:
                gates.handed.append(partial.kv.num_tokens)
            return partial

        def _round(self, *args):
            if not gates.began.is_set() and self._table.live_B.sum() == len(LONG):
                gates.began.set()
                self._wait()
            if gates.handed:
                self._wait()
            super()._round(*args)

        def _wait(self):
            began_s = time.monotonic()
            while not gates.copy_ended.wait(0.005) and not gates.has_mail():
                assert time.monotonic() - began_s < LIMIT_S

    HeldUp.gates = gates
    return HeldUp(MODEL, CONFIG)


def inserting(gates):
    """An engine that notes the keys and values that it takes."""

    engine = Engine(MODEL, CONFIG)
    insert = engine._rows.memory.insert

    def noted(entering):
        gates.inserted.append(len(entering))
        insert(entering)

    engine._rows.memory.insert = noted
    return engine


def shortest(alone):
    """The request of another group that ends first."""
    others = [r for r in REQUESTS if r.group_id != LONG[0].group_id]
    return min(others, key=lambda r: alone[r.request_id].num_tokens)


@pytest.mark.parity
def test_a_copy_that_is_first_is_the_answer(engines, alone):
    gates, made = Gates(), []
    team = helped([held_up(gates), inserting(gates)])
    requests = [*LONG, shortest(alone)]
    done, seen = play(team, requests, on_finish=gates.on_finish, drafts=drafting(made))
    assert_answered(done, seen, alone, requests)
    first = winners(team)
    assert any(first[r.request_id] for r in LONG)
    # what was handed over are keys and values of prompt and response, as far as they had come
    assert gates.handed and min(gates.handed) >= len(LONG[0].prompt_ids)
    assert gates.inserted
    assert {c.start.kv for c in copies(team)} == {Kv.POOL}
    dropped = {(d.request_id, d.worker_id) for d in drops(team)}
    assert all((r.request_id, 0) in dropped for r in LONG if first[r.request_id])


@pytest.mark.parity
def test_who_is_behind_drafts_what_others_have(engines, alone):
    """The request itself waits until one copy has ended, and is behind all of the others."""
    gates, made = Gates(), []
    team = helped([held_up(gates), engines[0]])
    requests = [*LONG, shortest(alone)]
    done, seen = play(team, requests, on_finish=gates.on_finish, drafts=drafting(made))
    assert_answered(done, seen, alone, requests)
    assert sum(d.num_copied for d in made) > 0


# --- reuse ------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("mode", ["coupled", "full", "lenient:e^0.5"])
def test_reused_responses_are_reused_by_copies_too(engines, alone, mode):
    rule = PrefixRule(parse_mode(mode), 0.0, 0, 1)
    requests = with_cached(LONG, alone)
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7, rule=rule)
    team = helped(engines)
    done, one = team.run(spec, requests), engines[0].run(spec, requests)
    assert copies(team)
    for t, wanted in zip(done, one, strict=True):
        assert t.response_ids.tolist() == wanted.response_ids.tolist()
        assert t.origins.tolist() == wanted.origins.tolist()
        assert t.policy_versions.tolist() == wanted.policy_versions.tolist()
