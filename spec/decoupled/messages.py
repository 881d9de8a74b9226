"""The messages between a verifying and a drafting worker, in plain arrays.

    verifying  ── Commit: request tokens, and the chain that is verified next ────────→  drafting
    verifying  ←──────── Block: a tree of draft tokens after `base_tokens` ────────────  drafting

A block names its request, committed length and round. So a late, repeated or lost block costs speed
but never a token: draft tokens that do not follow the current tokens of the request are not used.
Source: SpecActor section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

MAX_NODES = 2**15 - 1  # no limit: budgets are smaller


class DraftPlan(NamedTuple):
    """The draft window of a request, and whether the next window is drafted early.

    Decoupled drafting continues while a window is verified, and wastes up to 2 · window − 1 draft
    tokens; otherwise drafting waits for the verification (the paper: coupled). A round verifies at
    most `max_nodes` draft tokens of a block; only the verifying worker uses this limit.
    """

    window: int
    decoupled: bool = True
    max_nodes: int = MAX_NODES


class Commit(NamedTuple):
    """Prompt and response tokens of a request from `first` on, and the `chain` verified next.

    `round` counts the commits of the request; `processing` is temperature, top-k and top-p.
    """

    request_id: int
    round: int
    first: int
    tokens: np.ndarray
    prompt_tokens: int
    remaining_tokens: int
    chain: np.ndarray
    plan: DraftPlan
    processing: tuple[float, float, float]

    @property
    def total_tokens(self) -> int:
        return self.first + len(self.tokens)


class Block(NamedTuple):
    """Draft tokens after the first `base_tokens` of a request, likeliest first: a tree.

    `parents_N` is −1 for a child of the root, else the index of an earlier draft token; `prob_N`
    is the probability of a draft token with all its ancestors. `round` is from the last known
    commit.
    """

    request_id: int
    round: int
    base_tokens: int
    tokens_N: np.ndarray
    parents_N: np.ndarray
    prob_N: np.ndarray


class DraftLink(Protocol):
    """A link from a verifying worker to one drafting worker; only `wait` waits for a draft.

    `generation` changes if the drafting worker has forgotten all requests. A link without a worker
    drops all commits and returns no blocks.
    """

    generation: int

    def send(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        """Send commits, and the ids of requests that have left."""

    def take(self) -> Sequence[Block]:
        """Return the received blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return once a block is received, or after the timeout."""
