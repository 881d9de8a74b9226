"""The public call, as a notebook would make it."""

import dataclasses

import pytest
import tiny_engine
from tiny_engine import make_params

from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from rl.rollout import generate
from rl.trajectory import FinishReason, Request
from spec.config import SamplingConfig
from spec.sampling import step_key

MODEL = dataclasses.replace(tiny_engine.MODEL, eos_token_ids=(4, 5, 6))
SAMPLING = SamplingConfig(max_new_tokens=12)
REQUESTS = [Request(i, (1, 2 + i % 2)) for i in range(4)]


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL, EngineConfig(slots=4, min_slots=4, min_prompt_tokens=8))


def responses(trajectories):
    return [t.response_ids.tolist() for t in trajectories]


def test_five_lines(params, engine):
    """With the defaults for everything that has one; a handed-in engine changes nothing."""
    alone = generate(MODEL, params, REQUESTS, SAMPLING)
    assert responses(alone) == responses(generate(MODEL, params, REQUESTS, SAMPLING, engine=engine))
    assert [t.request_id for t in alone] == [0, 1, 2, 3]


def test_the_default_key_is_that_of_seed_and_step_zero(params, engine):
    def tokens(key):
        return responses(generate(MODEL, params, REQUESTS, SAMPLING, engine=engine, key=key))

    assert tokens(None) == tokens(step_key(0, 0))
    assert tokens(None) != tokens(step_key(0, 1))
    assert tokens(None) != tokens(step_key(1, 0))


def test_end_tokens_are_the_policy_s_unless_given(params, engine):
    own = generate(MODEL, params, REQUESTS, SAMPLING, engine=engine)
    none = generate(MODEL, params, REQUESTS, SAMPLING, engine=engine, stop_token_ids=())
    assert any(t.finish_reason is FinishReason.STOP for t in own)
    assert all(t.num_tokens == 12 for t in none)
    for a, b in zip(own, none, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()[: a.num_tokens]
        ended = set(a.response_ids.tolist()) & {4, 5, 6}
        assert bool(ended) == (a.finish_reason is FinishReason.STOP)


def test_options_reach_the_engine(params, engine):
    told, rounds = [], []
    got = generate(
        MODEL,
        params,
        REQUESTS,
        SAMPLING,
        engine=engine,
        policy_version=3,
        on_finish=told.append,
        on_round=lambda done, tokens: rounds.append(done),
    )
    assert len(told) == 4 and rounds[-1] == 4
    assert {int(v) for t in got for v in t.policy_versions} == {3}


def test_an_engine_of_another_model_is_refused(params, engine):
    other = dataclasses.replace(MODEL, rope_theta=5000.0)
    with pytest.raises(ValueError, match="another model"):
        generate(other, params, REQUESTS, SAMPLING, engine=engine)
