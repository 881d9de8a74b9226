"""Positions that tiles of rows read in kernels for attention to pages, and the order of rows.

B slots, N tiles, W tokens of a slot, H query heads, K key/value heads, G = H/K, X = W·G rows of a
key/value head, h head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Paths(NamedTuple):
    """The paths of the slot of each tile: the number, the first path, and the blocks of a path."""

    num_N: jax.Array
    first_N: jax.Array
    blocks: int
    max_paths: int


class Reads(NamedTuple):
    """The positions that tiles read; int32.

    All rows of a tile see the first `length_N` positions of row `row_N` of the table, and some rows
    see positions up to `last_N`; if that is 0 the tile reads nothing. With `paths`, positions from
    the last block of `length_N` on are in side blocks of each path.
    """

    row_N: jax.Array
    length_N: jax.Array
    last_N: jax.Array
    paths: Paths | None = None


def rows_by_head(q_BWHh: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return queries as [B, K, X, h]."""
    B, W, _, h = q_BWHh.shape
    q_BKWGh = q_BWHh.reshape(B, W, num_kv_heads, -1, h).transpose(0, 2, 1, 3, 4)
    return q_BKWGh.reshape(B, num_kv_heads, -1, h)


def heads_of_rows(x_BKXi: jax.Array, num_nodes: int, num_heads: int) -> jax.Array:
    """Return rows as [B, W, H, i]."""
    B, K, _, i = x_BKXi.shape
    G = num_heads // K
    x_BKWGi = x_BKXi[:, :, : num_nodes * G].reshape(B, K, num_nodes, G, i)
    return x_BKWGi.transpose(0, 2, 1, 3, 4).reshape(B, num_nodes, num_heads, i)
