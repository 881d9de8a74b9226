"""Noise that goes by content: a token's noise is named by what it comes after.

key(r, t) = fold_in(fold_in(request_key, h), c), where h is a hash of the K tokens before t
(prompt included) and c counts how often that hash has occurred in the response before t.
So each key is used at most once in a response, draws of one response are independent,
and a text that an insertion has moved meets its old noise again. One function serves
host (numpy) and device (jax). K = tokens of a context, X = room for response tokens,
L = tokens of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec.tree import DraftTree

NO_TOKEN = -1  # before the first token
_PRIME = np.uint32(16777619)  # FNV-1a
_BASIS = np.uint32(2166136261)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contexts:
    """Of each slot: its last K tokens, and the hash that each response token was drawn at."""

    tail_BK: jax.Array
    seen_BX: jax.Array


def hash_contexts(tokens_K: Any) -> Any:
    """uint32 hash of the last axis of int32 tokens, oldest first; numpy or jax arrays."""
    words = tokens_K.astype(np.uint32)  # NO_TOKEN wraps around
    value = (words[..., 0] ^ _BASIS) * _PRIME
    for k in range(1, tokens_K.shape[-1]):
        value = (value ^ words[..., k]) * _PRIME
    value = (value ^ (value >> 15)) * np.uint32(0x85EBCA6B)
    return value ^ (value >> 13)


def of_nodes(
    contexts: Contexts, tree: DraftTree, emitted_B: jax.Array, reach_BNN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(hash, count) that names the noise of each node's draw; uint32 and int32 [B, N].

    `reach_BNN` are the nodes on the way to each node, itself included.
    """
    hash_BN = hash_contexts(_node_contexts(contexts.tail_BK, tree))
    N, X = hash_BN.shape[1], contexts.seen_BX.shape[1]
    known_BX = jnp.arange(X) < emitted_B[:, None]
    same_BNX = (contexts.seen_BX[:, None] == hash_BN[:, :, None]) & known_BX[:, None]
    above_BNN = reach_BNN & ~jnp.eye(N, dtype=bool)
    same_BNN = (hash_BN[:, None] == hash_BN[:, :, None]) & above_BNN
    return hash_BN, jnp.sum(same_BNX, axis=2) + jnp.sum(same_BNN, axis=2)


def _node_contexts(tail_BK: jax.Array, tree: DraftTree) -> jax.Array:
    """The K tokens up to each node, itself the last; the root is the tail's last. [B, N, K]."""
    B, N = tree.tokens_BN.shape
    K = tail_BK.shape[1]
    node_BN = jnp.broadcast_to(jnp.arange(N), (B, N))
    beyond_BN = jnp.zeros((B, N), jnp.int32)  # steps beyond the root
    tokens = []
    for _ in range(K):
        in_tree_BN = jnp.take_along_axis(tree.tokens_BN, node_BN, axis=1)
        in_tail_BN = jnp.take_along_axis(tail_BK, jnp.maximum(K - 1 - beyond_BN, 0), axis=1)
        tokens.append(jnp.where(node_BN > 0, in_tree_BN, in_tail_BN))
        beyond_BN += node_BN == 0
        parent_BN = jnp.take_along_axis(tree.parents_BN, node_BN, axis=1)
        node_BN = jnp.maximum(parent_BN, 0)
    return jnp.stack(tokens[::-1], axis=-1)


def content_keys(keys_B: jax.Array, hash_BN: jax.Array, count_BN: jax.Array) -> jax.Array:
    """The noise keys of draws that (hash, count) name; a key array [B, N]."""

    def one(key: jax.Array, name: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, name), count)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0, 0)))(keys_B, hash_BN, count_BN)


def advance(
    contexts: Contexts,
    hash_BN: jax.Array,
    tokens_BN: jax.Array,
    count_B: jax.Array,
    emitted_B: jax.Array,
) -> Contexts:
    """After `count` tokens more, drawn at these hashes; `emitted` counts those before them."""
    X = contexts.seen_BX.shape[1]
    both_BX = jnp.concatenate([contexts.tail_BK, tokens_BN], axis=1)
    at_BK = count_B[:, None] + jnp.arange(contexts.tail_BK.shape[1])
    tail_BK = jnp.take_along_axis(both_BX, at_BK, axis=1)
    new_N = jnp.arange(hash_BN.shape[1])
    at_BN = jnp.where(new_N < count_B[:, None], emitted_B[:, None] + new_N, X)
    rows_B1 = jnp.arange(len(count_B))[:, None]
    return Contexts(tail_BK, contexts.seen_BX.at[rows_B1, at_BN].set(hash_BN, mode="drop"))


def of_rows(
    tokens_BL: np.ndarray,
    prompt_tokens_B: np.ndarray,
    total_tokens_B: np.ndarray,
    num_context: int,
    room: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(tail_BK, seen_BX) of rows that hold so many tokens, on the host."""
    hash_BL = _hash_before_each(tokens_BL, num_context)
    at_BX = prompt_tokens_B[:, None] + np.arange(room)
    inside_BX = at_BX < total_tokens_B[:, None]
    seen_BX = np.take_along_axis(hash_BL, np.minimum(at_BX, hash_BL.shape[1] - 1), axis=1)
    at_BK = total_tokens_B[:, None] - num_context + np.arange(num_context)
    last_BK = np.take_along_axis(tokens_BL, np.maximum(at_BK, 0), axis=1)
    last_BK = np.where(at_BK >= 0, last_BK, NO_TOKEN).astype(np.int32)
    return last_BK, np.where(inside_BX, seen_BX, 0).astype(np.uint32)


def of_response(
    prompt: np.ndarray, response: np.ndarray, num_context: int
) -> tuple[np.ndarray, np.ndarray]:
    """(hash, count) that names the noise of each response token; uint32 and int32 [num_tokens]."""
    tokens_L = np.concatenate([prompt, response]).astype(np.int32)
    names = _hash_before_each(tokens_L[None], num_context)[0, len(prompt) :]
    counts = np.zeros(len(names), np.int32)
    met: dict[int, int] = {}
    for t, name in enumerate(names.tolist()):
        counts[t] = met.get(name, 0)
        met[name] = counts[t] + 1
    return names, counts


def _hash_before_each(tokens_BL: np.ndarray, num_context: int) -> np.ndarray:
    """The hash of the K tokens before each position; uint32 [B, L]."""
    padded = np.pad(tokens_BL, ((0, 0), (num_context, 0)), constant_values=NO_TOKEN)
    windows = np.lib.stride_tricks.sliding_window_view(padded[:, :-1], num_context, axis=1)
    return hash_contexts(windows)
