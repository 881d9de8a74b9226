"""The suffix forest by hand: counts, matches, draft tokens, growth, errors."""

import collections
import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from suffix_contexts import count, follower_of, weight

from spec.drafter import PADDING, no_drafts
from spec.retrieval import suffix_kernels as kernels
from spec.retrieval import suffix_queries as queries
from spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest

LARGEST = 2**31 - 1


def grown(*texts, max_context=32, weights=None):
    """A forest of one tree with these texts: (forest, tree, sequences)."""
    forest = SuffixForest(max_context)
    tree = forest.plant()
    weights = weights or [1.0] * len(texts)
    return forest, tree, [forest.add(tree, t, w) for t, w in zip(texts, weights, strict=True)]


def proposed(forest, tree, context, rule, max_nodes=8):
    """[(token, parent, probability)] and the match."""
    followers, out = follower_of(forest, tree, context), no_drafts(1, max_nodes)
    forest.propose(followers, rule, [max_nodes], out)
    n = out.count_A[0]
    assert (out.tokens_AN[0, n:] == PADDING).all()  # what is not proposed is not written
    columns = out.tokens_AN[0, :n], out.parents_AN[0, :n], out.prob_AN[0, :n]
    return list(zip(*(c.tolist() for c in columns), strict=True)), followers.matched_F[0]


def test_counts_and_weights():
    forest, tree, sequences = grown([1, 2, 3, 1, 2], [2, 3], weights=[0.5, 4.0])
    assert [count(forest, tree, c) for c in ([], [1], [2], [1, 2], [2, 3], [3, 2])] == [
        *(7, 2, 3, 2, 2, 0)
    ]
    assert weight(forest, tree, [2, 3]) == 4.5
    assert weight(forest, tree, [1, 2]) == 1.0
    assert weight(forest, tree, []) == 5 * 0.5 + 2 * 4.0
    forest.append(sequences[1], [1])
    assert count(forest, tree, [2, 3, 1]) == 2
    assert forest.num_tokens == 8


def test_matches_never_cross_a_border():
    forest, tree, (first, _) = grown([1, 2], [3, 4])
    assert count(forest, tree, [2, 3]) == 0
    assert proposed(forest, tree, [1, 2], ProposalRule())[0] == []
    forest.append(first, [5])  # the first goes on after the second has begun
    assert count(forest, tree, [2, 5]) == 1
    assert count(forest, tree, [4, 5]) == 0
    other = forest.plant()
    forest.add(other, [2, 3])
    assert count(forest, tree, [2, 3]) == 0
    assert follower_of(forest, tree, [2, 3]).matched_F[0] == 1


def test_longest_match_and_chain():
    forest, tree, _ = grown([9, 1, 2, 3, 4, 5], [8, 2, 3, 7])
    chain, matched = proposed(forest, tree, [0, 1, 2, 3], ProposalRule(), 2)
    assert matched == 3
    assert chain == [(4, -1, 1.0), (5, 0, 1.0)]
    # Of the last two tokens alone, the smaller of two equals goes on.
    chain, _ = proposed(forest, tree, [0, 1, 2, 3], ProposalRule(longest=2), 2)
    assert chain == [(4, -1, 0.5), (5, 0, 0.5)]
    assert proposed(forest, tree, [0, 1, 2, 3], ProposalRule(7, 4))[0] == []


def test_weights_choose_where_counts_would_not():
    texts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5]]
    forest, tree, _ = grown(*texts, weights=[0.25, 0.25, 1.0])
    histospec = ProposalRule(7, 3, 1, "weight")
    assert proposed(forest, tree, [1, 2, 3], histospec)[0] == [(5, -1, float(np.float32(1 / 3)))]
    by_count = ProposalRule(7, 3, 1, "count", prior=1.0)
    assert proposed(forest, tree, [1, 2, 3], by_count)[0] == [(4, -1, 0.5)]
    assert proposed(forest, tree, [2, 3], histospec)[0] == []


def test_equal_weights_are_ranked_by_count_then_by_token():
    texts = [[1, 6], [1, 6], [1, 5], [1, 4]]
    forest, tree, _ = grown(*texts, weights=[0.5, 0.5, 1.0, 1.0])
    rule = ProposalRule(7, 1, 2, "weight")
    assert [t for t, _, _ in proposed(forest, tree, [1], rule)[0]] == [6, 4]


