"""Drafts on the host by hand: stacking and cutting."""

import numpy as np

from spec.drafter import LiveSlots


def test_live_slots_show_prompt_and_response_and_a_choice_of_them():
    tokens_BL = np.arange(30, dtype=np.int32).reshape(3, 10)
    ids = np.array([70, 71])
    live = LiveSlots(np.array([2, 0]), ids, ids, np.array([3, 1]), np.array([5, 4]), ids, tokens_BL)
    assert live.prompt(0).tolist() == [20, 21, 22] and live.response(0).tolist() == [23, 24]
    assert live.response(1).tolist() == [1, 2, 3]
    one = live.take(np.array([False, True]))
    assert len(one) == 1 and one.request_ids_A.tolist() == [71]
    assert one.prompt(0).tolist() == [0]
