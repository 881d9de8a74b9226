"""Rounds whose draft tokens the device looks up: the tokens of plain decoding."""

import dataclasses

import numpy as np
import pytest
from parity_drafters import Oracle
from parity_model import BASE, MODEL, SAMPLINGS, TOLERANCE, differences, misscored
from test_parity_speculation import almost

from rl.engine.engine import Engine
from rl.trajectory import Origin
from spec.budget.budget import DraftDecision, FixedBudget
from spec.budget.union import DrafterUnion
from spec.retrieval.lookup_texts import LookupTexts
from spec.retrieval.ngram import NgramDrafter

pytestmark = pytest.mark.parity


class LookUp(FixedBudget):
    """Always the largest size that fits; where none does, the drafter is asked."""

    looks_up = True

    def __init__(self):
        super().__init__()
        self.outcomes = []

    def ahead(self, live, sizes, num_slots, num_positions):
        return DraftDecision(sizes[-1], lookup=True) if sizes else None

    def looked_up(self, live, outcome):
        self.outcomes.append(outcome)


def with_texts(golden, requests):
    past = {}
    for i, r in enumerate(requests):
        past.setdefault(r.group_id, []).append(almost(golden[r.request_id].response_ids, i))
    return DrafterUnion([NgramDrafter()], LookupTexts(past, num_tokens=1024))


@pytest.mark.parametrize("name", ["plain", "cool", "top_k", "greedy", "gumbel_cool"])
def test_the_same_tokens(golden, rollout, requests, engine, params, name):
    want, budget = golden(name), LookUp()
    got = rollout(name, drafter=with_texts(want, requests), budget=budget)
    assert not differences(want, got)
    assert max(misscored(params, got, SAMPLINGS[name]).values()) < TOLERANCE
    assert len(budget.outcomes) > 2 and sum(o.accepted for o in budget.outcomes) > 0
    right = sum(int((t.origins == Origin.ACCEPTED).sum()) for t in got)
    assert right == engine.stats.accepted_tokens > 0.2 * engine.stats.tokens
    for record in engine.stats.timeline:
        assert (record.rounds_A >= 1).all() and (record.emitted_A >= record.rounds_A).all()


class LookUpAndAsk(LookUp):
    """Asks the drafter every time as well, and keeps how its draft tokens were judged."""

    def __init__(self):
        super().__init__()
        self.judged = []

    def ahead(self, live, sizes, num_slots, num_positions):
        return DraftDecision(sizes[-1], lookup=True, ask=True) if sizes else None

    def observe(self, live, drafts, outcome):
        self.judged.append(outcome)


def test_a_drafter_that_is_asked_beside_is_judged_by_what_came(golden, rollout, requests):
    want, budget = golden("plain"), LookUpAndAsk()
    drafter = DrafterUnion([Oracle(want)], with_texts(want, requests).texts)
    assert not differences(want, rollout("plain", drafter=drafter, budget=budget))
    beside = [o for o in budget.judged if not o.tried]
    assert len(beside) > 2 and sum(int(o.checked_AN.sum()) for o in beside) > 100
    assert all(np.array_equal(o.right_AN, o.checked_AN) for o in beside)


def test_wrong_texts_and_no_texts(golden, rollout, requests):
    nothing = DrafterUnion([NgramDrafter()], LookupTexts({}, siblings=False))
    wrong = LookupTexts({g: [np.arange(40) % 7] for g in range(7)})
    for drafter in (nothing, DrafterUnion([NgramDrafter()], wrong)):
        got = rollout("plain", drafter=drafter, budget=LookUp())
        assert not differences(golden("plain"), got)


def test_one_slot_and_a_cache_that_grows(golden, rollout, requests):
    for change in ({"slots": 1, "min_slots": 1}, {"min_positions": 32}):
        engine = Engine(MODEL, dataclasses.replace(BASE, **change))
        got = rollout(
            "cool",
            requests[::3],
            drafter=with_texts(golden("cool"), requests),
            budget=LookUp(),
            engine=engine,
        )
        assert not differences(golden("cool"), got)
