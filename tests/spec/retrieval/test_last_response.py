"""The old response read on: in place, behind a change, a few places further, by hand."""

import numpy as np
import pytest

from spec.drafter import LiveSlots, Source
from spec.retrieval.last_response import FOUND, LOST, NEXT, LastResponseDrafter

OLD = [10, 11, 12, 13, 14, 15, 16, 17]


def live(response, request_id=5):
    tokens = np.asarray([[1, 2, *response]], np.int32)
    one = np.ones(1, np.int32)
    return LiveSlots(
        rows_A=0 * one,
        request_ids_A=np.array([request_id]),
        group_ids_A=0 * one,
        prompt_tokens_A=2 * one,
        total_tokens_A=tokens.shape[1] * one,
        remaining_tokens_A=99 * one,
        tokens_BL=tokens,
    )


def propose(drafter, response, most=3, **who):
    drafts = drafter.propose(live(response, **who), np.array([most]), 4)
    n = int(drafts.count_A[0])
    assert drafts.parents_AN[0, :n].tolist() == list(range(-1, n - 1))
    return drafts.tokens_AN[0, :n].tolist(), drafts.prob_AN[0, :n].tolist(), drafts


@pytest.fixture
def drafter():
    return LastResponseDrafter({5: np.asarray(OLD, np.int32), 6: np.asarray([7], np.int32)})


def test_it_continues_at_the_same_position(drafter):
    tokens, probs, drafts = propose(drafter, [])
    assert tokens == [10, 11, 12]
    assert probs == pytest.approx([FOUND, FOUND * NEXT, FOUND * NEXT**2])
    assert set(drafts.sources_AN[0].tolist()) == {Source.LAST}
    assert propose(drafter, OLD[:6])[0] == [16, 17]
    assert propose(drafter, OLD)[0] == []
    assert propose(drafter, OLD[:2], most=9)[0] == [12, 13, 14, 15]  # room for four
    assert propose(drafter, OLD[:2], most=0)[0] == []


def test_behind_a_replaced_token_it_continues_at_the_same_position(drafter):
    tokens, probs, _ = propose(drafter, [10, 11, 99])
    assert tokens == [13, 14, 15] and probs[0] == pytest.approx(LOST)
    tokens, probs, _ = propose(drafter, [10, 11, 99, 13])
    assert tokens == [14, 15, 16] and probs[0] == pytest.approx(FOUND)


def test_behind_inserted_or_omitted_tokens_the_text_is_found_again(drafter):
    put_in = [10, 11, 98, 99, 12]
    assert propose(drafter, put_in)[0] == [15, 16, 17]  # one token is not enough
    tokens, probs, _ = propose(drafter, [*put_in, 13])
    assert tokens == [14, 15, 16] and probs[0] == pytest.approx(FOUND)
    left_out = LastResponseDrafter({5: np.asarray(OLD, np.int32)})
    assert propose(left_out, [10, 13, 14])[0] == [15, 16, 17]
    assert propose(left_out, [10, 13, 14, 15])[0] == [16, 17]  # and it stays found


def test_a_request_without_an_old_response_gets_nothing(drafter):
    assert propose(drafter, [10], request_id=9)[0] == []
    assert propose(drafter, [8], request_id=6)[0] == []
    assert propose(LastResponseDrafter({}), [])[0] == []
