"""Trees as arrays draft as the forest they come from, and bad arrays are refused before use."""

import dataclasses

import numpy as np
import pytest

from spec.drafter import no_drafts
from spec.retrieval import suffix_arrays
from spec.retrieval.history import PAPER_RULE, RULE
from spec.retrieval.suffix_arrays import COUNT, LENGTH, LINK, TARGET, TOKEN, check
from spec.retrieval.suffix_forest import Followers, SuffixForest

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
def test_joined_parts_draft_as_one_forest(seed, rule):
    groups = texts(seed)
    whole, trees = planted(groups, rule.context_tokens)
    parts = [planted(g, rule.context_tokens)[0].arrays() for g in (groups[:1], [], groups[1:])]
    for part in parts:
        check(part, VOCAB)
    joined, by_part = SuffixForest.of(parts)
    tokens_BL = np.random.default_rng(seed).integers(0, VOCAB, (4, 30)).astype(np.int32)
    wanted = drafts(whole, trees, tokens_BL, rule)
    assert any(tokens for tokens, *_ in wanted)
    assert drafts(joined, [t for part in by_part for t in part], tokens_BL, rule) == wanted
    assert joined.num_tokens == whole.num_tokens
    with pytest.raises(AssertionError, match="cannot grow"):
        joined.plant()


PLANTED = {
    "link out of range": ("states_SX", LINK, 10**6),
    "link below": ("states_SX", LINK, -1),
    "link to itself": ("states_SX", LINK, "self"),
    "target out of range": ("states_SX", TARGET, 10**6),
    "target below": ("states_SX", TARGET, -7),
    "token beyond the vocabulary": ("states_SX", TOKEN, VOCAB),
    "token below none": ("states_SX", TOKEN, -2),
    "negative count": ("states_SX", COUNT, -1),
    "count too large": ("states_SX", COUNT, 10**6),
    "length 0": ("states_SX", LENGTH, 0),
    "source out of range": ("edges_EX", 0, 10**6),
    "source below": ("edges_EX", 0, -1),
    "label beyond the vocabulary": ("edges_EX", 1, VOCAB),
    "goal out of range": ("edges_EX", 2, 10**6),
    "goal below": ("edges_EX", 2, -1),
    "weight": ("weights_S", None, np.nan),
    "root out of range": ("roots_T", None, 10**6),
    "root below": ("roots_T", None, -1),
    "tokens": ("grown_T", None, -1),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_values_are_refused(fault):
    name, column, value = PLANTED[fault]
    good = planted(texts(0))[0].arrays()
    rows = len(getattr(good, name))
    for row in {rows - 1, rows - 2 if name != "states_SX" else rows // 2}:
        array = getattr(good, name).copy()
        if column is None:
            array[row] = value
        else:
            array[row, column] = row if value == "self" else value
            if column == TARGET:
                array[row, TOKEN] = 1
        with pytest.raises(ValueError, match="expected"):
            check(dataclasses.replace(good, **{name: array}), VOCAB)


def test_trees_do_not_lead_into_one_another():
    good = planted(texts(1))[0].arrays()
    for name, column in (("states_SX", LINK), ("states_SX", TARGET), ("edges_EX", 2)):
        array = getattr(good, name).copy()
        array[-1, column] = 1
        if column == TARGET:
            array[-1, TOKEN] = 1
        with pytest.raises(ValueError, match="expected"):
            check(dataclasses.replace(good, **{name: array}), VOCAB)


@pytest.mark.parametrize("seed", range(3))
def test_what_passes_the_check_is_queried_within_bounds(seed):
    """Random changes: refused, or queries of the changed trees end with tokens that there are."""
    rng, good = np.random.default_rng(seed), planted(texts(seed))[0].arrays()
    tokens_BL = rng.integers(0, VOCAB, (4, 20)).astype(np.int32)
    passed = 0
    for _ in range(300):
        name = ("states_SX", "edges_EX")[rng.integers(2)]
        array = getattr(good, name).copy()
        at = rng.integers(len(array)), rng.integers(array.shape[1])
        array[at] = array[at] + rng.integers(-2, 3)
        bad = dataclasses.replace(good, **{name: array})
        try:
            check(bad, VOCAB)
        except ValueError:
            continue
        passed += 1
        forest, (trees,) = SuffixForest.of([bad])
        for tokens, parents, prob in drafts(forest, trees, tokens_BL, RULE):
            assert all(0 <= token < VOCAB for token in tokens)
            assert all(-1 <= parent < n for n, parent in enumerate(parents))
            assert all(0 < p <= 1 for p in prob)
    assert 0 < passed < 300


def test_no_trees_are_arrays_too():
    empty = SuffixForest(4).arrays()
    check(empty, VOCAB)
    forest, ids = SuffixForest.of([empty])
    assert ids == [[]] and forest.num_tokens == 0
    with pytest.raises(ValueError, match="trees one after another"):
        check(dataclasses.replace(empty, states_SX=np.zeros((2, 5), np.int32),
                                  weights_S=np.zeros(2, np.float32)), VOCAB)  # fmt: skip
    assert suffix_arrays.MOST == 2**31 - 1
