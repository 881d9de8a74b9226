"""Ways to draft ahead, with drafters that count: what is drafted when, and how far."""

import numpy as np
import pytest
from fake_ahead import CountsOn, commit
from hypothesis import given
from hypothesis import strategies as st

from reprise.spec.decoupled.ahead import (
    DECAY,
    PRIOR_DRAFTS,
    PRIOR_PROB,
    SECOND,
    Enumerating,
    FreeRunning,
    cases_tree,
)
from reprise.spec.decoupled.messages import DraftPlan

COUPLED = DraftPlan(3, decoupled=False)


def told(ahead, *commits, closed=()):
    ahead.update(commits, closed)
    return ahead


def drafted(ahead):
    """Of each block of a step: (request, round, base, its tokens)."""
    return [(*block[:3], block.tokens_N.tolist()) for block in ahead.step()]


def running(drafter=None):
    return FreeRunning(drafter or CountsOn(), 4, 60)


# --- chains that go on ----------------------------------------------------------------------


def test_a_window_at_a_time_and_never_more_than_two_ahead():
    ahead = told(running(), commit([1, 10]))
    (first,) = ahead.step()
    assert first.tokens_N.tolist() == [11, 12, 13] and first.parents_N.tolist() == [-1, 0, 1]
    assert first.prob_N.tolist() == [0.5, 0.25, 0.125]
    (second,) = ahead.step()
    assert second.tokens_N.tolist() == [11, 12, 13, 14, 15, 16], "all that is behind the base"
    assert second.parents_N.tolist() == [-1, 0, 1, 2, 3, 4]
    assert second.prob_N.tolist() == [0.5 ** (i + 1) for i in range(6)]
    assert (second.round, second.base_tokens) == (1, 2)
    assert ahead.step() == []


def test_a_chain_goes_on_while_its_window_is_verified():
    ahead = told(running(), commit([1, 10]))
    ahead.step(), ahead.step()
    told(ahead, commit([11], first=2, round=2))  # 5 ahead of it, more than a window
    assert ahead.step() == []
    told(ahead, commit([12, 13], first=3, round=3))  # 3 ahead
    assert drafted(ahead) == [(0, 3, 5, [14, 15, 16, 17, 18, 19])]


def test_a_chain_that_was_wrong_is_rolled_back():
    drafter = CountsOn()
    ahead = told(running(drafter), commit([1, 10]))
    ahead.step()
    told(ahead, commit([11, 30], first=2, round=2))
    assert drafted(ahead) == [(0, 2, 4, [31, 32, 33])]
    assert drafter.seen == [[[1, 2]]], "one was right, and it is known of two"
    assert drafter.asked[-1] == [(0, [1, 10, 11, 30], 3)]


def test_one_window_and_then_it_waits_unless_decoupled():
    ahead = told(running(), commit([1, 10], plan=COUPLED))
    assert drafted(ahead) == [(0, 1, 2, [11, 12, 13])]
    assert ahead.step() == []
    told(ahead, commit([11], first=2, round=2, plan=COUPLED))
    assert ahead.step() == [], "two are ahead still"
    told(ahead, commit([12, 13, 14], first=3, round=3, plan=COUPLED))
    assert drafted(ahead) == [(0, 3, 6, [15, 16, 17])]


@pytest.mark.parametrize("left, most", [(1, 0), (2, 1), (4, 3), (5, 4), (7, 6), (9, 6)])
def test_the_last_token_of_a_response_is_never_a_draft_token(left, most):
    ahead = told(running(), commit([1, 10], left=left))
    blocks = [block for _ in range(4) for block in ahead.step()]
    assert max((len(block.tokens_N) for block in blocks), default=0) == most


def test_who_has_nothing_to_draft_is_asked_again_once_there_is_news():
    drafter = CountsOn(most=0)
    ahead = told(running(drafter), commit([1, 10]))
    assert ahead.step() == [] and ahead.step() == [] and len(drafter.asked) == 1
    drafter.most = 2
    told(ahead, commit([11], first=2, round=2))
    assert drafted(ahead) == [(0, 2, 3, [12, 13])]


