"""Drafts from the responses of the last epoch, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from live_by_hand import drafts, ids, live_texts

from reprise.spec.budget.aimd import MAX_TOKENS
from reprise.spec.drafter import Source
from reprise.spec.retrieval.history import (
    FOUND,
    LOST,
    NEXT,
    PAPER_RULE,
    RULE,
    GrowingHistory,
    HistoryDrafter,
    HistoryIndex,
    LastResponseDrafter,
    build_index,
)
from reprise.spec.retrieval.suffix_forest import ProposalRule
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group


def test_history_prefers_the_branch_of_the_largest_reward_sum():
    store = RolloutCache()
    tokens = [ids(1, 2, 7), ids(1, 2, 8), ids(1, 2, 8)]
    store.replace("p", of_group(tokens, [1.0, 0.25, 0.5]))
    rule = ProposalRule(longest=4, shortest=1, by_weight=True)
    index = build_index(store, {"p": ids(50, 51), "q": ids(60)}, rule)
    assert set(index.trees) == {"p"} and index.num_tokens == 3 * 5

    def drafter():
        return HistoryDrafter(index, {0: "p", 1: "q"}, rule)

    assert drafts(drafter(), live_texts([50, 51], [50, 51], groups=[0, 1])) == [[1, 2, 7], []]
    store.replace("p", of_group(tokens, [0.5, 0.25, 0.5]))
    index = build_index(store, {"p": ids(50, 51)}, rule)
    assert drafts(drafter(), live_texts([50, 51, 1], groups=[0])) == [[2, 8]]


def test_a_growing_history_drafts_from_each_response_as_soon_as_it_ends():
    rule = ProposalRule(longest=4, shortest=1, by_weight=True)
    history = GrowingHistory(100, rule)
    drafter = HistoryDrafter(history, {}, rule)
    first, other = history.begin((50, 51), 2), history.begin([60], 1)
    assert history.begin((50, 51), 1) == first != other
    live = live_texts([50, 51], [60], groups=[first, other])
    assert drafts(drafter, live) == [[], []]
    assert not history.end(first, ids(1, 2, 7))
    assert drafts(drafter, live) == [[1, 2, 7], []]
    assert not history.end(first, ids(1, 3)) and history.end(other, ids(9))
    assert history.end(first, ids(1, 3)), "the last of three"
    again = history.begin((50, 51), 1)
    assert again not in (first, other), "siblings that ended are another group"
    assert drafts(drafter, live_texts([50, 51], groups=[again])) == [[1, 3]]


def test_a_growing_history_forgets_what_was_used_the_longest_ago_but_nothing_that_runs():
    history = GrowingHistory(8)
    for prompt in (1, 2, 3):
        number = history.begin([prompt], 2 if prompt == 1 else 1)
        history.end(number, ids(7, 8, 9))  # four tokens with the prompt's
    kept = [history.begin([prompt], 1) for prompt in (1, 2, 3)]
    texts = live_texts([1, 7], [2, 7], [3, 7], groups=kept)
    assert drafts(HistoryDrafter(history, {}), texts) == [[8, 9], [], [8, 9]]


def test_without_tokens_groups_have_numbers_and_nothing_is_kept():
    history = GrowingHistory(0)
    for prompt in range(3):
        number = history.begin([prompt], 2)
        assert not history.end(number, ids(7, 8)) and history.end(number, ids(7, 9))
    assert number == 3 and len(history) == 0


def test_the_trees_of_several_forests_draft_as_those_of_one():
    store, prompts = RolloutCache(), {"p": ids(50, 51), "q": ids(60)}
    store.replace("p", of_group([ids(1, 2, 7), ids(1, 3)], [1.0, 0.5]))
    store.replace("q", of_group([ids(1, 2, 9)], [1.0]))
    whole = build_index(store, prompts, RULE)
    parts = [build_index(store, {key: prompt}, RULE).trees for key, prompt in prompts.items()]
    joined = HistoryIndex(parts[0] | parts[1])
    assert joined.num_tokens == whole.num_tokens
    texts = [50, 51, 1], [60, 1], [50, 51], [8, 8]
    keys, groups = {0: "p", 1: "q", 2: "none"}, [0, 1, 0, 2]
    found = [
        HistoryDrafter(index, keys, RULE).propose(
            live_texts(*texts, groups=groups), np.array([5, 5, 2, 5]), 6
        )
        for index in (whole, joined)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[1].count_A.tolist()[3] == 0 < found[1].count_A[:3].min()


def test_a_draft_stays_with_the_response_that_it_began_in():
    """Two better responses share a passage of 20 tokens with it, and go on otherwise."""
    passage = range(100, 120)
    mine, others = ids(1, 2, 3, *passage, 7, 8), ids(4, 5, 6, *passage, 9, 9)
    store = RolloutCache()
    store.replace("p", of_group([mine, others, others], [1.0, 1.0, 1.0]))

    def after(rule):
        drafter = HistoryDrafter(build_index(store, {"p": ids(50)}, rule), {0: "p"}, rule)
        return drafts(drafter, live_texts([50, 1, 2, 3], prompt=1), most=22)

    assert after(PAPER_RULE) == [mine[3:].tolist()]
    forgetful = PAPER_RULE._replace(path_tokens=0)
    assert after(forgetful) == [others[3:].tolist()]


def test_the_paper_rule_holds_its_longest_window():
    assert (PAPER_RULE.longest, PAPER_RULE.shortest) == (7, 3)
    assert PAPER_RULE.path_tokens >= MAX_TOKENS


OLD = [10, 11, 12, 13, 14, 15, 16, 17]


def propose(drafter, response, most=3, request_id=5):
    view = live_texts([1, 2, *response], first_id=request_id)
    drafts = drafter.propose(view, np.array([most]), 4)
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
