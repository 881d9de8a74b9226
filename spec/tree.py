"""Draft trees: the tokens to verify, as two small integer arrays.

Node 0 is the root: the last committed token, not a draft token. Every other node i is
a draft token for the position after its parent, with `parents[i] < i`. A padding node
carries the token `PADDING`, which no draw can equal, so it is never accepted; its
parent is the root. Siblings must differ in their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

PADDING = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Trees of N nodes for B slots: `tokens_BN`, `parents_BN` (int32; the root's parent is −1)."""

    tokens_BN: jax.Array
    parents_BN: jax.Array


def roots(last_token_B: jax.Array) -> DraftTree:
    """Return trees that have only a root: plain decoding."""
    return DraftTree(last_token_B[:, None], jnp.full((last_token_B.shape[0], 1), -1, jnp.int32))


def ancestors(parents_BN: jax.Array) -> jax.Array:
    """Return mask[b, i, j]: node j is node i or one of its ancestors; bool [B, N, N].

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
    """Return the number of draft tokens on the way to each node (the root: 0); int32 [B, N]."""
    return jnp.sum(ancestors_BNN, axis=-1, dtype=jnp.int32) - 1


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
