"""What a drafting worker knows of its requests: commits in all orders, and what is assumed."""

import numpy as np
import pytest
from fake_ahead import commit
from hypothesis import given
from hypothesis import strategies as st

from reprise.spec.decoupled.ahead import RequestTexts
from reprise.spec.decoupled.messages import DraftPlan


def texts_with(*tokens, assumed=(), prob=None, rows=2):
    texts = RequestTexts(rows, 20)
    assert texts.commit(commit(tokens)) == (0, 0)
    assume(texts, *assumed, prob=prob)
    return texts


def assume(texts, *tokens, prob=None):
    prob = [0.5 ** (i + 1) for i in range(len(tokens))] if prob is None else prob
    arrays = np.array(tokens, np.int32), np.array(prob, np.float32)
    texts.assume(texts.requests[0], *arrays)


def text(texts, request_id=0):
    live = texts.live([request_id])
    return live.tokens_BL[live.rows_A[0], : live.total_tokens_A[0]].tolist()


def committed(texts):
    return text(texts)[: texts.requests[0].committed]


def test_a_new_request():
    texts = RequestTexts(2, 20)
    plan, processing = DraftPlan(2, False), (0.5, 3.0, 0.75)
    given = commit([1, 2, 3], request=7, left=9, chain=[4], plan=plan, processing=processing)
    assert texts.commit(given) == (0, 0)
    request = texts.requests[7]
    assert (request.committed, request.num_assumed) == (3, 0) and request.commit is given
    assert request.wants
    live = texts.live([7])
    assert live.response(0).tolist() == [3] and live.prompt(0).tolist() == [1, 2]
    assert live.request_ids_A.tolist() == [7] and live.remaining_tokens_A.tolist() == [9]
    assert live.processing_A3.tolist() == [list(processing)]


def test_what_is_assumed_lies_behind_what_is_committed():
    texts = texts_with(1, 2, assumed=[5, 6])
    assume(texts, 7)
    assert text(texts) == [1, 2, 5, 6, 7] and committed(texts) == [1, 2]
    assert texts.requests[0].prob.tolist() == [0.5, 0.25, 0.125]
    assert texts.assumed(texts.requests[0]).tolist() == [5, 6, 7]
    assert texts.live([0]).remaining_tokens_A.tolist() == [47]


def test_a_commit_that_confirms():
    texts = texts_with(1, 2, assumed=[5, 6, 7])
    request = texts.requests[0]
    request.wants = False
    assert texts.commit(commit([5, 6], first=2, round=2, left=48)) == (2, 2)
    assert text(texts) == [1, 2, 5, 6, 7] and committed(texts) == [1, 2, 5, 6]
    assert request.prob.tolist() == [0.5], "of a probability behind what was right"
    assert request.commit.round == 2 and request.wants


def test_a_repeated_commit_changes_nothing():
    texts = texts_with(1, 2, assumed=[5, 6])
    assert texts.commit(commit([5], first=2, round=2)) == (1, 1)
    request = texts.requests[0]
    request.wants = False
    for again in (commit([5], first=2, round=2), commit([1, 2], round=1)):
        assert texts.commit(again) is None
        assert text(texts) == [1, 2, 5, 6]
        assert (request.commit.round, request.num_assumed, request.wants) == (2, 1, False)


def test_a_commit_that_says_more_than_is_new():
    """A request is told anew: from its first token."""
    texts = texts_with(1, 2, assumed=[5, 6])
    assert texts.commit(commit([1, 2, 5, 8], round=4)) == (1, 2)
    assert text(texts) == [1, 2, 5, 8]


def test_a_commit_that_does_not_follow():
    texts = texts_with(1, 2, assumed=[5])
    assert texts.commit(commit([7, 8], first=3, round=3)) is None
    assert text(texts) == [1, 2, 5] and texts.requests[0].commit.round == 1
    # the one that it lacked comes late: then what it knows is behind, never wrong
    assert texts.commit(commit([5], first=2, round=2)) == (1, 1)
    assert text(texts) == [1, 2, 5]


def test_an_unknown_request_begins_with_its_first_token():
    texts = RequestTexts(2, 20)
    assert texts.commit(commit([5], first=2, round=2)) is None and not texts.requests


def test_no_row_is_free():
    texts = texts_with(1, 2, rows=1)
    assert texts.commit(commit([1, 2], request=1)) is None and list(texts.requests) == [0]
    texts.close([0])
    assert texts.commit(commit([3, 4], request=1)) == (0, 0) and text(texts, 1) == [3, 4]


@pytest.mark.parametrize("first", [0, 2])
def test_a_request_longer_than_a_row(first):
    texts = RequestTexts(2, 5)
    if first:
        texts.commit(commit([1, 2]))
    assert texts.commit(commit(range(first, 7), first=first)) is None
    assert len(texts.requests) == bool(first)


def test_who_leaves_is_given_back_as_it_was():
    texts = texts_with(1, 2, assumed=[5])
    texts.commit(commit([3, 4, 6], request=1))
    gone = texts.close([0, 9])
    assert gone.request_ids_A.tolist() == [0] and gone.total_tokens_A.tolist() == [3]
    assert list(texts.requests) == [1] and len(texts.close([0])) == 0
    assert len(texts.live([])) == 0 and texts.live([]).processing_A3.shape == (0, 3)


@given(st.lists(st.sampled_from("acrn"), max_size=12), st.randoms(use_true_random=False))
def test_whatever_comes_what_is_committed_is_what_was_said(kinds, random):
    """Assume, commit, repeat, and miss one: the text begins with the longest that follows."""
    truth = [random.randint(1, 2) for _ in range(40)]
    texts, known = RequestTexts(1, 60), 3
    texts.commit(commit(truth[:3]))
    for kind in kinds:
        request = texts.requests[0]
        n = random.randint(1, 3)
        if kind == "a":
            assume(texts, *(random.randint(1, 2) for _ in range(n)))
        elif kind == "c":
            ahead = texts.assumed(request).tolist()
            pairs = list(zip(ahead, truth[known : known + n], strict=False))
            same = [x == y for x, y in pairs]
            right = same.index(False) if False in same else len(same)
            got = texts.commit(commit(truth[known : known + n], first=known))
            assert got == (right, min(right + 1, len(same)))
            left = ahead[n:] if right == len(same) else []
            known += n
            assert texts.assumed(request).tolist() == left
        elif kind == "r":
            assert texts.commit(commit(truth[:known])) is None
        else:
            assert texts.commit(commit([3], first=known + 1)) is None
        assert committed(texts) == truth[:known]
        assert text(texts)[:known] == truth[:known] and (request.prob <= 1).all()
