"""Workers that begin the next step: what comes back, and that it only drafts for that step."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import jax
import numpy as np
import pytest
import rollouts
from replay import RecordedAhead
from tiny_team import CONFIG, KEY, MODEL, PARAMS, REQUESTS, SAMPLING, STOP, assert_same_tokens

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, no_drafts
from reprise.rl.sessions.ahead_engine import AHEAD, ComingStep
from reprise.rl.sessions.multi_engine import Helpers
from reprise.rl.workers.config import SchedConfig
from reprise.rl.workers.messages import WorkerError
from reprise.sched.protocol import Copy
from reprise.spec.verification.sampling import step_key

NEXT = step_key(0, 1)
LONGEST = max(len(r.prompt_ids) for r in REQUESTS) + SAMPLING.max_new_tokens
CHANGED = jax.tree.map(
    lambda x: x + np.float32(0.004) * np.sin(np.arange(x.size, dtype=np.float32).reshape(x.shape)),
    PARAMS,
)


def alone(params, key):
    done = rollouts.run(Engine(MODEL, CONFIG), params, REQUESTS, SAMPLING, key, STOP)
    return {t.request_id: t for t in done}


@pytest.fixture(scope="module")
def before():
    """What the first weights answer: this step, and the next one."""
    return alone(PARAMS, KEY), alone(PARAMS, NEXT)


@pytest.fixture(scope="module")
def after():
    return alone(CHANGED, NEXT)


def local(count=2, **options):
    config = SchedConfig(
        **{"mode": "ahead", "policy": "divided_fifo", "workers": count, "chunk_tokens": 3},
        **options,
    )
    engines = [Engine(MODEL, CONFIG, number=i) for i in range(count)]
    return RecordedAhead(engines, config, hang_limit_s=60.0)


@contextlib.contextmanager
def opened(is_helping):
    """Two workers; helping ones answer one another's last requests before the next step's."""
    multi = local()
    if is_helping:
        multi.helpers = Helpers(2, 4, lambda held, left: True, dict)
    with multi.open(len(REQUESTS), LONGEST) as engine:
        yield engine


def play(engine, params, key, requests=REQUESTS):
    spec = RolloutSpec(params, SAMPLING, key, STOP, policy_version=7, drafts=no_drafts)
    return engine.run(spec, requests)


def coming(requests=REQUESTS):
    return ComingStep(requests, NEXT, no_drafts, None)


def wait_for(engine, tokens):
    """Until so many tokens of the next step have been drawn."""
    limit_s = time.monotonic() + 60
    while engine._session.num_tokens(engine._begun_place) < tokens:
        assert time.monotonic() < limit_s, "nothing is begun"
        time.sleep(0.002)


@pytest.mark.parity
@pytest.mark.parametrize("is_helping", [False, True])
def test_the_next_step_is_answered_as_if_nothing_had_been_begun(before, after, is_helping):
    this, expected = before
    with opened(is_helping) as engine:
        for tokens in (20, 60):  # a part of it, and about all
            engine.plan(coming())
            assert_same_tokens(play(engine, PARAMS, KEY), this)
            wait_for(engine, tokens)
            begun = engine.recall()
            assert begun.num_tokens >= tokens
            for request_id, ids in begun.tokens.items():
                assert list(ids) == expected[request_id].response_ids[: len(ids)].tolist()
            assert_same_tokens(play(engine, CHANGED, NEXT, begun.resumed(REQUESTS)), after)
        actions = [a for d in engine.decisions for a in d.actions]
        assert any(isinstance(a, Copy) for a in actions) == is_helping
    differ = [
        i for i in after if after[i].response_ids.tolist() != expected[i].response_ids.tolist()
    ]
    assert 0 < len(differ) < len(after), "some of what was begun is to be drawn otherwise"


def test_a_part_of_the_requests_is_answered_while_others_are_begun(before):
    """As where dynamic sampling asks more: what is begun lets go of the workers meanwhile."""
    this, expected = before
    with local().open(len(REQUESTS), LONGEST) as engine:
        engine.plan(coming())
        first = play(engine, PARAMS, KEY, REQUESTS[:6])
        wait_for(engine, 5)
        second = play(engine, PARAMS, KEY, REQUESTS[6:])
        wait_for(engine, 30)
        begun = engine.recall()
    assert_same_tokens([*first, *second], this)
    for request_id, ids in begun.tokens.items():
        assert list(ids) == expected[request_id].response_ids[: len(ids)].tolist()


def test_nothing_is_begun_without_a_plan_and_a_plan_is_begun_once(before):
    with local().open(len(REQUESTS), LONGEST) as engine:
        assert engine.recall().tokens == {}
        assert_same_tokens(play(engine, PARAMS, KEY), before[0])
        assert engine.recall().tokens == {}
        engine.plan(coming())
        engine.begin()  # with the weights of the last rollout
        wait_for(engine, 10)
        with pytest.raises(AssertionError, match="recalled first"):
            engine.plan(coming())
        assert engine.recall().num_tokens >= 10
        assert engine.recall().tokens == {}


@pytest.mark.fault
def test_an_error_ahead_of_the_step_is_raised_where_results_are_asked_for(monkeypatch):
    engine_round = Engine._round

    def failing(self, *args):
        if (self._table.request_ids_B[self._table.busy_B] >= AHEAD).any():
            raise RuntimeError("a device is gone")
        engine_round(self, *args)

    monkeypatch.setattr(Engine, "_round", failing)
    with local().open(len(REQUESTS), LONGEST) as engine:
        engine.plan(coming())
        with pytest.raises(WorkerError, match="a device is gone"):
            play(engine, PARAMS, KEY)
            until_s = time.monotonic() + 120
            while time.monotonic() < until_s:  # until a worker has begun something
                engine._next()


def test_requests_that_are_begun_have_the_noise_of_their_own_step():
    from reprise.spec.verification.sampling import noise_names

    ids = np.array([0, 5, 2**31 - 1])
    assert (noise_names(ids + AHEAD) == ids).all()
    assert dataclasses.replace(REQUESTS[0], request_id=AHEAD).request_id < 2**62
