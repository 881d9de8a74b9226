"""New tokens of slots on a Hopper GPU: written to their pages, then attended to as old ones are.

The tokens of a slot are chains or a tree. A node's first child continues its path; other children
begin side paths. The path of a slot's root is written in place, in positions that hold nothing yet.
A side path has blocks of keys of its own: copies of the positions from the block of the slot's
length on, with its tokens at their places. So each query meets each key at the same place of the
same block as if the token had been decoded, and finds the same bits (`models.kernels.hopper`).

X tokens, B slots, N tiles of A tokens, R rows of a tile, S side paths, E positions of a side path's
blocks, P pages, T positions of a page, K key/value heads, G = H/K query heads of one, h head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import After
from models.kernels import page_attention_gpu
from models.kernels.hopper import ROWS
from models.kernels.page_attention_gpu import Blocks, Sides
from models.page_attention import place_of, write_entries

SIDES_AT_ONCE = 16  # of side paths that are copied


def attend(
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    after: After,
    table_BN: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the attention of new tokens to all before them and themselves, [X, H, h], and pages.

    Tokens of no row, and of slots without pages there, get arbitrary numbers.
    """
    (X, H, h), K = q_XHh.shape, k_XKh.shape[1]
    group = H // K
    plan = Plan.of(after, table_BN, keys_PKTh, group)
    new = k_XKh.astype(keys_PKTh.dtype), v_XKh.astype(values_PKTh.dtype)
    pages = [
        write_entries(held, x, plan.page_X, plan.offset_X)
        for held, x in zip((keys_PKTh, values_PKTh), new, strict=True)
    ]
    sides = [plan.side_blocks(held, x) for held, x in zip(pages, new, strict=True)]
    token_NA = plan.token_NA
    N, A = token_NA.shape
    q_NAKGh = jnp.take(q_XHh, token_NA, axis=0, mode="clip").reshape(N, A, K, group, h)
    q_NKYh = q_NAKGh.swapaxes(1, 2).reshape(N, K, A * group, h).astype(keys_PKTh.dtype)
    q_NKRh = jnp.pad(q_NKYh, ((0, 0), (0, 0), (0, ROWS - A * group), (0, 0)))
    out_NKRh = page_attention_gpu.attend_tiles(
        q_NKRh,
        *pages,
        *(plan.by_row(x, group) for x in (plan.position_NA, plan.path_NA)),
        plan.blocks,
        tuple(sides) if after.width > 1 else (),
        interpret=interpret,
    )
    out_NKAGh = out_NKRh[:, :, : A * group].reshape(N, K, A, group, h)
    out_XKGh = out_NKAGh[plan.tile_X, :, plan.place_X]
    return out_XKGh.reshape(X, H, h), *pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where tokens are written, the tiles that they are in, and the sources of side blocks.

    `token_NA` is X, and `position_NA` −1, of places without a token. `source_SE` is the token of a
    position of a side path, X of none, and −1 of positions in the slot's page.
    """

    page_X: jax.Array
    offset_X: jax.Array
    tile_X: jax.Array
    place_X: jax.Array
    token_NA: jax.Array
    position_NA: jax.Array
    path_NA: jax.Array
    blocks: Blocks
    num_sides: jax.Array
    source_SE: jax.Array
    block_S: jax.Array  # of pages, with the position of a slot's length

    @staticmethod
    def of(after: After, table_BN: jax.Array, pages_PKTh: jax.Array, group: int) -> Plan:
        X, (B, _), (P, _, T, _) = len(after.row_X), table_BN.shape, pages_PKTh.shape
        at_X, A = jnp.arange(X, dtype=jnp.int32), ROWS // group
        is_live_X = (after.row_X >= 0) & (after.row_X < B) & (after.length_X >= 0)
        row_X = jnp.where(is_live_X, after.row_X, -1)
        ups, depth_X = _ancestors(after.parent_X)
        position_X = after.length_X + depth_X
        starts_X = _starts(after, is_live_X)
        side_X = _side_of(starts_X, after.parent_X)
        place = place_of(
            table_BN, jnp.where(side_X < 0, row_X, -1), position_X, pages_PKTh
        )

        def by_row(x_X: jax.Array) -> jax.Array:
            return jnp.zeros(B + 1, jnp.int32).at[row_X].max(x_X)[:B]  # −1 is the row beyond

        num_B = jnp.zeros(B + 1, jnp.int32).at[row_X].add(starts_X)[:B]
        first_B = (jnp.cumsum(num_B) - num_B).astype(jnp.int32)
        length_B, end_B = by_row(after.length_X), by_row(jnp.where(side_X < 0, position_X + 1, 0))
        tile_X, place_X = _tiles(after.row_X, A)
        N = min(X, after.max_runs + X // A)

        def of_tiles(x_X: jax.Array, none: int) -> jax.Array:
            return jnp.full((N, A), none, jnp.int32).at[tile_X, place_X].set(x_X)

        token_NA = of_tiles(jnp.where(is_live_X, at_X, X), X)
        position_NA = of_tiles(jnp.where(is_live_X, position_X, -1), -1)
        path_X = jnp.where(side_X < 0, 0, side_X - first_B[row_X] + 1)
        row_N = jnp.max(of_tiles(row_X, -1), axis=1)
        S, nb = (X - min(X, B), _blocks(after.width)) if after.width > 1 else (0, 0)
        own = [jnp.take(x, row_N, axis=0, mode="clip") for x in (num_B, first_B)]
        table_NX, length_N, end_N = (
            jnp.take(x, row_N, axis=0, mode="clip") for x in (table_BN, length_B, end_B)
        )
        last_N = jnp.max(position_NA, axis=1) + 1
        sides = Sides(*own, nb, S * nb)
        blocks = page_attention_gpu.blocks_of(table_NX, length_N, last_N, end_N, P, T, sides)
        # the last token of a side path has all the others above it
        tip_S = jnp.zeros(S + 1, jnp.int32).at[jnp.where(side_X < 0, S, side_X)].max(at_X)[:S]
        return Plan(
            *place,
            *(tile_X, place_X, token_NA, position_NA, of_tiles(path_X, 0)),
            blocks,
            jnp.sum(starts_X, dtype=jnp.int32),
            *_sources(tip_S, nb * ROWS, ups, depth_X, row_X, after.length_X, table_BN, T),
        )

    def by_row(self, x_NA: jax.Array, group: int) -> jax.Array:
        """Return a number of each row of tiles; rows without a token have the position −1."""
        x_NR = jnp.repeat(x_NA, group, axis=1)
        return jnp.pad(x_NR, ((0, 0), (0, ROWS - x_NR.shape[1])), constant_values=-1)

    def side_blocks(self, pages_PKTh: jax.Array, new_XKh: jax.Array) -> jax.Array:
        """Return the keys or values of the side paths that there are, [S · E / 64, K, 64, h]."""
        (S, E), (P, K, T, h), X = self.source_SE.shape, pages_PKTh.shape, len(new_XKh)
        n, each = min(SIDES_AT_ONCE, S), T // ROWS
        blocks = pages_PKTh.reshape(P, K, each, ROWS, h)

        def some(i: jax.Array, out: jax.Array) -> jax.Array:
            first = jnp.minimum(i * n, S - n)
            source_nE = jax.lax.dynamic_slice_in_dim(self.source_SE, first, n)
            token_nE = jnp.where(source_nE < 0, X, source_nE)
            x_nEKh = jnp.take(new_XKh, token_nE, axis=0, mode="fill", fill_value=0)
            x_nbK64h = x_nEKh.reshape(n, -1, ROWS, K, h).swapaxes(2, 3)
            block_n = jax.lax.dynamic_slice_in_dim(self.block_S, first, n)
            held_nK64h = blocks[block_n // each, :, block_n % each]
            is_held_n64 = source_nE[:, None, :ROWS, None] < 0
            x_nbK64h = x_nbK64h.at[:, 0].set(jnp.where(is_held_n64, held_nK64h, x_nbK64h[:, 0]))
            x = x_nbK64h.reshape(-1, K, ROWS, h)
            return jax.lax.dynamic_update_slice_in_dim(out, x, first * E // ROWS, 0)

        none = jax.lax.empty((S * E // ROWS, K, ROWS, h), new_XKh.dtype)
        return jax.lax.fori_loop(0, -(-self.num_sides // max(n, 1)), some, none) if S else none


def _blocks(width: int) -> int:
    """Return the blocks of a side path of at most so many tokens, wherever it begins in one."""
    return -(-(ROWS - 1 + width) // ROWS)


def _ancestors(parent_X: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return each token's 2^i-th ancestor, or root, for i = 0, 1, …; and its depth."""
    X = len(parent_X)
    up_X = jnp.where(parent_X < 0, jnp.arange(X, dtype=jnp.int32), parent_X)
    depth_X, ups = (parent_X >= 0).astype(jnp.int32), [up_X]
    for _ in range(max(X - 1, 1).bit_length()):
        depth_X = depth_X + depth_X[up_X]
        up_X = up_X[up_X]
        ups.append(up_X)
    return ups, depth_X


