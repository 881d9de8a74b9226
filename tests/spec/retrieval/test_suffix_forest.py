"""The suffix forest by hand: counts, matches, draft tokens, growth, errors."""

import collections
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from suffix_contexts import count, follower_of

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
