"""Pairs of a block of queries and a visible block of keys in packed rows, by ranges.

B rows, T positions, n blocks of a row, C positions of a block, P pairs of a row: n (n + 1) / 2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_BITS = 15  # of a block number in a list of pairs
_PADDING = 2**30  # the prompt of padding in ranges; rows are padded at the end


def seen_pairs(prompt_BT: jax.Array, branch_BT: jax.Array, size: int) -> jax.Array:
    """Return whether block i of queries sees any key of block j, by ranges; bool [B, n, n]."""
    B, T = prompt_BT.shape
    prompt = jnp.where(prompt_BT > 0, prompt_BT, _PADDING).reshape(B, T // size, size)
    branch = branch_BT.reshape(prompt.shape)

    def overlap(x_BnC: jax.Array) -> jax.Array:
        low_Bn = x_BnC.min(axis=2)
        high_Bn = x_BnC.max(axis=2)
        return (low_Bn[:, :, None] <= high_Bn[:, None]) & (low_Bn[:, None] <= high_Bn[:, :, None])

    shared_Bn = branch.min(axis=2) == 0
    before_nn = np.tril(np.ones((T // size, T // size), bool))
    return before_nn & overlap(prompt) & (shared_Bn[:, None] | overlap(branch))


def whole_pairs(prompt_BT: jax.Array, branch_BT: jax.Array, size: int) -> jax.Array:
    """Return which pairs need no mask, because every query sees every key; bool [B, n, n]."""
    B, T = prompt_BT.shape
    prompt, branch = (x.reshape(B, T // size, size) for x in (prompt_BT, branch_BT))

    def same(x_BnC: jax.Array) -> jax.Array:
        low_Bn = x_BnC.min(axis=2)
        high_Bn = x_BnC.max(axis=2)
        of_one_Bn = low_Bn == high_Bn
        return of_one_Bn[:, :, None] & of_one_Bn[:, None] & (low_Bn[:, :, None] == low_Bn[:, None])

    shared_Bn = branch.max(axis=2) == 0
    before_nn = np.tril(np.ones((T // size, T // size), bool), -1)
    return before_nn & same(prompt) & (shared_Bn[:, None] | same(branch))


def pair_list(
    prompt_BT: jax.Array, branch_BT: jax.Array, size: int, by_query: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the seen pairs of each row, int32 [B · P], and their number, [B].

    `size` divides T. A pair is (query block << 16) + (key block << 1) + whole. Pairs are in order
    of query blocks, or of key blocks, then of the other blocks; the last pair is repeated to the
    end.
    """
    seen_Bnn = seen_pairs(prompt_BT, branch_BT, size)
    whole_Bnn = whole_pairs(prompt_BT, branch_BT, size)
    query_P, key_P = np.tril_indices(seen_Bnn.shape[1])
    if not by_query:
        order = np.lexsort((query_P, key_P))
        query_P = query_P[order]
        key_P = key_P[order]
    seen_BP = seen_Bnn[:, query_P, key_P]
    pair_P = jnp.asarray((query_P << (BLOCK_BITS + 1)) + (key_P << 1), jnp.int32)
    pair_BP = pair_P + whole_Bnn[:, query_P, key_P].astype(jnp.int32)
    num_B = seen_BP.sum(axis=1, dtype=jnp.int32)
    order_BP = jnp.argsort(~seen_BP, axis=1, stable=True)
    at_BP = jnp.minimum(jnp.arange(len(query_P)), num_B[:, None] - 1)
    order_BP = jnp.take_along_axis(order_BP, at_BP, axis=1)
    return jnp.take_along_axis(pair_BP, order_BP, axis=1).reshape(-1), num_B


def block_bounds(
    prompt_BT: jax.Array, branch_BT: jax.Array, size: int, by_query: bool
) -> jax.Array:
    """Return the first place of blocks in `pair_list`, and the end of rows; int32 [B · (n + 1)]."""
    num_Bn = seen_pairs(prompt_BT, branch_BT, size).sum(axis=2 if by_query else 1, dtype=jnp.int32)
    B, n = num_Bn.shape
    bound_BX = jnp.pad(jnp.cumsum(num_Bn, axis=1), ((0, 0), (1, 0)))
    return (bound_BX + n * (n + 1) // 2 * jnp.arange(B, dtype=jnp.int32)[:, None]).reshape(-1)


def query_block(pair: jax.Array) -> jax.Array:
    """Return the query block of a pair in a list."""
    return pair >> (BLOCK_BITS + 1)


def key_block(pair: jax.Array) -> jax.Array:
    """Return the key block of a pair in a list."""
    return (pair >> 1) & (2**BLOCK_BITS - 1)


def is_whole(pair: jax.Array) -> jax.Array:
    """Return whether every query of a pair sees every key of the pair."""
    return pair % 2 == 1
