"""Chunks that end at every offset of a page, on every kind of round, beside rows at rest.

A row at rest holds a prompt that a sibling may take, or a request that goes on: rounds of the
other rows must write nothing to it, wherever it ends.
"""

import dataclasses

import numpy as np
import pytest
import rollouts
from parity_chunks import CONFIG, SEEDS, in_chunks, make_requests
from parity_drafters import RandomTrees
from parity_model import MODEL, SAMPLINGS, STEP_KEY, STOP, TOLERANCE, differences, naive_rollout
from test_parity_draft_model import SMALL, drafter
from test_parity_learned import Keeps, hidden, learned
from test_parity_reuse import NODES, changed, rule, with_cached

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import Origin
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import ChainConfig
from reprise.spec.eagle import model as eagle

pytestmark = pytest.mark.parity

EVERY_OFFSET = set(range(13, 36))  # of two pages of eight, and some before and behind them


@pytest.fixture(scope="module")
def chunked():
    return make_requests()


@pytest.fixture(scope="module")
def want(params, chunked, full_precision):
    return naive_rollout(MODEL, params, chunked, SAMPLINGS["plain"])


@pytest.fixture(scope="module")
def engine():
    return Engine(MODEL, CONFIG)


@pytest.fixture(scope="module")
def keeping():
    layers = eagle.config_for(MODEL, "eagle").feature_layers
    return Engine(MODEL, CONFIG, feature_layers=layers)


@pytest.fixture
def check(params, chunked, want):
    """Run in chunks, several times; `options(engine)` are made anew for each run."""

    def run(engine, options, requests=chunked):
        offsets, nodes = set(), set()
        for seed in SEEDS:
            got, ended = in_chunks(engine, params, "plain", requests, seed, **options())
            assert not differences(want, got)
            offsets |= ended
            nodes |= {m // b for b, m, _ in engine.stats.rounds}
        assert offsets >= EVERY_OFFSET
        return nodes

    return run


def test_plain(check, engine):
    assert check(engine, dict) == {1}


def test_trees(check, engine, want):
    assert 4 in check(engine, lambda: {"drafter": RandomTrees(want), "budget": FixedBudget()})


def test_a_draft_model(check, engine, params):
    small = dataclasses.replace(params, layers=params.layers[:1])
    config = ChainConfig(window_tokens=4, chunk_tokens=32, max_draft_tokens=3)
    assert 4 in check(engine, lambda: {"drafter": drafter(engine, small, "plain", SMALL, config)})


def test_a_learned_drafter_and_the_states_that_it_reads(check, keeping, params):
    sinks = []

    def options():
        sinks.append(Keeps())
        context = keeping.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
        return {"drafter": learned("eagle").drafter_for(context), "sink": sinks[-1]}

    assert 4 in check(keeping, options)
    for sink in sinks:
        for caught in sink.sequences:
            n = len(caught.hidden_TW)
            assert n == len(caught.tokens_T) - 1
            tokens = np.zeros((1, 64), np.int32)
            tokens[0, :n] = caught.tokens_T[:n]
            whole = np.asarray(hidden(MODEL, params, tokens))[0, :n]
            np.testing.assert_allclose(caught.hidden_TW[:, -MODEL.d_model :], whole, atol=1e-4)


def test_reuse(check, engine, want, chunked):
    given = with_cached(chunked, lambda r: changed(want, r))
    assert check(engine, lambda: {"rule": rule("coupled"), "times": NODES}, given) == {1, 2, 4}
    assert check(engine, lambda: {"rule": rule("coupled")}, given) == {1}, "in chunks that draw"


@pytest.mark.parametrize("mode", ["lenient:1", "random"])
def test_a_rule_keeps_the_same_wherever_chunks_end(engine, params, want, chunked, mode):
    given, mine = with_cached(chunked, lambda r: changed(want, r)), rule(mode)
    done = rollouts.run(engine, params, given, SAMPLINGS["plain"], STEP_KEY, STOP, rule=mine)
    whole = {t.request_id: t for t in done}
    got, _ = in_chunks(engine, params, "plain", given, SEEDS[0], rule=mine)
    assert len({int((t.origins == Origin.REUSED).sum()) for t in got}) > 3
    for t in got:
        one = whole[t.request_id]
        for name in ("response_ids", "policy_versions", "emission_logprobs"):
            np.testing.assert_allclose(getattr(t, name), getattr(one, name), atol=TOLERANCE)
        np.testing.assert_array_equal(t.origins == Origin.REUSED, one.origins == Origin.REUSED)
