"""The suffix forest by hand: counts, growth, in another program, errors."""

from __future__ import annotations

import collections
import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from suffix_contexts import count, follower_of

from reprise.spec.drafter import no_drafts
from reprise.spec.retrieval import suffix_kernels as kernels
from reprise.spec.retrieval import suffix_queries as queries
from reprise.spec.retrieval.history import PAPER_RULE, RULE
from reprise.spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest

LARGEST = 2**31 - 1


def grown(*texts, max_context=32, weights=None):
    """A forest of one tree with these texts: (forest, tree, sequences)."""
    forest = SuffixForest(max_context)
    tree = forest.plant()
    weights = weights or [1.0] * len(texts)
    return forest, tree, [forest.add(tree, t, w) for t, w in zip(texts, weights, strict=True)]


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
        sizes.append(num_bytes(forest))
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
        (lambda f, t, s: f.append(s - 1, [1]), "is not there"),
        (lambda f, t, s: f.add(-1, [1]), "no tree"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [1], [1]), "text is missing"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0], [3]), "text is missing"),
        (lambda f, t, s: f.follow(Followers.of([t]), ZEROS, [0], [1], [1]), "follower 1"),
    ],
)
def test_faults_of_callers_are_noticed(call, message):
    forest, tree, (sequence,) = grown([1, 2])
    with pytest.raises(AssertionError, match=message):
        call(forest, tree, sequence)
    assert count(forest, tree, [1, 2]) == 1


def num_bytes(forest):
    return sum(x.nbytes for x in forest._arena)


ZEROS = np.zeros((1, 2), np.int32)


@pytest.mark.parametrize("held", ["states", "tokens"])
def test_what_int32_cannot_number_is_refused_before_anything_grows(held):
    forest, tree, (sequence,) = grown([1, 2])
    if held == "states":
        forest._arena.pools[kernels.STATE_POOL, kernels.TAKEN] = LARGEST - 5
    else:
        forest._num_tokens = LARGEST - 4
    size = num_bytes(forest)
    with pytest.raises(OverflowError, match=r"2,147,483,647 states.*: use several forests"):
        forest.append(sequence, [1, 2, 3])
    assert num_bytes(forest) == size and count(forest, tree, [1, 2]) == 1


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
    forest.propose(follower_of(forest, tree, [1]), ProposalRule(), [1], no_drafts(1, 1))
    for query in (queries.follow, queries.propose):
        assert query.signatures
        assert all(f"omitted(default={kernels.STAMP})" in str(s[-1]) for s in query.signatures)


VOCAB = 5


def texts(seed, trees=4):
    rng = np.random.default_rng(seed)
    return [
        [(rng.integers(0, VOCAB, rng.integers(0, 60)), float(rng.normal())) for _ in range(3)]
        for _ in range(trees)
    ]


def planted(groups, max_context=RULE.context_tokens):
    forest, trees = SuffixForest(max_context), []
    for group in groups:
        trees.append(forest.plant())
        for tokens, weight in group:
            forest.add(trees[-1], tokens, weight)
    return forest, trees


def drafts(forest, trees, tokens_BL, rule):
    followers, out = Followers.of(trees), no_drafts(len(trees), 8)
    F = len(trees)
    rows = np.arange(F) % len(tokens_BL)
    found = []
    for length in range(1, tokens_BL.shape[1] + 1):
        forest.follow(followers, tokens_BL, rows, [length] * F, longest=rule.longest)
        forest.propose(followers, rule, [8] * F, out)
        for f, n in enumerate(out.count_A):
            row = out.tokens_AN[f, :n], out.parents_AN[f, :n], out.prob_AN[f, :n]
            found.append([x.tolist() for x in row])
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [RULE, PAPER_RULE], ids=["own", "paper"])
def test_a_forest_drafts_and_grows_in_another_program_as_here(seed, rule):
    groups = texts(seed)
    forest, trees = planted(groups, rule.context_tokens)
    tokens_BL = np.random.default_rng(seed).integers(0, VOCAB, (4, 30)).astype(np.int32)
    wanted = drafts(forest, trees, tokens_BL, rule)
    assert any(tokens for tokens, *_ in wanted)
    there, state = SuffixForest.__new__(SuffixForest), copy.deepcopy(forest.__getstate__())
    for array in state["_arena"]:
        array.setflags(write=False)  # as Ray's are
    there.__setstate__(state)
    assert there.num_tokens == forest.num_tokens
    assert drafts(there, trees, tokens_BL, rule) == wanted
    for one in (forest, there):
        one.add(trees[0], tokens_BL[0], 2.0)
        one.uproot(trees[1])
    left = [trees[0], *trees[2:]]
    assert drafts(there, left, tokens_BL, rule) == drafts(forest, left, tokens_BL, rule)


def test_drafting_in_one_call_equals_following_and_then_proposing():
    rng, rule = np.random.default_rng(0), ProposalRule(4, 1, 3, prior=0.3, path_tokens=0)
    forest = SuffixForest(rule.context_tokens)
    trees = [forest.plant(), forest.plant()]
    for tree in trees:
        forest.add(tree, rng.integers(0, 4, 200))
    texts = rng.integers(0, 4, (3, 40), np.int32), np.array([2, 0]), np.array([9, 30])
    drafts = []
    for is_one_call in (False, True):
        followers, out = Followers.of(trees), no_drafts(2, 6)
        which_F, max_nodes_F = np.array([0, 1]), np.array([6, 3])
        if is_one_call:
            forest.draft(followers, rule, texts, max_nodes_F, out, which_F)
        else:
            forest.follow(followers, *texts, which_F, rule.longest)
            forest.propose(followers, rule, max_nodes_F, out, which_F)
        drafts.append(out)
    assert drafts[0].count_A.tolist() == [6, 3]
    for of_two_calls, of_one in zip(*drafts, strict=True):
        assert np.array_equal(of_two_calls, of_one)
    followers = Followers.of([trees[0], 99])
    with pytest.raises(AssertionError, match="follower 1"):
        forest.draft(followers, rule, texts, max_nodes_F, out, which_F)