def _starts(after: After, is_live_X: jax.Array) -> jax.Array:
    """Return which tokens begin a side path: children of a token but its first."""
    X = len(after.parent_X)
    if after.width <= 1:
        return jnp.zeros(X, bool)
    at_X, parent_X = jnp.arange(X, dtype=jnp.int32), after.parent_X
    parent_X = jnp.where(is_live_X & (parent_X >= 0), parent_X, X)
    first_X = jnp.full(X, X, jnp.int32).at[parent_X].min(at_X, mode="drop")
    return (parent_X < X) & (jnp.take(first_X, parent_X, mode="clip") != at_X)


def _side_of(starts_X: jax.Array, parent_X: jax.Array) -> jax.Array:
    """Return the number of each token's side path, −1 if it is in place."""
    X = len(starts_X)
    at_X = jnp.arange(X, dtype=jnp.int32)
    head_X = jnp.where(starts_X | (parent_X < 0), at_X, parent_X)
    for _ in range(max(X - 1, 1).bit_length()):
        head_X = head_X[head_X]
    number_X = jnp.cumsum(starts_X).astype(jnp.int32) - 1
    return jnp.where(starts_X[head_X], number_X[head_X], -1)


def _tiles(row_X: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the tile of each token and its place there: a run of a row's tokens has whole tiles."""
    at_X = jnp.arange(len(row_X), dtype=jnp.int32)
    begins_X = jnp.concatenate([jnp.ones(1, bool), row_X[1:] != row_X[:-1]])
    rank_X = at_X - jax.lax.cummax(jnp.where(begins_X, at_X, 0))
    return jnp.cumsum(rank_X % size == 0).astype(jnp.int32) - 1, rank_X % size


def _sources(
    tip_S: jax.Array,
    num_positions: int,
    ups: list[jax.Array],
    depth_X: jax.Array,
    row_X: jax.Array,
    length_X: jax.Array,
    table_BN: jax.Array,
    page_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the source of each position of side paths that end with tokens `tip_S`; see `Plan`."""
    first_S = length_X[tip_S] // ROWS * ROWS
    depth_SE = first_S[:, None] + jnp.arange(num_positions) - length_X[tip_S][:, None]
    left_SE = depth_X[tip_S][:, None] - depth_SE
    source_SE = jnp.broadcast_to(tip_S[:, None], left_SE.shape)
    for i, up_X in enumerate(ups):
        source_SE = jnp.where(left_SE >> i & 1, up_X[source_SE], source_SE)
    source_SE = jnp.where(left_SE >= 0, source_SE, len(row_X))
    each = page_tokens // ROWS
    block_S = first_S // ROWS
    row_S = jnp.clip(row_X[tip_S], 0, len(table_BN) - 1)
    page_S = table_BN[row_S, jnp.clip(block_S // each, 0, table_BN.shape[1] - 1)]
    number_S = jnp.maximum(page_S, 0) * each + block_S % each
    return jnp.where(depth_SE < 0, -1, source_SE).astype(jnp.int32), number_S
