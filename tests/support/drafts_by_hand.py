"""Drafts from lists, for tests."""

from spec.drafter import Drafts, no_drafts


def drafts(*trees, width=6, source=0) -> Drafts:
    """Each tree is a list of (parent, token, probability)."""
    out = no_drafts(len(trees), width)
    for a, tree in enumerate(trees):
        for i, (parent, token, prob) in enumerate(tree):
            out.parents_AN[a, i], out.tokens_AN[a, i], out.prob_AN[a, i] = parent, token, prob
            out.sources_AN[a, i] = source
        out.count_A[a] = len(tree)
    return out
