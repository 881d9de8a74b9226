"""Draft trees: which tokens to try, as two small integer arrays.

Node 0 is the root: the last committed token, not a guess. Every other node i is
a guess for the position after its parent, with `parents[i] < i`. A padding node
carries the token `PADDING`, which no draw can equal, so it is never accepted; its
parent is the root. Siblings must differ in their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

PADDING = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Trees of N nodes for B slots: `tokens_BN`, `parents_BN` (int32; the root's parent is −1)."""

    tokens_BN: jax.Array
    parents_BN: jax.Array


def roots(last_token_B: jax.Array) -> DraftTree:
    """Trees that hold the root alone: plain decoding."""
    return DraftTree(last_token_B[:, None], jnp.full((last_token_B.shape[0], 1), -1, jnp.int32))


def ancestors(parents_BN: jax.Array) -> jax.Array:
    """mask[b, i, j]: node j is node i or one of its ancestors; bool [B, N, N].

    The closure of the parent relation by squaring: log₂ N products.
    """
    N = parents_BN.shape[1]
    nodes_N = jnp.arange(N)
    reach_BNN = (nodes_N[:, None] == nodes_N) | (parents_BN[:, :, None] == nodes_N)
    for _ in range(max(N - 1, 0).bit_length()):
        square_BNN = jnp.einsum(
            "bij,bjk->bik", reach_BNN.astype(jnp.float32), reach_BNN.astype(jnp.float32)
        )
        reach_BNN = square_BNN > 0
    return reach_BNN


def depths(ancestors_BNN: jax.Array) -> jax.Array:
    """How many guesses lead to each node (the root: 0); int32 [B, N]."""
    return jnp.sum(ancestors_BNN, axis=-1, dtype=jnp.int32) - 1


@dataclasses.dataclass(frozen=True)
class Draft:
    """One slot's guesses on the host, without the root: `parents[i]` is −1 for a child of the root.

    `tokens[i]` guesses the position after node `parents[i]`; parents come first.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


def chain(tokens: Sequence[int]) -> Draft:
    """A draft without branches."""
    return Draft(tokens, range(-1, len(tokens) - 1))


NO_DRAFT = Draft((), ())


def pack(drafts: Sequence[Draft], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of `num_nodes` nodes a slot (root included, its token left 0); cut where longer.

    Nodes are topologically ordered, so that the first `num_nodes` of a draft are a
    draft. Returns int32 tokens_BN, parents_BN. Raises ValueError where a parent does
    not come before its child or siblings repeat a token.
    """
    tokens_BN = np.full((len(drafts), num_nodes), PADDING, np.int32)
    parents_BN = np.zeros((len(drafts), num_nodes), np.int32)
    tokens_BN[:, 0], parents_BN[:, 0] = 0, -1
    for b, draft in enumerate(drafts):
        n = min(len(draft.tokens), num_nodes - 1)
        edges = list(zip(draft.parents[:n], draft.tokens[:n], strict=True))
        for i, (parent, token) in enumerate(edges):
            if not -1 <= parent < i or token < 0:
                raise ValueError(
                    f"draft node {i} of slot {b} is (parent {parent}, token {token}): expected a "
                    f"parent in −1 … {i - 1} and a token of at least 0"
                )
        if len(set(edges)) != n:
            raise ValueError(f"the draft of slot {b} repeats a token among siblings: merge them")
        tokens_BN[b, 1 : n + 1] = draft.tokens[:n]
        parents_BN[b, 1 : n + 1] = np.asarray(draft.parents[:n], np.int32) + 1
    return tokens_BN, parents_BN


@dataclasses.dataclass(frozen=True)
class SlotView:
    """What a drafter sees of a live request: its identity and how much may still be emitted."""

    request_id: int
    group_id: int
    sample_index: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    remaining_tokens: int


class Drafter(Protocol):
    """Proposes drafts; being wrong costs time, never correctness.

    The engine calls `propose` once a round with the live requests and the most
    nodes each may get (root not counted), and `finished` when a request ends.
    """

    def propose(self, views: Sequence[SlotView], max_nodes: int) -> Sequence[Draft]: ...

    def finished(self, view: SlotView) -> None: ...
