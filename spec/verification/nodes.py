"""The nodes of a packed round, over all requests, and their draws.

A node is a token for the position after its parent. The first node of every slot is its root, the
last committed token; the other nodes are draft tokens. Nodes are sorted by slot, a parent comes
before its children, and siblings have different tokens. Padding nodes have slot B and come last.

A cached response is a chain of nodes. If a rule decides how much of the response is kept, a node is
given the next cached token and the least log-probability at which this token is kept.

M nodes, B slots, W nodes of a slot, N tokens of a slot.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numba
import numpy as np
from flax import struct

from reprise.models.attention.attention import Chunks, Trees
from reprise.models.attention.kv_cache import Entries
from reprise.spec.drafter import PADDING, Drafts

NO_PARENT = -1  # of roots and padding
NOT_GIVEN = -1


@struct.dataclass
class Nodes:
    """Packed nodes, with int32 tokens, slots and parents; roots take their tokens from the slots.

    `given_M` is the token that is kept after a node if the policy gives it a log-probability of at
    least `min_logprob_M`, float32; `NOT_GIVEN` for a node without such a token, None if no node has
    a token. `chunks` are computed in the same round, and nothing is drawn at their tokens.
    """

    tokens_M: jax.Array
    slots_M: jax.Array
    parents_M: jax.Array
    given_M: jax.Array | None = None
    min_logprob_M: jax.Array | None = None
    chunks: Chunks | None = None


def pack(
    drafts: Drafts,
    taken_A: np.ndarray,
    rows_A: np.ndarray,
    num_slots: int,
    num_nodes: int,
    max_nodes: int,
) -> np.ndarray:
    """Return a root for every slot and the first `taken_A` draft tokens of each request; [5, M].

    The rows are the fields of `Nodes`, with float32 as bits; no tokens are given. Raises ValueError
    for drafts that would change tokens: more than `num_nodes` in all or `max_nodes` of a slot (an
    error of the budget), a parent that does not come before its child, or siblings with the same
    token (errors of the drafter).
    """
    taken = int(taken_A.sum())
    max_drafts = int(taken_A.max(initial=0))
    if num_slots + taken > num_nodes or max_drafts >= max_nodes:
        raise ValueError(
            f"the budget took {taken} draft tokens, {max_drafts} of one request: expected at most "
            f"{num_nodes - num_slots}, and {max_nodes - 1} of one request, in a round of "
            f"{num_nodes} nodes and {num_slots} slots; fix: see spec.budget.budget.DraftDecision"
        )
    table_5M = np.empty((5, num_nodes), np.int32)
    table_5M[3:] = NOT_GIVEN
    request_B = np.full(num_slots, -1, np.int32)
    request_B[rows_A] = np.arange(len(rows_A))
    a, i = _pack(drafts.tokens_AN, drafts.parents_AN, taken_A, request_B, max_drafts, table_5M)
    if a >= 0:
        parent = int(drafts.parents_AN[a, i])
        token = int(drafts.tokens_AN[a, i])
        raise ValueError(
            f"draft token {i} of live request {a} is {token} behind parent {parent}: expected a "
            f"parent in −1 … {i - 1}, and siblings that differ in their tokens; fix: see "
            "spec.drafter.Drafter.propose"
        )
    return table_5M


def unpack(table_5M: jax.Array) -> Nodes:
    """Return the nodes of a `pack` table, on the device."""
    tokens_M, slots_M, parents_M, given_M, bits_M = table_5M
    min_logprob_M = jax.lax.bitcast_convert_type(bits_M, jnp.float32)
    return Nodes(tokens_M, slots_M, parents_M, given_M, min_logprob_M)


@numba.njit(cache=True, nogil=True)
def _pack(tokens_AN, parents_AN, taken_A, request_B, max_drafts, table_5M):  # type: ignore[no-untyped-def]
    """Return the request and place of the first invalid draft token; −1 if all are valid."""
    m = 0
    num_slots = len(request_B)
    # the last child of each parent so far, and the previous sibling of each draft token
    last_N = np.empty(max_drafts + 1, np.int32)
    before_N = np.empty(max_drafts, np.int32)
    for b in range(num_slots):
        root = m
        a = request_B[b]
        table_5M[0, m] = 0
        table_5M[1, m] = b
        table_5M[2, m] = NO_PARENT
        m += 1
        last_N[:] = -1
        for i in range(taken_A[a] if a >= 0 else 0):
            parent = parents_AN[a, i]
            if parent >= i or parent < -1:
                return a, i
            sibling = before_N[i] = last_N[parent + 1]
            while sibling >= 0:
                if tokens_AN[a, sibling] == tokens_AN[a, i]:
                    return a, i
                sibling = before_N[sibling]
            last_N[parent + 1] = i
            table_5M[0, m] = tokens_AN[a, i]
            table_5M[1, m] = b
            table_5M[2, m] = root + 1 + parent
            m += 1
    table_5M[0, m:] = PADDING
    table_5M[1, m:] = num_slots
    table_5M[2, m:] = NO_PARENT
    return -1, -1


@numba.njit(cache=True, nogil=True)
def are_chains(parents_M):  # type: ignore[no-untyped-def]
    """Return whether no node has two children, on the host."""
    has_child_M = np.zeros(len(parents_M), np.bool_)
    for parent in parents_M:
        if parent >= 0:
            if has_child_M[parent]:
                return False
            has_child_M[parent] = True
    return True


def roots(last_token_B: jax.Array) -> Nodes:
    """Return a root for every slot, without draft tokens: plain decoding."""
    slots_B = jnp.arange(last_token_B.shape[0], dtype=jnp.int32)
    return Nodes(last_token_B, slots_B, jnp.full_like(slots_B, NO_PARENT))


def of_trees(
    tokens_BN: jax.Array, parents_BN: jax.Array, count_B: jax.Array, num_nodes: int
) -> tuple[Nodes, jax.Array]:
    """Return the first `count_B` nodes of trees, roots included, as the nodes of a round.

    `parents_BN` are places in the tree of the slot, −1 for the root. Also returns the index of each
    tree node among the nodes of the round, int32 [B, N]; `num_nodes` for places without a node.
    """
    B, N = tokens_BN.shape
    at_N = jnp.arange(tokens_BN.shape[1], dtype=jnp.int32)
    end_B = jnp.cumsum(count_B)
    first_B = (end_B - count_B).astype(jnp.int32)
    place_BN = jnp.where(at_N < count_B[:, None], first_B[:, None] + at_N, num_nodes)
    slots_M = jnp.searchsorted(end_B, jnp.arange(num_nodes), side="right").astype(jnp.int32)
    first_M = jnp.take(first_B, slots_M, mode="clip")
    index_M = jnp.clip(slots_M * N + jnp.arange(num_nodes) - first_M, 0, B * N - 1)
    tokens_M, parents_M = (x_BN.reshape(-1)[index_M] for x_BN in (tokens_BN, parents_BN))
    tokens_M = jnp.where(slots_M < B, tokens_M, PADDING)
    parents_M = jnp.where((slots_M < B) & (parents_M >= 0), first_M + parents_M, NO_PARENT)
    return Nodes(tokens_M, slots_M, parents_M), place_BN


def planted(nodes: Nodes, last_token_B: jax.Array) -> Nodes:
    """Return the nodes with the roots' tokens filled in."""
    is_root_M = (nodes.parents_M < 0) & (nodes.slots_M < len(last_token_B))
    last_token_M = jnp.take(last_token_B, nodes.slots_M, mode="clip")
    tokens_M = jnp.where(is_root_M, last_token_M, nodes.tokens_M)
    return dataclasses.replace(nodes, tokens_M=tokens_M)


