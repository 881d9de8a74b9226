"""Drafts of drafting workers: the tokens of plain decoding, whatever is late, lost or wrong."""

import dataclasses

import pytest
from parity_model import BASE, MODEL, SAMPLINGS, STEP_KEY, TOLERANCE, differences, misscored
from stepped_links import SteppedLink

from spec.decoupled.ahead import Enumerating, FreeRunning
from spec.decoupled.drafter import DecoupledDrafter, OnePlan
from spec.decoupled.messages import DraftPlan
from spec.draft_model.config import ChainConfig
from spec.draft_model.drafter import AheadDraftModel, EnumeratingDraftModel
from spec.drafter import Source

pytestmark = pytest.mark.parity

SMALL = dataclasses.replace(MODEL, num_layers=1)
CONFIG = ChainConfig(window_tokens=4, chunk_tokens=32, pass_tokens=128)
SIZE = BASE.slots, 64
WINDOW = DraftPlan(3)


@pytest.fixture(scope="module")
def small_params(params):
    return dataclasses.replace(params, layers=params.layers[:1])


def chains(engine, params, name, model=SMALL):
    options = {"runner": engine, "sampling": SAMPLINGS[name], "key": STEP_KEY}
    drafter = AheadDraftModel(model, params, CONFIG, proposal="shared_noise", **options)
    return FreeRunning(drafter, *SIZE)


def cases(engine, params, name, model=SMALL, proposal="shared_noise"):
    options = {"runner": engine, "sampling": SAMPLINGS[name], "key": STEP_KEY}
    drafter = EnumeratingDraftModel(model, params, CONFIG, proposal=proposal, **options)
    return Enumerating(drafter, *SIZE, most_window=3, fan_out=2)


def decoupled(links, name, plan=WINDOW):
    return DecoupledDrafter(links, OnePlan(plan), SAMPLINGS[name])


@pytest.mark.parametrize("plan", [DraftPlan(3), DraftPlan(3, decoupled=False), DraftPlan(2)])
@pytest.mark.parametrize("name", ["plain", "greedy", "gumbel_cool"])
def test_chains_that_run_ahead(golden, rollout, engine, params, small_params, name, plan):
    link = SteppedLink(chains(engine, small_params, name))
    got = rollout(name, drafter=decoupled([link], name, plan))
    assert not differences(golden(name), got)
    drafted, accepted = engine.stats.drafted_by_source, engine.stats.accepted_by_source
    assert 0 < accepted[Source.MODEL] < drafted[Source.MODEL]
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    assert not link.ahead.texts.requests  # all have left


def test_the_policy_itself_runs_ahead_and_nothing_is_rolled_back(golden, rollout, engine, params):
    for steps in (1, 2):
        link = SteppedLink(chains(engine, params, "plain", MODEL), steps=steps)
        got = rollout("plain", drafter=decoupled([link], "plain"))
        assert not differences(golden("plain"), got)
        print(engine.stats.tokens, sum(engine.stats.rounds.values()), engine.stats.accepted_tokens)
    assert engine.stats.accepted_tokens > 0.6 * engine.stats.tokens


@pytest.mark.parametrize("proposal", ["likeliest", "shared_noise"])
@pytest.mark.parametrize("name", ["plain", "greedy", "gumbel_cool"])
def test_all_cases_one_round_ahead(golden, rollout, engine, params, small_params, name, proposal):
    link = SteppedLink(cases(engine, small_params, name, proposal=proposal))
    got = rollout(name, drafter=decoupled([link], name))
    assert not differences(golden(name), got)
    drafted, accepted = engine.stats.drafted_by_source, engine.stats.accepted_by_source
    print(
        name,
        proposal,
        accepted[Source.MODEL],
        drafted[Source.MODEL],
        sum(engine.stats.rounds.values()),
    )
    assert 0 < accepted[Source.MODEL] < drafted[Source.MODEL]


@pytest.mark.parametrize("name", ["plain", "greedy", "gumbel_cool"])
def test_the_policy_itself_knows_all_cases(golden, rollout, engine, params, name):
    link = SteppedLink(cases(engine, params, name, MODEL))
    drafter = decoupled([link], name)
    assert not differences(golden(name), rollout(name, drafter=drafter))
    drafted, accepted = engine.stats.drafted_by_source, engine.stats.accepted_by_source
    print(
        name,
        accepted[Source.MODEL],
        drafted[Source.MODEL],
        sum(engine.stats.rounds.values()),
        drafter.received.stale,
    )