def test_all_children_of_the_best_weights_are_candidates():
    """Two draft tokens of three by probability, although the likelier ones have the smaller
    weights.
    """
    texts = [[1, 2]] * 3 + [[1, 3]] * 2 + [[1, 4]]
    forest, tree, _ = grown(*texts, weights=[-1.0] * 5 + [1.0])
    drafts, _ = proposed(forest, tree, [1], ProposalRule(7, 1, 3, "weight"), 2)
    assert [t for t, _, _ in drafts] == [2, 3]


def test_a_best_first_tree():
    #  1 → 2 (3 of 4) → 3 (2 of 3), 4 (1 of 3);  1 → 5 (1 of 4) → 6
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6]]
    forest, tree, _ = grown(*texts)
    want = [(2, -1, 0.75), (3, 0, 0.5), (4, 0, 0.25), (5, -1, 0.25), (6, 3, 0.25)]
    got, _ = proposed(forest, tree, [1], ProposalRule(7, 1, 2))
    assert [(t, p) for t, p, _ in got] == [(2, -1), (3, 0), (5, -1), (4, 0), (6, 2)]
    assert sorted(got) == sorted([want[0], want[1], want[2], (5, -1, 0.25), (6, 2, 0.25)])
    assert proposed(forest, tree, [1], ProposalRule(7, 1, 2), 3)[0] == got[:3]
    assert len(proposed(forest, tree, [1], ProposalRule(7, 1, 2, min_prob=0.5))[0]) == 2


def test_a_text_that_ends_in_the_context_falls_back_to_what_goes_on():
    """A live request's own last tokens match the longest, but nothing follows them."""
    forest, tree, _ = grown([7, 1, 2, 5], [1, 2, 3, 0, 1, 2])
    chain, matched = proposed(forest, tree, [1, 2, 3, 0, 1, 2], ProposalRule(), 1)
    assert matched == 6
    assert chain == [(3, -1, float(np.float32(1 / 3)))]


def test_contexts_are_cut_to_max_context():
    """Beyond it the first tokens are forgotten: here, what came before the two ones."""
    forest, tree, _ = grown([5, 1, 1, 2], [6, 1, 1, 3], [7, 1, 1, 3], max_context=2)
    assert count(forest, tree, [1, 1]) == 3
    chain, matched = proposed(forest, tree, [5, 1], ProposalRule(longest=2), 2)
    assert matched == 2
    assert [(t, p) for t, p, _ in chain] == [(1, -1), (3, 0)]


def test_a_draft_goes_down_one_branch():
    """Draft tokens are chosen by the match and all draft tokens above them, whatever `longest`
    cuts off.
    """
    texts = [1, 2, 5, 6, 7, 8], [3, 4, 5, 6, 7, 9], [3, 4, 5, 6, 7, 9]
    forest, tree, _ = grown(*texts, max_context=6)
    rule = ProposalRule(longest=2, shortest=2)
    assert rule.context_tokens == 34
    assert [t for t, _, _ in proposed(forest, tree, [1, 2], rule, 6)[0]] == [5, 6, 7, 8]
    # two tokens know nothing of where the draft began, three forget it after the first draft token
    for path_tokens in (0, 1):
        short = dataclasses.replace(rule, path_tokens=path_tokens)
        assert [t for t, _, _ in proposed(forest, tree, [1, 2], short, 6)[0]] == [5, 6, 7, 9]


def test_followers_may_match_less_than_the_forest_counts():
    forest, tree, _ = grown([1, 2, 3, 4, 5], [9, 3, 4, 6])
    followers, tokens_BL = Followers.of([tree]), np.array([[1, 2, 3, 4]], np.int32)
    for length in (2, 4):
        forest.follow(followers, tokens_BL, [0], [length], longest=2)
        assert followers.matched_F[0] == 2
    forest.add(tree, [9, 3, 4, 6])
    forest.follow(followers, tokens_BL, [0], [4], longest=2)
    forest.propose(followers, ProposalRule(2), [1], out := no_drafts(1, 1))
    assert (followers.matched_F[0], out.tokens_AN[0, 0]) == (2, 6)