def trees(nodes: Nodes, num_slots: int, max_nodes: int, num_paths: int = 0) -> Trees:
    """Return the trees of the nodes by slot; no slot has more than `max_nodes` nodes.

    The trees have at most `num_paths` paths in total; 0: as many as nodes.
    """
    M = len(nodes.slots_M)
    W = min(max_nodes, len(nodes.slots_M) - num_slots + 1)
    first_B = jnp.searchsorted(nodes.slots_M, jnp.arange(num_slots)).astype(jnp.int32)
    place_M = jnp.arange(M) - jnp.take(first_B, nodes.slots_M, mode="clip")
    node_BW = jnp.minimum(first_B[:, None] + jnp.arange(W), M - 1)
    above_BW = jnp.maximum(nodes.parents_M[node_BW] - first_B[:, None], -1)
    path_BWW = _paths(above_BW)
    return Trees(nodes.slots_M, nodes.parents_M, place_M, first_B, path_BWW, num_paths or M)


def _paths(above_BW: jax.Array) -> jax.Array:
    """Return mask[b, i, j]: place j is place i or one of its ancestors; bool [B, W, W]."""
    W = above_BW.shape[1]
    places_W = jnp.arange(W)
    up_BW = jnp.where(above_BW < 0, places_W, above_BW)  # a root is above itself
    path_BWW = jnp.broadcast_to(jnp.eye(W, dtype=bool), (*above_BW.shape, W))
    # each step doubles the generations: a loop to the depth of the trees would wait for the host
    for _ in range((W - 1).bit_length()):
        path_BWW = path_BWW | jnp.take_along_axis(path_BWW, up_BW[..., None], axis=1)
        up_BW = jnp.take_along_axis(up_BW, up_BW, axis=1)
    return path_BWW


