"""Trees as arrays draft as the forest they come from."""

import numpy as np
import pytest

from spec.drafter import no_drafts
from spec.retrieval.history import PAPER_RULE, RULE
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
    joined, by_part = SuffixForest.of(parts)
    tokens_BL = np.random.default_rng(seed).integers(0, VOCAB, (4, 30)).astype(np.int32)
    wanted = drafts(whole, trees, tokens_BL, rule)
    assert any(tokens for tokens, *_ in wanted)
    assert drafts(joined, [t for part in by_part for t in part], tokens_BL, rule) == wanted
    assert joined.num_tokens == whole.num_tokens
    with pytest.raises(AssertionError, match="cannot grow"):
        joined.plant()


def test_no_trees_are_arrays_too():
    forest, ids = SuffixForest.of([SuffixForest(4).arrays()])
    assert ids == [[]] and forest.num_tokens == 0
