"""The messages between a verifying and a drafting worker, in plain arrays.

    verifying  ── Commit: a request's tokens, and the chain that is verified next ────→  drafting
    verifying  ←──────── Block: a tree of draft tokens after `base_tokens` ────────────  drafting

A block names its request, committed length and round. So a late, repeated or lost block costs speed
and never a token: draft tokens that do not follow from the request's present tokens are not used.
Source: SpecActor section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

MAX_NODES = 2**15 - 1  # no limit: budgets have smaller ones


class DraftPlan(NamedTuple):
    """A request's window of draft tokens, and whether the next one is drafted early.

    Decoupled drafting continues while a window is verified, up to 2 · window − 1 draft tokens in
    vain; otherwise it waits for the verification (the paper: coupled). A round verifies at most
    `max_nodes` of a block; only the verifier knows them.
    """

    window: int
    decoupled: bool = True
    max_nodes: int = MAX_NODES


class Commit(NamedTuple):
    """A request's tokens from `first` on, of prompt and response, and the `chain` verified next.

    `round` counts the request's commits; `processing` is temperature, top-k and top-p.
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
    the probability of a draft token and all above it. `round` is of the last commit known.
    """

    request_id: int
    round: int
    base_tokens: int
    tokens_N: np.ndarray
    parents_N: np.ndarray
    prob_N: np.ndarray


class DraftLink(Protocol):
    """A verifying worker's link to one drafting worker; only `wait` waits for a draft.

    `generation` changes if the drafting worker has forgotten all requests. A link without a worker
    drops all commits and returns no block.
    """

    generation: int

    def send(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        """Send commits, and the requests that have left."""

    def take(self) -> Sequence[Block]:
        """Return the received blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return once a block is received, or after the timeout."""
