"""HistoSpec by hand: branches by reward, and drafts that stay on theirs."""

import dataclasses

from live_by_hand import drafts, ids, live_texts

from spec.budget.aimd import MOST_TOKENS
from spec.retrieval.history import PAPER_RULE, HistoryDrafter, build_index
from spec.retrieval.suffix_forest import ProposalRule
from spec.reuse.rollout_cache import RolloutCache, of_group


def test_history_prefers_the_branch_of_the_largest_reward_sum():
    store = RolloutCache()
    tokens = [ids(1, 2, 7), ids(1, 2, 8), ids(1, 2, 8)]
    store.replace("p", of_group(tokens, [1.0, 0.25, 0.5]))
    rule = ProposalRule(longest=4, shortest=1, rank_by="weight")
    index = build_index(store, {"p": ids(50, 51), "q": ids(60)}, rule)
    assert set(index.trees) == {"p"} and index.num_tokens == 3 * 5

    def drafter():
        return HistoryDrafter(index, {0: "p", 1: "q"}, rule)

    assert drafts(drafter(), live_texts([50, 51], [50, 51], groups=[0, 1])) == [[1, 2, 7], []]
    store.replace("p", of_group(tokens, [0.5, 0.25, 0.5]))
    index = build_index(store, {"p": ids(50, 51)}, rule)
    assert drafts(drafter(), live_texts([50, 51, 1], groups=[0])) == [[2, 8]]


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
    forgetful = dataclasses.replace(PAPER_RULE, path_tokens=0)
    assert after(forgetful) == [others[3:].tolist()]


def test_the_paper_rule_holds_its_longest_window():
    assert (PAPER_RULE.longest, PAPER_RULE.shortest) == (7, 3)
    assert PAPER_RULE.path_tokens >= MOST_TOKENS
