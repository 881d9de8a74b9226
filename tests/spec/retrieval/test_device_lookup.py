"""Looking draft tokens up in texts: by hand, and against a plain search."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec.drafter import LiveSlots
from spec.retrieval.device_lookup import CONTEXT_TOKENS, NO_TOKEN, Texts, chains, find, judge
from spec.retrieval.lookup_texts import LookupTexts, contexts
from spec.tree import PADDING

GAP = PADDING


def texts(text, context, expected=None, width=12):
    """One slot; the context is filled up in front."""
    text_L = np.full(width, PADDING, np.int32)
    text_L[: len(text)] = text
    context_K = np.full(CONTEXT_TOKENS, NO_TOKEN, np.int32)
    context_K[CONTEXT_TOKENS - len(context) :] = context
    following = width if expected is None else expected
    return Texts(jnp.asarray(text_L)[None], jnp.asarray(context_K)[None], jnp.asarray([following]))


@pytest.mark.parametrize(
    ("text", "context", "expected", "want"),
    [
        ([5, 6, 7, 8], [5, 6], None, 2),
        ([9, 6, 7, GAP, 5, 6, 8], [5, 6], None, 6),  # the longer match, not the first
        ([5, 6, 7, GAP, 5, 6, 8], [5, 6], None, 2),  # the first of equals
        ([5, 6, GAP, 5, 6, 8], [5, 6], None, 5),  # nothing follows the first
        ([4, 6, 7], [5, 6], None, 12),  # one token is no match
        ([5, 6, GAP, 7, 8], [6, 7], None, 12),  # none across a gap
        ([5, 6, 7, 1, 2, 3], [5, 6], 4, 2),  # a match of two beats going on,
        ([4, 6, 7, 1, 2, 3], [5, 6], 4, 4),  # which beats a match of one
        ([5, 6, 7, 5, 6, 3], [5, 6], 5, 5),  # going on decides among equals
        ([5, 6], [5, 6], 2, 12),  # the text is over
    ],
)
def test_places_by_hand(text, context, expected, want):
    assert find(texts(text, context, expected)).tolist() == [want]


@pytest.mark.parametrize("seed", range(20))
def test_places_against_a_plain_search(seed):
    rng = np.random.default_rng(seed)
    L, B = 40, 6
    text_BL = rng.integers(-1, 3, (B, L)).astype(np.int32)
    context_BK = rng.integers(0, 3, (B, CONTEXT_TOKENS)).astype(np.int32)
    next_B = rng.integers(1, L + 1, B).astype(np.int32)
    got = find(Texts(jnp.asarray(text_BL), jnp.asarray(context_BK), jnp.asarray(next_B))).tolist()
    for text, context, expected, place in zip(text_BL, context_BK, next_B, got, strict=True):
        best, want = 0, L
        for i in range(L - 1):
            if text[i + 1] < 0:
                continue
            k = 0
            while k < min(CONTEXT_TOKENS, i + 1) and text[i - k] == context[-1 - k]:
                k += 1
            score = 2 * k + 3 * (i + 1 == expected)
            if (k >= 2 or i + 1 == expected) and score > best:
                best, want = score, i + 1
        assert place == want


def test_chains_end_with_their_piece():
    text = jnp.asarray([[5, 6, 7, GAP, 8, 9]] * 3)
    tree = chains(text, jnp.asarray([1, 4, 6]), 4)
    assert tree.tokens_BN.tolist() == [[0, 6, 7, GAP], [0, 8, 9, GAP], [0, GAP, GAP, GAP]]
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 2]] * 3


def test_outcome_by_hand():
    # a slot of chains of 3, 3 and 0 draft tokens: all right, one right, none to try; a slot at rest
    got = judge(np.array([[4, 2, 1], [0, 0, 0]]), np.array([[3, 3, 0], [0, 0, 0]]), 4)
    assert got.reached_AJ.tolist() == [[3, 2, 1], [0, 0, 0]]
    assert got.accepted_AJ.tolist() == [[2, 1, 1], [0, 0, 0]]
    assert (got.tried, got.rounds, got.accepted) == (6, 3, 4)


def live(groups, responses, prompt=(1, 2, 3)):
    """Requests 0, 1, … in rows 0, 1, …, all with one prompt."""
    A, P = len(groups), len(prompt)
    tokens = np.zeros((A, 40), np.int32)
    for row, response in zip(tokens, responses, strict=True):
        row[: P + len(response)] = [*prompt, *response]
    ids = np.arange(A)
    total = np.array([P + len(r) for r in responses])
    return LiveSlots(ids, ids, np.asarray(groups), ids, np.full(A, P), total, ids, tokens)


def pieces(row):
    out = [[]]
    for token in row.tolist():
        if token == GAP:
            out.append([])
        else:
            out[-1].append(token)
    return [p for p in out if p]


def test_texts_hold_history_then_siblings_each_after_the_prompt():
    book = LookupTexts({0: [np.array([7, 8]), np.array([9])]}, num_tokens=40)
    text_BL, context_BK, next_B = book.fill(live([0, 1, 0], [[4], [5, 5], [6]]), 4)
    of_first = [[1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 4], [1, 2, 3, 6]]
    assert pieces(text_BL[0]) == pieces(text_BL[2]) == of_first
    assert pieces(text_BL[1]) == [[1, 2, 3, 5, 5]]
    assert pieces(text_BL[3]) == [] and next_B.tolist() == [40] * 4
    assert context_BK[1].tolist() == [NO_TOKEN] * 3 + [1, 2, 3, 5, 5]
    assert context_BK[3].tolist() == [NO_TOKEN] * CONTEXT_TOKENS
    book.finished(live([1], [[5, 6]]))
    text_BL, *_ = book.fill(live([0, 1], [[4], []]), 2)
    assert pieces(text_BL[1]) == [[1, 2, 3, 5, 6], [1, 2, 3]]


def test_texts_that_are_full_and_texts_without_siblings():
    book = LookupTexts({0: [np.arange(10, 16), np.arange(20, 26)]}, num_tokens=16)
    text_BL, *_ = book.fill(live([0], [[4]]), 1)
    assert pieces(text_BL[0]) == [[1, 2, 3, *range(10, 16)], [1, 2, 3, 20, 21, 22]]
    alone = LookupTexts({0: [np.array([7])]}, siblings=False, num_tokens=16)
    alone.finished(live([0], [[4]]))
    text_BL, *_ = alone.fill(live([0], [[4]]), 1)
    assert pieces(text_BL[0]) == [[1, 2, 3, 7]]


def test_the_own_last_response_comes_first_and_goes_on_at_the_same_place():
    last = {0: np.array([7, 8, 9]), 1: np.array([6])}
    book = LookupTexts({0: [np.array([5])]}, last=last, siblings=False, num_tokens=16)
    text_BL, _, next_B = book.fill(live([0, 0, 0], [[4], [4], [4, 4]]), 3)
    assert pieces(text_BL[0]) == [[1, 2, 3, 7, 8, 9], [1, 2, 3, 5]]
    assert pieces(text_BL[1]) == [[1, 2, 3, 6], [1, 2, 3, 5]]
    assert pieces(text_BL[2]) == [[1, 2, 3, 5]]  # request 2 had none
    # behind one token: the 8; the other's last response is over, the third has none
    assert next_B.tolist() == [4, 4, 16]
    assert text_BL[0, 4] == 8 and text_BL[1, 4] == PADDING


def test_contexts_of_long_requests():
    got = contexts(live([0], [list(range(10, 20))]), 1)
    assert got[0].tolist() == list(range(12, 20))
