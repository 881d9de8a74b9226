"""Drafters on the device draft the same from pages of any size."""

import dataclasses

import pytest
from noted_drafts import Noted, share_of_same
from parity_model import MODEL, ONE_SIZE, SAMPLINGS, STEP_KEY, differences
from test_parity_draft_model import drafter as draft_model
from test_parity_learned import learned

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.spec.budget.budget import FixedBudget, SeeingBudget
from reprise.spec.eagle import model as eagle

pytestmark = pytest.mark.parity

SMALL = {"page_tokens": 4}


@pytest.fixture(params=[pytest.param("learned", marks=pytest.mark.soak), "model"])
def make(request, params):
    """A maker of an engine and the drafter of its next rollout."""

    def made(**settings):
        config = dataclasses.replace(ONE_SIZE, **settings)
        if request.param == "model":
            small = dataclasses.replace(params, layers=params.layers[:1])
            engine = Engine(MODEL, config)
            return engine, lambda: Noted(draft_model(engine, small, "plain"))
        layers = eagle.config_for(MODEL, "eagle").feature_layers
        engine = Engine(MODEL, config, feature_layers=layers)
        context = engine.drafter_context(RolloutSpec(params, SAMPLINGS["plain"], STEP_KEY))
        return engine, lambda: Noted(learned("eagle").drafter_for(context))

    return made


def test_drafts_from_small_pages_are_those_from_one_page(golden, rollout, make):
    """Seen by the host, and in rounds on the device; also if pages lack and requests leave."""
    engine, drafter = make(page_tokens=64)
    from_one = drafter()
    rollout("plain", engine=engine, drafter=from_one, budget=SeeingBudget(3))
    assert from_one.trees.total() > 50

    engine, drafter = make(**SMALL)
    for budget in (SeeingBudget(3), FixedBudget(3)):
        noted = drafter()
        got = rollout("plain", engine=engine, drafter=noted, budget=budget)
        assert not differences(golden("plain"), got)
        assert share_of_same(from_one.trees, noted.trees) > 0.99

    engine, drafter = make(**SMALL, pages=14)
    got = rollout("plain", engine=engine, drafter=drafter(), budget=FixedBudget(3))
    assert not differences(golden("plain"), got)
    assert engine.stats.preemptions > 0 and engine.stats.accepted_tokens > 0
