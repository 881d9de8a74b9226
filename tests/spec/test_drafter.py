"""Live slots, and which draft tokens were accepted."""

from __future__ import annotations

import numpy as np
from drafts_by_hand import drafts

from reprise.spec.drafter import (
    LiveSlots,
    Source,
    by_source,
    longest_paths,
    plain_acceptance,
    round_acceptance,
    sums,
)


def test_live_slots_show_prompt_and_response_and_a_choice_of_them():
    tokens_BL = np.arange(30, dtype=np.int32).reshape(3, 10)
    ids = np.array([70, 71])
    live = LiveSlots(np.array([2, 0]), ids, ids, np.array([3, 1]), np.array([5, 4]), ids, tokens_BL)
    assert live.prompt(0).tolist() == [20, 21, 22] and live.response(0).tolist() == [23, 24]
    assert live.response(1).tolist() == [1, 2, 3]
    one = live.take(np.array([False, True]))
    assert len(one) == 1 and one.request_ids_A.tolist() == [71]
    assert one.prompt(0).tolist() == [0]


def test_acceptance_by_hand():
    tree = drafts([(-1, 5, 1.0), (-1, 6, 0.5), (1, 7, 0.4), (2, 5, 0.3)], [(-1, 5, 1.0)], [])
    tokens, emitted = np.array([[6, 7, 9], [4, 0, 0], [1, 0, 0]]), np.array([3, 1, 1])
    taken = np.array([3, 1, 0])
    got = round_acceptance(tree, taken, tokens, emitted)
    assert got.verified and np.argwhere(got.accepted_AN).tolist() == [[0, 1], [0, 2]]
    assert got.observed_AN.sum(axis=1).tolist() == [3, 1, 0]
    accepted_A, expected_A = sums(tree, got)
    assert accepted_A.tolist() == [2, 0, 0]
    np.testing.assert_allclose(expected_A, [1.9, 1.0, 0.0])
    tree.sources_AN[0, 1] = Source.OWN
    want = {Source.OWN: 1, Source.OTHER: 1}
    assert by_source(tree.sources_AN, got.accepted_AN).tolist() == [want.get(s, 0) for s in Source]
    # the last token of a round is no draft token, even if it equals one
    ended = round_acceptance(tree, taken, tokens, np.array([2, 1, 1]))
    assert np.argwhere(ended.accepted_AN).tolist() == [[0, 1]]
    # all that plain decoding draws may have been drafted
    got = plain_acceptance(tree, tokens, np.array([2, 1, 1]))
    assert not got.verified and np.argwhere(got.accepted_AN).tolist() == [[0, 1], [0, 2]]
    # the fourth draft token of the first request is for its third token, which is not known yet
    assert np.argwhere(got.observed_AN).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]


def test_the_longest_path_of_what_was_verified():
    tree = drafts([(-1, 5, 1.0), (-1, 6, 0.5), (1, 7, 0.4), (2, 5, 0.3)], [(-1, 5, 1.0)], [])
    tokens, emitted = np.array([[6, 7, 9]] * 3), np.array([3, 1, 1])
    for taken, longest in (([4, 1, 0], [3, 1, 0]), ([2, 1, 0], [1, 1, 0])):
        acceptance = round_acceptance(tree, np.array(taken), tokens, emitted)
        assert longest_paths(tree, acceptance.observed_AN).tolist() == longest
