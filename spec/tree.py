"""Draft trees made by hand: the draft tokens of one request, without the root.

Every token is one for the position after its parent, which comes before it; siblings differ in
their tokens. No draw equals `PADDING`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PADDING = -1


@dataclasses.dataclass(frozen=True)
class Draft:
    """The draft of one slot on the host, without the root; parents come before their children.

    `tokens[i]` is for the position after node `parents[i]`, which is −1 for a child of the root.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


def chain(tokens: Sequence[int]) -> Draft:
    """Return a draft without branches."""
    return Draft(tokens, range(-1, len(tokens) - 1))


NO_DRAFT = Draft((), ())


def check_draft(draft: Draft, num_nodes: int, name: str) -> None:
    """Raise ValueError unless a draft's first `num_nodes` are a tree.

    A parent must come before its child, and siblings must differ in their tokens.
    """
    edges = list(zip(draft.parents[:num_nodes], draft.tokens[:num_nodes], strict=True))
    for i, (parent, token) in enumerate(edges):
        if not -1 <= parent < i or token < 0:
            raise ValueError(
                f"draft node {i} of {name} is (parent {parent}, token {token}): expected a "
                f"parent in −1 … {i - 1} and a token of at least 0"
            )
    if len(set(edges)) != num_nodes:
        raise ValueError(f"the draft of {name} repeats a token among siblings: merge them")