def test_requests_with_windows_of_their_own_are_drafted_for_together():
    drafter = CountsOn()
    plans = [DraftPlan(1), DraftPlan(4), COUPLED]
    ahead = told(
        running(drafter), *[commit([1, 10 * r], request=r, plan=plans[r]) for r in range(3)]
    )
    assert [len(tokens) for *_, tokens in drafted(ahead)] == [1, 4, 3]
    assert [len(tokens) for *_, tokens in drafted(ahead)] == [2, 8], "by those that go on"
    assert len(drafter.asked) == 2
    assert ahead.step() == []


def test_who_leaves_is_forgotten_by_the_drafter_too():
    drafter = CountsOn()
    ahead = told(running(drafter), commit([1, 10]), commit([1, 20], request=1))
    told(ahead, closed=[0, 5])
    assert drafter.gone == [[0]] and [r for r, *_ in drafted(ahead)] == [1]
    told(ahead, closed=[5])
    assert drafter.gone == [[0]] and drafter.seen == []


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 4), st.booleans())
def test_limits_hold_whatever_is_accepted(accepted, window, decoupled):
    """Each number: draft tokens that are right before the next token, none of which is drafted."""
    text, plan = [1, 10], DraftPlan(window, decoupled)
    ahead = told(running(), commit(text, plan=plan, left=40))
    for round, right in enumerate(accepted, start=2):
        before = 0
        for _ in range(3):
            for block in ahead.step():
                most = window if not decoupled else 2 * window
                assert before < len(block.tokens_N) <= most
                assert len(block.tokens_N) - before <= window
                assert block.base_tokens == len(text) and block.round == round - 1
                before = len(block.tokens_N)
        assert before >= min(window, 39 - (len(text) - 2))
        new = [text[-1] + 1 + i for i in range(min(right, before))] + [1000 * round]
        told(ahead, commit(new, first=len(text), round=round, plan=plan, left=40 - len(text) + 2))
        text += new


# --- all cases ------------------------------------------------------------------------------


def enumerating(drafter=None, fan_out=2):
    return Enumerating(drafter or CountsOn(), 4, 60, max_window=3, fan_out=fan_out)


def paths(tokens, parents):
    found = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def first_choices(tokens, parents):
    """The paths of a tree without second choices."""
    return [path for path in paths(tokens, parents) if max(path) < 5000]


def test_a_request_without_a_chain_has_one_case():
    drafter = CountsOn()
    ahead = told(enumerating(drafter), commit([1, 5], plan=DraftPlan(2)))
    (block,) = ahead.step()
    assert drafter.asked == [([0], [[-1, -1, -1]], 2, 2)]
    assert sorted(first_choices(block.tokens_N, block.parents_N)) == sorted(
        [(10,), (10, 11), (10, 11, 12), (20,), (20, 21), (20, 21, 22)]
    )
    assert (block.request_id, block.round, block.base_tokens) == (0, 1, 2)
    assert block.prob_N[0] == 0.5 and block.prob_N[1] == np.float32(0.5 * PRIOR_PROB)
    second = set(paths(block.tokens_N, block.parents_N)) - set(
        first_choices(block.tokens_N, block.parents_N)
    )
    assert second == {(10, 5011), (10, 11, 5012), (20, 5021), (20, 21, 5022)}
    assert ahead.step() == [], "once for each commit"


def test_all_cases_of_a_chain():
    ahead = told(enumerating(fan_out=1), commit([1, 5], plan=DraftPlan(1), chain=[6, 7]))
    (block,) = ahead.step()
    got = first_choices(block.tokens_N, block.parents_N)
    assert sorted(got) == sorted(
        [(6,), (6, 7), (10,), (10, 11), (6, 110), (6, 110, 111), (6, 7, 210), (6, 7, 210, 211)]
    )


def test_chains_and_windows_of_different_lengths_are_cut_to_their_own():
    drafter = CountsOn()
    plans = DraftPlan(1), DraftPlan(3)
    ahead = told(
        enumerating(drafter, fan_out=1),
        commit([1, 5], plan=plans[0], chain=[6, 7, 8, 9]),  # longer than any that is drafted
        commit([1, 5], request=1, plan=plans[1], left=3),
    )
    one, two = ahead.step()
    assert drafter.asked == [([0, 1], [[6, 7, 8], [-1, -1, -1]], 2, 1)]
    assert max(map(len, paths(one.tokens_N, one.parents_N))) == 3 + 2
    # three tokens are left: two of these are drafted behind the one that comes meanwhile
    assert first_choices(two.tokens_N, two.parents_N) == [(10,), (10, 11), (10, 11, 12)]


