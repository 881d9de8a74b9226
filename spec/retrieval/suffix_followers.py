"""What a caller hands to a suffix forest: the rule of its draft tokens, the contexts that it
follows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from spec.retrieval import suffix_kernels as kernels


@dataclasses.dataclass(frozen=True)
class ProposalRule:
    """How draft tokens are chosen.

    The context is the match, cut to its last `longest` tokens, or the longest shorter
    one that has a live continuation, of at least `shortest` tokens. Each context's
    `max_children` best children are candidates: by `rank_by`, then by count, then by
    smaller token. Candidates are taken in the order of their probability, the product of
    count(child) / (count(context) + prior) along the path, at least `min_prob`;
    equals in the order in which they became candidates. `max_children` of 1 gives a
    chain.

    Below the first draft token the context is the match and all draft tokens above it: a draft goes
    down one branch. Beyond `context_tokens`, the match and `path_tokens` draft tokens (or beyond
    the forest's `max_context`), it loses its first tokens. `path_tokens` of 0 chooses every
    draft token by its last `longest` tokens.

    HistoSpec (RhymeRL, section 5.3): `ProposalRule(7, 3, 1, "weight")`.
    """

    longest: int = 32
    shortest: int = 1
    max_children: int = 1
    rank_by: Literal["count", "weight"] = "count"
    prior: float = 0.0
    min_prob: float = 0.0
    path_tokens: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.shortest <= self.longest or self.longest < 1:
            raise ValueError(
                "expected 0 ≤ shortest ≤ longest and longest ≥ 1, got "
                f"shortest={self.shortest}, longest={self.longest}"
            )
        if self.path_tokens < 0:
            raise ValueError(f"path_tokens must be 0 or more, got {self.path_tokens}")
        if self.max_children < 1:
            raise ValueError(f"max_children must be at least 1 (a chain), got {self.max_children}")
        if self.rank_by not in ("count", "weight"):
            raise ValueError(f"rank_by must be 'count' or 'weight', got {self.rank_by!r}")
        if not (self.prior >= 0 and math.isfinite(self.prior)):
            raise ValueError(f"prior must be finite and at least 0, got {self.prior}")
        if not self.min_prob <= 1:
            raise ValueError(f"min_prob must be at most 1, got {self.min_prob}")

    @property
    def context_tokens(self) -> int:
        """The longest context of a draft token: what the forest's `max_context` should be."""
        return self.longest + self.path_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Followers:
    """Where F live contexts stand, each in one tree; the caller owns the arrays.

    `trees_F` are tree ids, −1 for none; `state_FX` is the forest's own.
    """

    trees_F: np.ndarray
    state_FX: np.ndarray

    @classmethod
    def of(cls, trees_F: Sequence[int] | np.ndarray) -> Followers:
        """Followers that have read nothing yet."""
        trees_F = np.array(trees_F, np.int64)
        return cls(trees_F, np.full((len(trees_F), 6), kernels.NONE, np.int64))

    def restart(self, f: int, tree: int) -> None:
        """Follow another context, or another tree, from now on."""
        self.trees_F[f] = tree
        self.state_FX[f] = kernels.NONE

    @property
    def matched_F(self) -> np.ndarray:
        """Tokens of each context's longest match when it last followed; 0 before that."""
        return np.maximum(self.state_FX[:, kernels.MATCH], 0)