def test_growth_reaches_followers_that_wait():
    forest, tree, (first,) = grown([1, 2])
    followers, tokens_BL = follower_of(forest, tree, [3, 1, 2]), np.array([[3, 1, 2, 4]], np.int32)
    assert followers.matched_F[0] == 2
    forest.append(first, [3, 1])
    forest.follow(followers, tokens_BL, [0], [3])
    assert followers.matched_F[0] == 2
    forest.append(first, [2])
    forest.follow(followers, tokens_BL, [0], [3])
    assert followers.matched_F[0] == 3
    forest.append(first, [4])
    forest.follow(followers, tokens_BL, [0], [4])
    assert followers.matched_F[0] == 4


def test_proposing_after_growth_uses_the_counts_of_now():
    """Between following and proposing the match's state was split; its context was not lost."""
    forest, tree, _ = grown([5, 1, 2, 3], [9])
    followers, out = follower_of(forest, tree, [1, 2]), no_drafts(1, 1)
    forest.add(tree, [6, 1, 2, 4])
    forest.add(tree, [6, 1, 2, 4])
    forest.propose(followers, ProposalRule(), [1], out)
    assert (out.tokens_AN[0, 0], out.prob_AN[0, 0]) == (4, np.float32(2 / 3))
    followers.restart(0, tree)
    forest.propose(followers, ProposalRule(), [1], out)
    assert out.count_A[0] == 0  # it has to follow first


def test_freed_memory_serves_again_and_old_ids_are_void():
    forest = SuffixForest()
    rng = np.random.default_rng(0)
    sizes, trees = [], []
    for _ in range(6):
        tree = forest.plant()
        sequence = forest.add(tree, rng.integers(0, 50, 500))
        followers = follower_of(forest, tree, [1, 2])
        forest.uproot(tree)
        trees.append(tree)
        sizes.append(forest.num_bytes)
        forest.plant()
        for call in (
            lambda tree=tree: forest.add(tree, [1]),
            lambda tree=tree: forest.uproot(tree),
            lambda f=followers: forest.follow(f, np.array([[1]], np.int32), [0], [1]),
            lambda f=followers: forest.propose(f, ProposalRule(), [1], no_drafts(1, 1)),
        ):
            with pytest.raises(AssertionError, match=f"no tree {tree}|its tree.* is missing"):
                call()
        with pytest.raises(AssertionError, match="is not there"):
            forest.append(sequence, [1])
    assert len(set(trees)) == 6
    assert max(sizes) < 1.5 * min(sizes)
    assert forest.num_tokens == 0


def test_wide_branching_and_the_largest_token():
    """Every edge of a state with thousands of them is found, before and after others have gone."""
    forest, other, _ = grown()
    tree = forest.plant()
    tokens = np.unique(np.random.default_rng(1).integers(0, LARGEST, 3000)).tolist() + [LARGEST]
    for t in tokens:
        forest.add(tree, [7, t, 8])
        forest.add(other, [6, t, 8])
    assert all(count(forest, tree, [7, t]) == 1 for t in tokens)
    forest.uproot(other)
    assert all(count(forest, tree, [7, t]) == 1 for t in tokens)
    assert not any(count(forest, tree, [6, t]) for t in tokens)


def test_equal_calls_give_equal_arrays():
    def run():
        rng = np.random.default_rng(5)
        forest = SuffixForest(8)
        tree = forest.plant()
        sequences = [forest.add(tree) for _ in range(4)]
        for _ in range(30):
            offsets = np.arange(5) * 5
            forest.append_batch(sequences, rng.integers(0, 6, 20), offsets)
        out, tokens_BL = no_drafts(8, 12), rng.integers(0, 6, (8, 20)).astype(np.int32)
        followers = Followers.of([tree] * 8)
        forest.follow(followers, tokens_BL, np.arange(8), [20] * 8)
        forest.propose(followers, ProposalRule(8, 1, 3, prior=0.5), [12] * 8, out)
        return out

    one, other = run(), run()
    assert one.count_A.min() > 0
    for one_X, other_X in zip(one, other, strict=True):
        np.testing.assert_array_equal(one_X, other_X)


