"""The speculator alone: when it asks its drafter."""

import dataclasses

import numpy as np
import pytest
from drafts_by_hand import NO_DRAFT, chain, stack
from live_by_hand import live_texts
from shapes import PLAIN

from reprise.rl.engine.speculate import Speculator
from reprise.rl.records.stats import EngineStats
from reprise.spec.budget.goodput import make_budget
from reprise.spec.drafter import Drafter
from reprise.spec.round_times import RoundTimes

LIVE = live_texts(*[(1, 2, 3)] * 4)
TIMES = RoundTimes({(4, 4 * n, 32): 1.0 for n in (1, 2, 4)})


class Counted(Drafter):
    """Drafts the same for every request, and counts how often it is asked."""

    def __init__(self, arrives_later=False):
        self.arrives_later, self.draft, self.asked = arrives_later, NO_DRAFT, 0
        self.heard = []  # the requests whose tokens it was told of, and when it was asked

    def committed(self, live):
        self.heard.append(live.request_ids_A.tolist())

    def propose(self, live, max_nodes_A, max_nodes):
        self.asked += 1
        self.heard.append("asked")
        return stack([self.draft] * len(live), max_nodes)


def asked_at(speculator, num_rounds, num_slots=4, first=0):
    """Return the rounds, of so many in a row, in which the drafter is asked."""
    asked, drafter = [], speculator.drafter
    for r in range(first, first + num_rounds):
        before = drafter.asked
        live = dataclasses.replace(LIVE, total_tokens_A=LIVE.total_tokens_A + r)
        speculator.decide(live, num_slots, 32)
        if drafter.asked > before:
            asked.append(r)
    return asked


def speculator(budget, arrives_later=False):
    drafting = Counted(arrives_later), make_budget(budget, TIMES)
    return Speculator(PLAIN, drafting, EngineStats())


@pytest.mark.parametrize("budget", ["fixed:3", "aimd"])
def test_without_a_draft_token_nobody_is_asked_for_a_while(budget):
    spec = speculator(budget)
    assert asked_at(spec, 60) == [0, 2, 6, 14, 30, 46]
    assert asked_at(spec, 1, num_slots=8, first=60) == [60]  # another size of batch
    spec.drafter.draft = chain([5, 6])
    assert asked_at(spec, 3, first=100) == [100, 101, 102]
    spec.drafter.draft = NO_DRAFT
    assert asked_at(spec, 5, first=103) == [103, 105]


def test_drafts_that_arrive_later_are_looked_for_in_every_round():
    assert asked_at(speculator("fixed:3", arrives_later=True), 5) == [0, 1, 2, 3, 4]


def test_rounds_without_a_draft_token_are_fetched_together():
    spec = speculator("fixed:3")
    _, first = spec.decide(LIVE, 4, 32)
    assert first.num_rounds == 2 and first.taken_A is None
    later = dataclasses.replace(LIVE, total_tokens_A=LIVE.total_tokens_A + 2)
    assert spec.decide(later, 4, 32)[1].num_rounds == min(4, PLAIN.rounds_per_fetch)
    assert spec.drafter.asked == 2


def told(spec, num_rounds, first=0):
    """Return what the drafter heard in so many rounds, each with its commit."""
    spec.drafter.heard.clear()
    for r in range(first, first + num_rounds):
        live = dataclasses.replace(LIVE, total_tokens_A=LIVE.total_tokens_A + r)
        spec.decide(live, 4, 32)
        spec.committed(live)
    return spec.drafter.heard


def test_a_drafter_hears_of_plain_rounds_once_drafts_are_wanted_again():
    everybody, spec = [0, 1, 2, 3], speculator("fixed:3")
    assert told(spec, 2) == ["asked"]
    assert told(spec, 1, first=2) == [everybody, "asked"], "before it is asked again"
    spec.drafter.draft = chain([5, 6])
    assert told(spec, 2, first=100) == [everybody, "asked", everybody, "asked", everybody]


def test_a_drafter_that_others_wait_for_hears_of_every_round():
    everybody = [0, 1, 2, 3]
    spec = speculator("fixed:3", arrives_later=True)
    assert told(spec, 2) == ["asked", everybody, "asked", everybody]


def test_only_requests_that_drafts_are_wanted_for_are_caught_up_with():
    spec = speculator("fixed:3")
    told(spec, 1)

    def first_two(live, num_slots):
        return np.array([3, 3, 0, 0])

    spec._budget.limits, everybody = first_two, [0, 1, 2, 3]
    assert told(spec, 1, first=50) == [[0, 1], "asked"]
    del spec._budget.limits
    spec.drafter.draft = chain([5, 6])
    assert told(spec, 1, first=100) == [everybody, "asked", everybody]
