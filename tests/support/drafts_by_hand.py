"""Drafts from lists, for tests."""

import dataclasses
from collections.abc import Sequence

from reprise.spec.drafter import Drafts, no_drafts


@dataclasses.dataclass(frozen=True)
class Draft:
    """The draft of one request, without the root; parents come before their children.

    `tokens[i]` is for the position after node `parents[i]`, which is −1 for a child of the root.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


def chain(tokens: Sequence[int]) -> Draft:
    """Return a draft without branches."""
    return Draft(tokens, range(-1, len(tokens) - 1))


NO_DRAFT = Draft((), ())


def stack(drafts: Sequence[Draft], max_nodes: int) -> Drafts:
    """Return drafts as arrays, cut to `max_nodes`, every token of probability 1."""
    out = no_drafts(len(drafts), max_nodes)
    for a, draft in enumerate(drafts):
        n = min(len(draft.tokens), max_nodes)
        out.tokens_AN[a, :n] = draft.tokens[:n]
        out.parents_AN[a, :n] = draft.parents[:n]
        out.prob_AN[a, :n] = 1.0
        out.count_A[a] = n
    return out


def drafts(*trees, width=6, source=0) -> Drafts:
    """Each tree is a list of (parent, token, probability)."""
    out = no_drafts(len(trees), width)
    for a, tree in enumerate(trees):
        for i, (parent, token, prob) in enumerate(tree):
            out.parents_AN[a, i], out.tokens_AN[a, i], out.prob_AN[a, i] = parent, token, prob
            out.sources_AN[a, i] = source
        out.count_A[a] = len(tree)
    return out