def test_threads_take_turns():
    """Two threads grow trees of one forest while two others read; the counts are as if alone."""
    forest = SuffixForest()
    texts = np.random.default_rng(2).integers(0, 3, (4, 3000)).astype(np.int32)

    def grow(text_T):
        tree = forest.plant()
        sequence = forest.add(tree)
        followers = Followers.of([tree])
        for i in range(0, 3000, 60):
            forest.append(sequence, text_T[i : i + 60])
            forest.follow(followers, text_T[None], [0], [i + 60])
            assert followers.matched_F[0] == 32
        return tree

    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(grow, texts))
    for tree, text in zip(trees, texts.tolist(), strict=True):
        pairs = collections.Counter(itertools.pairwise(text))
        assert {p: count(forest, tree, p) for p in pairs} == pairs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, t, s: SuffixForest(0), "^0$"),
        (lambda f, t, s: ProposalRule(2, 3), "3, 2"),
        (lambda f, t, s: ProposalRule(max_children=0), "max_children=0"),
        (lambda f, t, s: ProposalRule(rank_by="reward"), "rank_by='reward'"),
        (lambda f, t, s: ProposalRule(prior=-1.0), "prior=-1.0"),
        (lambda f, t, s: ProposalRule(path_tokens=-1), "path_tokens=-1"),
        (lambda f, t, s: f.add(t, [1], float("nan")), "nan"),
        (lambda f, t, s: f.append(s, [1, -1]), "from 0"),
        (lambda f, t, s: f.append(s, [2**31]), "int32"),
        (lambda f, t, s: f.append(s, [0.5]), "float64"),
        (lambda f, t, s: f.append_batch([s, s], [1, 2], [0, 2]), "of 2 sequences"),
        (lambda f, t, s: f.append_batch([s], [1, 2], [0, 3]), "0 3.*2 tokens"),
        (lambda f, t, s: f.append_batch([s, s], [1, 2], [0, 2, 1]), "offsets"),
        (lambda f, t, s: f.append(s - 1, [1]), "is not there"),
        (lambda f, t, s: f.add(-1, [1]), "no tree"),
        (lambda f, t, s: f.follow(Followers.of([t]), np.zeros((1, 2)), [0], [1]), "float64"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [1], [1]), "text is missing"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0], [3]), "text is missing"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0], [1], [1]), "follower 1"),
        (
            lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0, 0], [1]),
            "a row and a length",
        ),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0], [1], longest=33), "33, 32"),
        (lambda f, t, s: f.propose(Followers.of([t]), ProposalRule(40), [1], OUT), "40, 32"),
        (lambda f, t, s: f.propose(Followers.of([t]), ProposalRule(), [1, 1], OUT), "a limit"),
    ],
)
def test_faults_of_callers_are_noticed(call, message):
    forest, tree, (sequence,) = grown([1, 2])
    with pytest.raises(AssertionError, match=message):
        call(forest, tree, sequence)
    assert count(forest, tree, [1, 2]) == 1


ZEROS, OUT = np.zeros((1, 2), np.int32), no_drafts(1, 1)


@pytest.mark.parametrize("held", ["states", "tokens"])
def test_what_int32_cannot_number_is_refused_before_anything_grows(held):
    forest, tree, (sequence,) = grown([1, 2])
    if held == "states":
        forest._arena.pools[kernels.STATE_POOL, kernels.TAKEN] = LARGEST - 5
    else:
        forest._num_tokens = LARGEST - 4
    size = forest.num_bytes
    with pytest.raises(OverflowError, match=r"2,147,483,647 states.*3 more: use several forests"):
        forest.append(sequence, [1, 2, 3])
    assert forest.num_bytes == size and count(forest, tree, [1, 2]) == 1


def test_read_only_and_strided_arrays_serve():
    forest, tree, (sequence,) = grown([1, 2, 3])
    tokens = np.array([4, 0, 5, 0])[::2]
    tokens.flags.writeable = False
    forest.append(sequence, tokens)
    text_BL = np.array([[3, 0, 4, 0, 5, 0]], np.int32)[:, ::2]
    text_BL.flags.writeable = False
    followers = Followers.of([tree])
    forest.follow(followers, text_BL, [0], [3])
    assert followers.matched_F[0] == 3


def test_cached_queries_know_the_code_they_were_compiled_with():
    """numba's cache must not serve queries compiled with other parts: see `STAMP`."""
    forest, tree, _ = grown([1, 2])
    proposed(forest, tree, [1], ProposalRule())
    for query in (queries.follow, queries.propose):
        assert query.signatures
        assert all(f"omitted(default={kernels.STAMP})" in str(s[-1]) for s in query.signatures)
