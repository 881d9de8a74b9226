"""A draft model that drafts: the tokens of plain decoding; where it is the policy, its draws.

The draft model of most tests is the policy's first layer: often accepted, often rejected.
"""

import dataclasses

import pytest
from noted_drafts import Noted, NotedGoodput, drafts_at_any_gain, share_of_same
from parity_drafters import drafted, origins_if_all_accepted
from parity_model import (
    HALF_TREES,
    MODEL,
    ONE_SIZE,
    SAMPLINGS,
    STEP_KEY,
    TOLERANCE,
    differences,
    misscored,
)
from shapes import SPEC

from reprise.rl.engine.engine import Engine
from reprise.spec.budget.budget import FixedBudget, SeeingBudget
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.config import ChainConfig
from reprise.spec.draft_model.drafter import DraftModelDrafter
from reprise.spec.drafter import Source
from reprise.spec.retrieval.suffix_drafter import NgramDrafter

pytestmark = pytest.mark.parity

SMALL = dataclasses.replace(MODEL, num_layers=1)
CONFIG = ChainConfig(window_tokens=4, chunk_tokens=32, pass_tokens=128)


@pytest.fixture(scope="module")
def small_params(params):
    return dataclasses.replace(params, layers=params.layers[:1])


def drafter(engine, params, name, model=SMALL, config=CONFIG, **options):
    sampling = SAMPLINGS[name]
    return DraftModelDrafter(
        model, params, config, runner=engine, sampling=sampling, key=STEP_KEY, **options
    )


@pytest.mark.parametrize(
    ("name", "proposal"),
    [("plain", "likeliest"), ("greedy", "shared_noise"), ("blocks_cool", "shared_noise")],
)
def test_alone_and_with_others(golden, rollout, engine, params, small_params, name, proposal):
    for with_others in (False, True):
        small = drafter(engine, small_params, name, proposal=proposal)
        asked = DrafterUnion([NgramDrafter(), small]) if with_others else small
        got = rollout(name, drafter=asked)
        assert not differences(golden(name), got)
        drafted, accepted = engine.stats.drafted_by_source, engine.stats.accepted_by_source
        assert 0 < accepted[Source.MODEL] < drafted[Source.MODEL]
        if name == "greedy":  # others do not repeat themselves, or as the small model says
            assert (drafted[Source.OWN] > 0) == with_others
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "proposal"),
    [("plain", "shared_noise"), ("blocks_cool", "shared_noise"), ("greedy", "likeliest")],
)
def test_the_policy_itself_drafts_what_it_then_draws(
    golden, rollout, engine, params, name, proposal
):
    """Coupled: only an end token among the draft tokens, or the limit, makes the others useless."""
    got = rollout(name, drafter=drafter(engine, params, name, MODEL, proposal=proposal))
    assert not differences(golden(name), got)
    if proposal == "shared_noise":
        for t in got:
            assert drafted(t) == origins_if_all_accepted(len(drafted(t)), SPEC.max_nodes)
    assert engine.stats.accepted_tokens > 0.7 * engine.stats.tokens


@pytest.mark.parametrize("proposal", ["likeliest", "shared_noise"])
def test_drafts_on_the_device_are_those_that_the_host_would_see(
    golden, rollout, engine, small_params, proposal
):
    """With several rounds a fetch, as rows come and go."""
    trees, fetches = [], []
    for budget in (FixedBudget(3), SeeingBudget(3)):
        noted = Noted(drafter(engine, small_params, "plain", proposal=proposal))
        assert not differences(golden("plain"), rollout("plain", drafter=noted, budget=budget))
        trees.append(noted.trees)
        fetches.append(engine.stats.fetches)
    assert trees[1].total() > 100 and share_of_same(*trees) > 0.99
    assert fetches[0] < 0.75 * fetches[1]  # a round beside prompts has one of its own


def test_rounds_on_the_device_take_the_best_of_all_trees_under_goodput(
    golden, rollout, engine, small_params, monkeypatch
):
    """Where a round holds fewer nodes than all trees have."""
    drafts_at_any_gain(monkeypatch)
    noted, budget = Noted(drafter(engine, small_params, "plain")), NotedGoodput(HALF_TREES)
    assert not differences(golden("plain"), rollout("plain", drafter=noted, budget=budget))
    assert budget.num_unseen > 5
    sizes = {len(tree) // 2 for tree in noted.trees}
    assert len(sizes) > 1 and max(sizes) > 3  # some requests have more of the round than others
    assert engine.stats.accepted_by_source[Source.MODEL] > 0


@pytest.mark.soak
def test_few_slots_and_small_pages(golden, rollout, requests, small_params):
    config = dataclasses.replace(CONFIG, max_draft_tokens=3)
    engine = Engine(MODEL, dataclasses.replace(ONE_SIZE, slots=2, min_slots=2, page_tokens=4))
    asked = drafter(engine, small_params, "cool", config=config)
    got = rollout("cool", requests[::3], drafter=asked, engine=engine)
    assert not differences(golden("cool"), got)
    assert engine.stats.accepted_tokens > 0
