"""Drafts from lists, for tests."""

from spec.drafter import Drafts, no_drafts


def drafts(*trees, width=6, source=0) -> Drafts:
    """Each tree is a list of (parent, token, chance)."""
    out = no_drafts(len(trees), width)
    for a, tree in enumerate(trees):
        for i, (parent, token, chance) in enumerate(tree):
            out.parents_AN[a, i], out.tokens_AN[a, i], out.chance_AN[a, i] = parent, token, chance
            out.sources_AN[a, i] = source
        out.count_A[a] = len(tree)
    return out
