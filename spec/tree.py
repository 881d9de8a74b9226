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
