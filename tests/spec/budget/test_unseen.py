"""Decisions for rounds that draft on the device, taken before there are drafts."""

import numpy as np
import pytest
from drafts_by_hand import chain, stack
from live_by_hand import live_slots

from reprise.spec.budget.aimd import Aimd
from reprise.spec.budget.bandit import BanditBudget, make_bandit
from reprise.spec.budget.budget import FixedBudget, SeeingBudget
from reprise.spec.budget.config import TunerConfig
from reprise.spec.budget.goodput import REPEATS, Goodput
from reprise.spec.budget.union import DrafterUnion
from reprise.spec.drafter import Acceptance, Drafter, Source
from reprise.spec.round_times import RoundTimes

B, SIZES = 4, [8, 16, 32]
TIMES = RoundTimes({(B, m, 64): 1.0 for m in (B, *SIZES)})


class OnDevice(Drafter):
    source, depth = Source.LEARNED, 6

    def in_rounds(self):
        return self

    def propose(self, live, max_nodes_A, max_nodes):
        return stack([chain([5])] * len(live), max_nodes)


class OnHost(OnDevice):
    def in_rounds(self):
        return None


@pytest.mark.parametrize(
    ("most", "longest", "want"),
    [(3, 31, (16, 3)), (4, 31, (32, 4)), (40, 31, (32, 7)), (40, 3, (16, 3)), (1, 31, (8, 1))],
)
def test_fixed_trees_are_of_the_smallest_size_that_holds_them(most, longest, want):
    got = FixedBudget(most).choose_on_device(live_slots(3), longest, SIZES, B)
    assert (got.num_nodes, got.tree_tokens) == want and got.num_rounds > 1
    assert SeeingBudget(most).choose_on_device(live_slots(3), longest, SIZES, B) is None
    assert FixedBudget(most).choose_on_device(live_slots(3), longest, [], B) is None


def test_windows_are_of_drafts_that_are_seen():
    assert Aimd(TIMES).choose_on_device(live_slots(3), 31, SIZES, B) is None


def test_goodput_repeats_its_choice_and_looks_again():
    budget, live, found = Goodput(TIMES), live_slots(3), stack([chain([1, 2, 3])] * 3, 7)
    assert budget.choose_on_device(live, 31, SIZES, B) is None  # nothing was chosen yet
    accepted_AN = np.arange(7) < [[2], [2], [2]]
    for _ in range(2):
        chosen = budget.choose(live, found, SIZES, B, 64)
        budget.observe(live, found, Acceptance(True, accepted_AN, found.prob_AN > 0))
        for _ in range(REPEATS):
            got = budget.choose_on_device(live, 31, SIZES, B)
            assert got.num_nodes == chosen.num_nodes == 16
            assert got.tree_tokens == 7  # as many as a tree may have, not 3 of each
            assert (got.scale_A < 1).all()
        assert budget.choose_on_device(live, 31, SIZES, B) is None
    budget.choose(live, found, SIZES, B, 64)
    assert budget.choose_on_device(live, 31, [4, 8], 2) is None  # another number of slots
    assert budget.choose_on_device(live_slots(2), 31, SIZES, B) is None  # too few
    assert budget.choose_on_device(live, 31, SIZES, B) is not None


def test_a_bandit_has_its_arm_s_nodes_and_learns_of_each_round():
    config = TunerConfig(thresholds=(1,), verify_tokens=(3,), depths=(2,))
    union = DrafterUnion([OnDevice()], ["learned"])
    bandit = make_bandit(config, ["learned"], 3, {"learned": 2}, seed=0)
    budget, live = BanditBudget(bandit, TIMES, union), live_slots(3)
    budget.skips(live, B, 64)  # plain decoding first
    budget.skips(live, B, 64)
    got = budget.choose_on_device(live, 31, SIZES, B)
    assert (got.num_nodes, got.tree_tokens) == (16, 3)
    found, (_, arm) = stack([chain([1, 2, 3])] * 3, 3), bandit.candidates(3)
    accepted_AN = np.ones((3, 3), bool)
    budget.observe(live, found, Acceptance(True, accepted_AN, accepted_AN))
    assert arm.name == "learned depth 2 × 3" and bandit.median_reward(arm, 3) == 12.0


@pytest.mark.parametrize(
    ("drafters", "skipped", "want"),
    [
        ({"learned": OnDevice}, (), True),
        ({"own": OnHost, "learned": OnDevice}, (), False),
        ({"own": OnHost, "learned": OnDevice}, ("own",), True),
        ({"own": OnHost, "learned": OnDevice}, ("learned",), False),
        ({"learned": OnDevice}, ("learned",), False),
    ],
)
def test_of_a_union_one_alone_can_draft_on_the_device(drafters, skipped, want):
    made = {name: make() for name, make in drafters.items()}
    union = DrafterUnion(list(made.values()), list(made))
    union.skipped = frozenset(skipped)
    assert union.in_rounds() is (made["learned"] if want else None)