def test_nothing_where_a_request_is_to_wait_or_ends():
    ahead = told(
        enumerating(),
        commit([1, 5], plan=COUPLED, chain=[6]),
        commit([1, 5], request=1, left=1),
        commit([1, 5], request=2, plan=COUPLED),
    )
    assert [block.request_id for block in ahead.step()] == [2]


def test_acceptance_is_counted_where_it_is_known():
    ahead = told(enumerating(), commit([1, 5], chain=[6, 7, 8]))
    told(ahead, commit([6, 7, 9], first=2, round=2, chain=[4]))  # two right, the third wrong
    right, seen = DECAY * PRIOR_DRAFTS * PRIOR_PROB + 2, DECAY * PRIOR_DRAFTS + 3
    assert (ahead._right, ahead._seen) == pytest.approx((right, seen))
    told(ahead, commit([1], first=9, round=4))  # does not follow
    told(ahead, commit([1, 2], request=3))  # new
    assert (ahead._right, ahead._seen) == pytest.approx((right, seen))
    told(ahead, commit([4, 3], first=5, round=3))  # all of its chain
    assert (ahead._right, ahead._seen) == pytest.approx((DECAY * right + 1, DECAY * seen + 1))


def test_a_tree_of_cases_by_hand():
    chain_K, p = np.array([5, 6]), 0.5
    tokens_ZFN = np.array([[[7, 8]], [[9, 10]], [[11, 12]]])
    second_ZFK = np.array([[[13]], [[14]], [[15]]])
    given = chain_K, tokens_ZFN, second_ZFK, np.full((3, 1), 0.5)
    tokens, parents, prob = cases_tree(*given, p)
    # chain ½, ¼; behind none of it ½·½, ·½; behind one ½·½·½, ·½; behind both ¼·1·½, ·½; second
    # choices have a quarter of the guess above them
    assert tokens.tolist() == [5, 6, 7, 8, 9, 11, 13, 10, 12, 14, 15]
    assert parents.tolist() == [-1, 0, -1, 2, 0, 1, 2, 4, 5, 4, 5]
    of_chains = [0.5, 0.25, 0.25, 0.125, 0.125, 0.125]
    assert prob.tolist() == [*of_chains, 0.0625, 0.0625, 0.0625, 0.03125, 0.03125]
    assert (tokens.dtype, parents.dtype, prob.dtype) == (np.int32, np.int32, np.float32)


PROB = st.floats(0, 1, width=32)


@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), PROB, st.data())
def test_a_tree_of_cases_is_a_tree_and_has_every_case(K, F, N, p, data):
    chain_K = 1000 + np.arange(K)
    tokens_ZFN = np.arange((K + 1) * F * N).reshape(K + 1, F, N)
    numbers = data.draw(st.lists(PROB, min_size=(K + 1) * F, max_size=(K + 1) * F))
    prob_ZF = np.array(numbers).reshape(K + 1, F)
    second_ZFK = tokens_ZFN[..., 1:] + 5000
    tokens, parents, prob = cases_tree(chain_K, tokens_ZFN, second_ZFK, prob_ZF, p)
    assert (parents < np.arange(len(parents))).all() and (parents >= -1).all()
    assert (np.diff(prob) <= 0).all() and (prob >= 0).all() and (prob <= 1).all()
    assert len(tokens) == K + (K + 1) * F * (2 * N - 1)
    there = dict(zip(paths(tokens, parents), prob.tolist(), strict=True))
    for z in range(K + 1):
        for f in range(F):
            path = (*chain_K[:z].tolist(), *tokens_ZFN[z, f].tolist())
            rejected = 1 - p if z < K else 1.0
            want = p**z * rejected * prob_ZF[z, f] * p ** (N - 1)
            assert there[path] == pytest.approx(want, rel=1e-5, abs=1e-30)
            if N > 1:
                above = p**z * rejected * prob_ZF[z, f] * p ** (N - 2)
                second = there[(*path[:-1], path[-1] + 5000)]
                assert second == pytest.approx(above * (1 - p) * SECOND, rel=1e-5, abs=1e-30)
