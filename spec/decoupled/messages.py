"""The messages between a verifying and a drafting worker, in plain arrays.

    verifying  ── Commit: what a request has now, and what is verified behind it ──→  drafting
    verifying  ←──────── Block: a tree of draft tokens behind `base_tokens` ─────────  drafting

A block says of which request, which committed length and which round it is. So a block that is
late, repeated, lost or of a drafting worker that has been replaced costs speed and never a token:
what does not follow from the tokens that the request has by then is not used. Source: SpecActor
section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

MOST_NODES = 2**15 - 1  # no limit: budgets have smaller ones


class DraftPlan(NamedTuple):
    """The way a request is drafted for: its window of draft tokens, and if the next one is begun.

    Decoupled drafting goes on while a window is verified, up to 2 · window − 1 draft tokens in
    vain; otherwise the next window waits until the last one is verified (the paper: coupled).
    A round verifies at most `max_nodes` of a block's draft tokens; drafting workers are not told.
    """

    window: int
    decoupled: bool = True
    max_nodes: int = MOST_NODES


class Commit(NamedTuple):
    """The tokens that a request has now: those at `first` and behind, of prompt and response.

    `round` counts what has been said of the request. `chain` are the draft tokens that are being
    verified behind them. `processing` is temperature, top-k and top-p.
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
    """Draft tokens behind the first `base_tokens` of a request, likeliest first: a tree.

    `parents_N` is −1 for a child of the last of them, else the index of an earlier draft token;
    `prob_N` the estimated probability of a draft token and all above it. `round` is that of the
    commit which the drafting worker knew.
    """

    request_id: int
    round: int
    base_tokens: int
    tokens_N: np.ndarray
    parents_N: np.ndarray
    prob_N: np.ndarray


class DraftLink(Protocol):
    """A verifying worker's way to one drafting worker; none of its methods waits for a draft.

    Where the drafting worker is lost, `generation` changes: it has forgotten all requests, or there
    is another one. A link without a worker takes what it is told and brings nothing.
    """

    generation: int

    def tell(self, commits: Sequence[Commit], closed: Sequence[int]) -> None:
        """Send what requests have now, and which have left."""
        ...

    def take(self) -> Sequence[Block]:
        """Return the blocks that have come."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once a block has come, or after the timeout."""
        ...
