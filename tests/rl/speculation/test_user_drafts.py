"""Drafts and decisions of users are checked before other code uses them."""

from __future__ import annotations

import numpy as np
import pytest

from reprise.rl.speculation.user_drafts import UserBudget, UserDrafter, checked_drafts
from reprise.spec.budget.budget import Budget, DraftDecision, FixedBudget
from reprise.spec.drafter import Drafter, Drafts, LiveSlots, Source, no_drafts

MOST_A = np.array([2, 4])


def drafts(**changes) -> Drafts:
    """A chain of two tokens, and a tree of three."""
    fields = {
        "tokens_AN": np.array([[5, 6, 0, 0], [1, 2, 3, 0]]),
        "parents_AN": np.array([[-1, 0, 0, 0], [-1, -1, 1, 0]]),
        "prob_AN": np.array([[0.5, 0.25, 0, 0], [0.5, 0.5, 0.1, 0]]),
        "sources_AN": np.full((2, 4), 200),
        "count_A": np.array([2, 3]),
    }
    return Drafts(**fields | changes)


def changed(field: str, at, value) -> Drafts:
    arrays = drafts()
    getattr(arrays, field)[at] = value
    return arrays


def live(count: int = 2) -> LiveSlots:
    one_A = np.ones(count, int)
    return LiveSlots(*(np.arange(count),) * 3, one_A, one_A, one_A * 9, np.zeros((count, 4), int))


def test_drafts_get_the_dtypes_and_the_source_of_ours():
    checked, ours = checked_drafts("it", drafts(), MOST_A, 4, 10), no_drafts(2, 4)
    assert [x.dtype for x in checked] == [x.dtype for x in ours]
    assert checked.tokens_AN.tolist() == drafts().tokens_AN.tolist()
    assert (checked.sources_AN == Source.OTHER).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "expected spec.drafter.Drafts, got NoneType"),
        (drafts(tokens_AN=np.zeros((2, 3))), r"tokens_AN of shape \(2, 4\), got \(2, 3\)"),
        (drafts(count_A=np.zeros(3)), r"count_A of shape \(2,\), got \(3,\)"),
        (drafts(count_A=np.array([3, 3])), r"at most \[2, 4\] draft tokens, got \[3, 3\]"),
        (changed("count_A", 0, -1), r"at most \[2, 4\] draft tokens, got \[-1, 3\]"),
        (changed("tokens_AN", (0, 1), 10), r"draft token 1 of request 0 is 10 behind"),
        (changed("tokens_AN", (1, 0), -1), r"draft token 0 of request 1 is -1 behind"),
        (changed("parents_AN", (1, 2), 2), r"a parent in −1 … 1"),
        (changed("parents_AN", (0, 0), -2), r"behind parent -2"),
        (changed("prob_AN", (1, 2), 0.6), r"of at most 0\.5, the one before"),
        (changed("prob_AN", (0, 0), np.nan), r"with probability nan"),
        (changed("prob_AN", (0, 0), 1.5), r"of at most 1, the one before"),
    ],
)
def test_drafts_that_are_no_trees_are_named(wrong, message):
    with pytest.raises(ValueError, match=f"it: .*{message}"):
        checked_drafts("it", wrong, MOST_A, 4, 10)


def test_padding_is_not_checked():
    checked_drafts("it", changed("tokens_AN", (0, 3), 99), MOST_A, 4, 10)


class Heard(Drafter):
    """Keeps what it was told."""

    can_lag = False

    def __init__(self):
        self.told = []

    def propose(self, live, max_nodes_A, max_nodes):
        return no_drafts(len(live), max_nodes)

    def observe(self, *given):
        self.told.append("observe")

    def committed(self, live):
        self.told.append("committed")

    def finished(self, live):
        self.told.append("finished")

    def left(self, live):
        self.told.append("left")


def test_a_drafter_hears_all_that_ours_hear():
    heard = Heard()
    drafter = UserDrafter("mine.py:Heard", heard, 10)
    assert not drafter.can_lag and drafter.in_rounds() is None
    assert not drafter.propose(live(), MOST_A, 4).count_A.any()
    for method in ("committed", "catch_up", "finished", "left"):
        getattr(drafter, method)(live())
    drafter.observe(None, None)
    assert heard.told == ["committed", "committed", "finished", "left", "observe"]


class Says(Budget):
    """Returns what it was made of."""

    def __init__(self, limits=(1, 1), decision=None):
        self._limits, self._decision = limits, decision

    def limits(self, live, num_slots):
        return self._limits

    def choose(self, live, drafts, sizes, num_slots, num_positions):
        return self._decision


def chosen(budget):
    return UserBudget("mine.py:Says", budget).choose(live(), drafts(), (4, 8), 2, 16)


def test_decisions_for_compiled_rounds_are_taken():
    for nodes in (2, 4, 8):
        assert chosen(Says(decision=DraftDecision(nodes))).num_nodes == nodes
    assert chosen(FixedBudget()).num_nodes == 8
    budget = UserBudget("mine.py:Says", FixedBudget(3))
    assert budget.limits(live(), 2).tolist() == [3, 3]
    assert budget.choose_on_device(live(), 4, (4, 8), 2) is None, "the host sees all drafts"
    assert budget.skips(live(), 2, 16) == frozenset()


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (None, "expected spec.budget.budget.DraftDecision, got NoneType"),
        (DraftDecision(5), r"num_nodes of 2, for plain decoding, or of \[4, 8\], .* got 5 and 0"),
        (DraftDecision(4, tree_tokens=1), "tree_tokens=0, got 4 and 1"),
    ],
)
def test_other_decisions_are_named(decision, message):
    with pytest.raises(ValueError, match=f"^Speculation.budget: mine.py:Says.choose: .*{message}"):
        chosen(Says(decision=decision))


def test_a_limit_is_expected_for_each_request():
    with pytest.raises(ValueError, match=r"limits: expected a limit for each of 2 .*shape \(3,\)"):
        UserBudget("mine.py:Says", Says((1, 2, 3))).limits(live(), 2)