DRAWN = 1
KEPT = 2  # kinds of emitted tokens; 0 if not emitted


@struct.dataclass
class Drawn:
    """Draws of a round at each node; `emitted_M` marks the next tokens of the slots.

    `reused_M` marks the nodes that kept their given token. `of_chunks` are the entries of the chunk
    tokens.
    """

    tokens_M: jax.Array
    logprobs_M: jax.Array
    emitted_M: jax.Array
    reused_M: jax.Array
    of_chunks: Entries | None


def pack_draws(drawn: Drawn) -> jax.Array:
    """Pack draws for one transfer: tokens, log-prob bits, `DRAWN`, `KEPT` or 0; int32 [3, M]."""
    bits_M = jax.lax.bitcast_convert_type(drawn.logprobs_M.astype(jnp.float32), jnp.int32)
    kind_M = jnp.where(drawn.emitted_M, jnp.where(drawn.reused_M, KEPT, DRAWN), 0)
    return jnp.stack([drawn.tokens_M, bits_M, kind_M])


def unpack_draws(packed: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, log-probs, kinds) on the host; waits for the device."""
    tokens, bits, kind = np.asarray(packed)
    return tokens, bits.view(np.float32), kind


@numba.njit(cache=True, nogil=True)
def by_slot(tokens_M, logprobs_M, kind_M, slots_M, num_slots):  # type: ignore[no-untyped-def]
    """Return the emitted tokens of each slot in order: (tokens_BN, logprobs_BN, count_B, reused_B).

    The first `reused_B` were given and kept. Nodes are sorted by slot, and along a path by depth.
    """
    count_B = np.zeros(num_slots, np.int32)
    reused_B = np.zeros(num_slots, np.int32)
    for m in range(len(slots_M)):
        if kind_M[m]:
            count_B[slots_M[m]] += 1
    size = num_slots, max(1, count_B.max())
    tokens_BN = np.zeros(size, np.int32)
    logprobs_BN = np.zeros(size, np.float32)
    count_B[:] = 0
    for m in range(len(slots_M)):
        if kind_M[m]:
            b = slots_M[m]
            tokens_BN[b, count_B[b]] = tokens_M[m]
            logprobs_BN[b, count_B[b]] = logprobs_M[m]
            count_B[b] += 1
            reused_B[b] += kind_M[m] == KEPT
    return tokens_BN, logprobs_BN, count_B, reused_B
