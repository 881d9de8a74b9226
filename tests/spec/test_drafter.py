"""Drafts on the host by hand: stacking, cutting, and what is refused."""

import numpy as np
import pytest
from drafts_by_hand import NO_DRAFT, Draft, chain, stack

from spec.drafter import PADDING, LiveSlots

P = PADDING


def test_longer_drafts_are_cut():
    drafts = stack([chain([7, 8, 9]), NO_DRAFT, Draft([1, 2, 3], [-1, -1, 0])], 2)
    assert drafts.count_A.tolist() == [2, 0, 2]
    np.testing.assert_array_equal(drafts.tokens_AN, [[7, 8], [P, P], [1, 2]])
    np.testing.assert_array_equal(drafts.parents_AN, [[-1, 0], [-1, -1], [-1, -1]])


def test_a_fault_behind_the_cut_is_not_looked_at():
    stack([Draft([7, 8, 8], [-1, 0, 9])], 2)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1, 2], [-1, 1]), r"node 1 of request 1 .*parent 1.*−1 … 0"),
        (Draft([1], [-2]), "node 0 of request 1 .*parent -2"),
        (Draft([1], [0]), "node 0 of request 1 .*parent 0"),
        (Draft([3, -1], [-1, 0]), "node 1 of request 1 .*token -1"),
        (Draft([4, 4], [-1, -1]), "request 1 .*siblings"),
        (Draft([4, 5, 5], [-1, 0, 0]), "siblings"),
    ],
)
def test_drafts_that_are_not_trees_are_refused(draft, message):
    with pytest.raises(ValueError, match=message):
        stack([NO_DRAFT, draft], 3)


def test_cousins_may_share_a_token():
    stack([Draft([4, 5, 6, 6], [-1, -1, 0, 1])], 4)


def test_live_slots_show_prompt_and_response_and_a_choice_of_them():
    tokens_BL = np.arange(30, dtype=np.int32).reshape(3, 10)
    ids = np.array([70, 71])
    live = LiveSlots(
        np.array([2, 0]), ids, ids, ids, np.array([3, 1]), np.array([5, 4]), ids, tokens_BL
    )
    assert live.prompt(0).tolist() == [20, 21, 22] and live.response(0).tolist() == [23, 24]
    assert live.response(1).tolist() == [1, 2, 3]
    one = live.take(np.array([False, True]))
    assert len(one) == 1 and one.request_ids_A.tolist() == [71]
    assert one.prompt(0).tolist() == [0]
