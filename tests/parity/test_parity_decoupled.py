"""Drafts of drafting workers: the tokens of plain decoding, whatever is late, lost or wrong."""

import dataclasses

import pytest
from parity_model import CONFIG, MODEL, SAMPLINGS, STEP_KEY, TOLERANCE, differences, misscored
from stepped_links import (
    DeafLink,
    ReplacedLink,
    Shuffles,
    SteppedLink,
    TroubledLink,
    drops,
    repeats,
    wrong_bases,
    wrong_requests,
    wrong_tokens,
)

from reprise.rl.drafting.workers import drafting_engine
from reprise.rl.engine.engine import Engine
from reprise.spec.config import ChainConfig
from reprise.spec.decoupled.ahead import Enumerating, FreeRunning, RequestTexts
from reprise.spec.decoupled.drafter import DecoupledDrafter, OnePlan
from reprise.spec.decoupled.messages import DraftPlan
from reprise.spec.draft_model.enumeration import AheadDraftModel, EnumeratingDraftModel
from reprise.spec.drafter import Source

pytestmark = pytest.mark.parity

SMALL = dataclasses.replace(MODEL, num_layers=1)
LONGEST = 44  # of prompt and response
CHAINS = ChainConfig(window_tokens=4, chunk_tokens=32, pass_tokens=128)
WINDOW = DraftPlan(3)


@pytest.fixture(scope="module")
def small_params(params):
    return dataclasses.replace(params, layers=params.layers[:1])


def drafting(engine):
    """An engine that drafts for all slots of `engine`, at most a window beyond what is verified."""
    return drafting_engine(engine, engine.config.slots, LONGEST, WINDOW.window)


def chains(engine, params, name, model=SMALL):
    runner = drafting(engine)
    options = {"runner": runner, "sampling": SAMPLINGS[name], "key": STEP_KEY}
    drafter = AheadDraftModel(model, params, CHAINS, proposal="shared_noise", **options)
    return FreeRunning(drafter, runner.config.slots, runner.longest_tokens)


def cases(engine, params, name, model=SMALL, proposal="shared_noise"):
    runner = drafting(engine)
    options = {"runner": runner, "sampling": SAMPLINGS[name], "key": STEP_KEY}
    drafter = EnumeratingDraftModel(model, params, CHAINS, proposal=proposal, **options)
    size = runner.config.slots, runner.longest_tokens
    return Enumerating(drafter, *size, max_window=WINDOW.window, fan_out=2)


def decoupled(links, name, plan=WINDOW):
    return DecoupledDrafter(links, OnePlan(plan), SAMPLINGS[name])


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("plain", DraftPlan(3)),
        ("greedy", DraftPlan(2)),
        ("blocks_cool", DraftPlan(3, decoupled=False)),
    ],
)
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
    assert engine.stats.accepted_tokens > 0.5 * engine.stats.tokens


@pytest.mark.parametrize(
    ("name", "proposal"),
    [("plain", "likeliest"), ("greedy", "likeliest"), ("blocks_cool", "shared_noise")],
)
def test_all_cases_one_round_ahead(golden, rollout, engine, params, small_params, name, proposal):
    link = SteppedLink(cases(engine, small_params, name, proposal=proposal))
    got = rollout(name, drafter=decoupled([link], name))
    assert not differences(golden(name), got)
    drafted, accepted = engine.stats.drafted_by_source, engine.stats.accepted_by_source
    assert 0 < accepted[Source.MODEL] < drafted[Source.MODEL]


# --- trouble --------------------------------------------------------------------------------

AHEAD = {"chains": chains, "cases": cases}


def check(golden, rollout, engine, links):
    """Roll out; whatever links do, the tokens are those of plain decoding."""
    drafter = decoupled(links, "plain")
    assert not differences(golden("plain"), rollout("plain", drafter=drafter))
    assert engine.stats.drafted_by_source[Source.MODEL] > 0
    return drafter


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("delay", [1, 5])
def test_late_blocks(golden, rollout, engine, params, ahead, delay):
    link = SteppedLink(AHEAD[ahead](engine, params, "plain", MODEL), delay=delay)
    drafter = decoupled([link], "plain")
    assert not differences(golden("plain"), rollout("plain", drafter=drafter))
    assert drafter.received.stale > 0 or engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize(
    "trouble", [drops, repeats, wrong_tokens, wrong_bases, wrong_requests, Shuffles]
)
def test_blocks_that_are_lost_or_repeated_or_wrong(golden, rollout, engine, params, ahead, trouble):
    trouble = Shuffles() if trouble is Shuffles else trouble
    link = TroubledLink(AHEAD[ahead](engine, params, "plain", MODEL), trouble)
    check(golden, rollout, engine, [link])
    assert not link.ahead.texts.requests


@pytest.mark.parametrize("ahead", AHEAD)
def test_commits_that_are_lost(golden, rollout, engine, params, ahead):
    link = DeafLink(AHEAD[ahead](engine, params, "plain", MODEL))
    check(golden, rollout, engine, [link])
    assert link.lost > 0 and not link.ahead.texts.requests


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_drafting_worker_that_is_replaced(golden, rollout, engine, params, ahead, keeps):
    """In mid-rollout, three times and more; the others go on."""

    def made():
        return AHEAD[ahead](engine, params, "plain", MODEL)

    # requests are shared out by their numbers, which here leave different rests by 3
    links = [
        ReplacedLink(made, rounds=4, keeps=keeps, delay=1),
        *map(SteppedLink, (made(), made())),
    ]
    check(golden, rollout, engine, links)
    assert links[0].generation > 2 and engine.stats.accepted_tokens > 0
    again = [c for commits, _ in links[0].told for c in commits if not c.first and c.round > 1]
    assert again, "requests are told of anew"
    for link in links[1:]:
        first = [c.request_id for commits, _ in link.told for c in commits if not c.first]
        assert first and len(set(first)) == len(first), "the others are not"


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_drafting_worker_has_pages_for_all_that_a_verifying_worker_lacks(
    golden, rollout, params, ahead
):
    """The policy itself drafts; few requests fit into the pages of the verifying worker."""
    few = Engine(MODEL, dataclasses.replace(CONFIG, pages=20))
    link = SteppedLink(AHEAD[ahead](few, params, "plain", MODEL))
    got = rollout("plain", engine=few, drafter=decoupled([link], "plain"))
    assert not differences(golden("plain"), got)
    assert few.stats.accepted_tokens > 0.3 * few.stats.tokens
    fewest = Engine(MODEL, dataclasses.replace(CONFIG, pages=7), longest_tokens=LONGEST)
    assert fewest.num_pages == 7
    assert drafting(fewest).num_pages == CONFIG.slots * drafting(fewest).slot_pages


def test_few_rows(golden, rollout, engine, params):
    """Requests that a drafting worker has no row for are decoded plainly."""
    ahead = chains(engine, params, "plain", MODEL)
    ahead.texts = RequestTexts(3, LONGEST)
    check(golden, rollout, engine, [SteppedLink(ahead)])
