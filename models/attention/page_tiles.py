"""Tokens of slots in tiles, and the positions that each tile reads, for accelerator kernels.

Tokens that the cache does not hold form paths of a tree: the first child of a token continues its
path, other children start new paths. Each path has side blocks: the slot positions after the last
whole cached block, with the tokens of the path at their places. These blocks are only in buffers of
kernels; for GPUs the tokens of each path, from a multiple of 8 positions on, are copied before.
So a query meets each key at the same place of the same block as if all had
been decoded, and computes the same bits (`models.kernels.gpu.hopper`,
`models.kernels.tpu.softmax_tpu`).

X tokens, B slots, N tiles of A tokens, Y = A·G rows of a tile, S paths, E positions in the blocks
of a path, R positions of a block, P pages, T positions of a page, K key/value heads, G = H/K query
heads per key/value head, h head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from reprise.models.attention.attention import After
from reprise.models.kernels.gpu import page_attention_gpu
from reprise.models.kernels.gpu.hopper import ROWS
from reprise.models.kernels.gpu.page_blocks import SLICE
from reprise.models.kernels.shared.page_reads import Paths, Reads
from reprise.models.kernels.tpu import page_attention_tpu
from reprise.models.kernels.tpu.softmax_tpu import KEYS

TPU_TOKENS = 64  # of a tile


def attend(
    platform: str,
    q_XHh: jax.Array,
    k_XKh: jax.Array,
    v_XKh: jax.Array,
    keys_PKTh: jax.Array,
    values_PKTh: jax.Array,
    after: After,
    table_BN: jax.Array,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Return the attention of tokens to positions up to themselves, [X, H, h]; 0 without a row."""
    X, H, h = q_XHh.shape
    K = k_XKh.shape[1]
    dtype = keys_PKTh.dtype
    is_tpu = platform == "tpu"
    group = H // K
    block, max_tokens = (KEYS, TPU_TOKENS) if is_tpu else (SLICE, ROWS // group)
    tiles = Tiles.of(after, min(max_tokens, after.width), len(table_BN))
    paths = None
    new = list[jax.Array]()
    if after.num_paths:
        paths = SidePaths.of(after, tiles, table_BN, keys_PKTh, block)
        pairs = (keys_PKTh, k_XKh), (values_PKTh, v_XKh)
        # the TPU kernel puts the tokens in their places
        new = [paths.source_SE, k_XKh, v_XKh] if is_tpu else [paths.copies(*x) for x in pairs]
    N, A = tiles.token_NA.shape
    q_XHh = q_XHh.astype(dtype)
    q_NAHh = q_XHh[:, None]
    if not tiles.are_tokens:
        q_NAHh = jnp.take(q_XHh, tiles.token_NA, axis=0, mode="clip")
    q_NKYh = q_NAHh.reshape(N, A, K, group, h).swapaxes(1, 2).reshape(N, K, A * group, h)
    attend_tiles: Callable[..., jax.Array] = page_attention_tpu.attend_tiles
    if not is_tpu:
        over = 8 - math.gcd(group, 8)  # the most empty rows in the last eight of a tile
        attend_tiles = partial(
            page_attention_gpu.attend_tiles, max_eights=(X * group + N * over) // 8
        )
    out_NKYh = attend_tiles(
        q_NKYh,
        keys_PKTh,
        values_PKTh,
        table_BN,
        *tiles.by_row(paths, group),
        tiles.reads(paths, block),
        new,
        interpret=interpret,
    )
    if tiles.are_tokens and not is_tpu:  # the kernel returns 0 for tiles that read nothing
        return out_NKYh.reshape(X, H, h)
    out_NKAGh = out_NKYh.reshape(N, K, A, group, h)
    out_XHh = out_NKAGh[tiles.tile_X, :, tiles.place_X].reshape(X, H, h)
    return jnp.where((tiles.row_X >= 0)[:, None, None], out_XHh, 0)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The row, position, tile and place of each token, and the token of each place; int32.

    Rows are −1 for tokens with a result of 0; places without a token have token X. If tiles
    `are_tokens`, tile i has only token i.
    """

    row_X: jax.Array
    length_X: jax.Array
    depth_X: jax.Array
    ups: list[jax.Array]
    tile_X: jax.Array
    place_X: jax.Array
    token_NA: jax.Array
    are_tokens: bool

    @staticmethod
    def of(after: After, size: int, num_slots: int) -> Tiles:
        X = len(after.row_X)
        row_X = after.row_X
        row_X = jnp.where(row_X < num_slots, row_X, -1)
        ups, depth_X = _ancestors(after.parent_X, after.width)
        at_X = jnp.arange(X, dtype=jnp.int32)
        # each run of tokens of one row starts a tile
        begins_X = jnp.concatenate([jnp.ones(1, bool), row_X[1:] != row_X[:-1]])
        rank_X = at_X - jax.lax.cummax(jnp.where(begins_X, at_X, 0))
        place_X = rank_X % size
        is_own_X = row_X >= 0
        runs = after.num_runs or num_slots
        N = min(runs * -(-after.width // size), runs + X // size)
        N += N % 2  # the two cores of a TPU share the tiles
        if after.width == 1 and N == X:
            place_X = jnp.zeros_like(at_X)
            return Tiles(row_X, after.length_X, depth_X, ups, at_X, place_X, at_X[:, None], True)
        tile_X = jnp.cumsum((place_X == 0) & is_own_X).astype(jnp.int32) - 1
        none_NA = jnp.full((N, size), X, jnp.int32)
        token_NA = none_NA.at[jnp.where(is_own_X, tile_X, N), place_X].set(at_X, mode="drop")
        return Tiles(row_X, after.length_X, depth_X, ups, tile_X, place_X, token_NA, False)

    @property
    def position_X(self) -> jax.Array:
        return jnp.where(self.row_X < 0, -1, self.length_X + self.depth_X)

    def by_place(self, x_X: jax.Array) -> jax.Array:
        """Return one number per token by place, −1 for empty places; [N, A]."""
        return jnp.take(x_X, self.token_NA, mode="fill", fill_value=-1)

    def by_row(self, paths: SidePaths | None, group: int) -> list[jax.Array]:
        """Return the position and the path of each row of tiles, −1 for empty rows; [N, Y]."""
        path_X = jnp.zeros_like(self.row_X) if paths is None else paths.path_X
        return [jnp.repeat(self.by_place(x), group, axis=1) for x in (self.position_X, path_X)]

    def reads(self, paths: SidePaths | None, block: int) -> Reads:
        row_N = jnp.max(self.by_place(self.row_X), axis=1)
        last_N = jnp.max(self.by_place(self.position_X), axis=1) + 1
        length_N = jnp.max(self.by_place(self.length_X), axis=1)
        of_slots = None
        if paths is not None:
            num_N, first_N = (jnp.take(x, row_N, mode="clip") for x in (paths.num_B, paths.first_B))
            S, E = paths.source_SE.shape
            of_slots = Paths(num_N, first_N, E // block, S)
        return Reads(jnp.maximum(row_N, 0), length_N, last_N, of_slots)


@dataclasses.dataclass(frozen=True)
class SidePaths:
    """The paths of slots, in slot order, and the sources of their positions; int32.

    `path_X` numbers the paths of a slot. `source_SE` is the token at a position in the blocks of a
    path, X for no token, and −1 for positions in block `block_S` of the pages, the last block of
    the slot.
    """

    path_X: jax.Array
    num_B: jax.Array
    first_B: jax.Array
    source_SE: jax.Array
    block_S: jax.Array

    @staticmethod
    def of(
        after: After, tiles: Tiles, table_BN: jax.Array, pages_PKTh: jax.Array, block: int
    ) -> SidePaths:
        (X,) = after.row_X.shape
        B = len(table_BN)
        T = pages_PKTh.shape[2]
        at_X = jnp.arange(X, dtype=jnp.int32)
        row_X = tiles.row_X
        # a path may start at any position of a block
        S = after.num_paths
        E = -(-(block - 1 + after.width) // block) * block
        parent_X = after.parent_X
        first_X = X - 1 - _last(parent_X[::-1], X)  # first child of each token
        goes_on_X = (parent_X >= 0) & (first_X[parent_X] == at_X)
        head_X = jnp.where(goes_on_X, parent_X, at_X)
        for _ in tiles.ups:
            head_X = head_X[head_X]
        begins_X = ~goes_on_X & (row_X >= 0)
        path_X = (jnp.cumsum(begins_X).astype(jnp.int32) - 1)[head_X]
        num_B = jnp.sum(begins_X & (row_X == jnp.arange(B)[:, None]), axis=1, dtype=jnp.int32)
        first_B = (jnp.cumsum(num_B) - num_B).astype(jnp.int32)
        # all other tokens of a path are ancestors of its last token
        tip_S = jnp.maximum(_last(jnp.where(row_X < 0, -1, path_X), S), 0)
        length_S = tiles.length_X[tip_S]
        block_S = length_S // block
        left_SW = tiles.depth_X[tip_S][:, None] - jnp.arange(after.width)
        token_SW = jnp.broadcast_to(tip_S[:, None], left_SW.shape)
        for i, up_X in enumerate(tiles.ups):
            token_SW = jnp.where((left_SW >> i) & 1 == 1, up_X[token_SW], token_SW)
        token_SW = jnp.where(left_SW < 0, X, token_SW)
        depth_SE = (block_S * block - length_S)[:, None] + jnp.arange(E)
        # a sum of one number and zeros, because accelerators gather single numbers slowly
        is_at_SEW = depth_SE[:, :, None] == jnp.arange(after.width)
        source_SE = jnp.sum(jnp.where(is_at_SEW, token_SW[:, None] - X, 0), axis=2) + X
        source_SE = jnp.where(depth_SE < 0, -1, source_SE)
        each = T // block
        table_SN = jnp.take(table_BN, row_X[tip_S], axis=0, mode="clip")
        nth_S1 = jnp.clip(block_S // each, 0, table_BN.shape[1] - 1)[:, None]
        page_S = jnp.maximum(jnp.take_along_axis(table_SN, nth_S1, axis=1)[:, 0], 0)
        path_X = jnp.where(row_X < 0, 0, path_X - jnp.take(first_B, row_X, mode="clip"))
        return SidePaths(path_X, num_B, first_B, source_SE, page_S * each + block_S % each)

    def copies(self, pages_PKTh: jax.Array, new_XKh: jax.Array) -> jax.Array:
        """Return the keys or values of all paths for GPUs, [S · E / R, K, R, h].

        All at once: a loop over the existing paths would wait for the host in every layer.
        """
        S, E = self.source_SE.shape
        P, K, T, h = pages_PKTh.shape
        X = len(new_XKh)
        R = SLICE
        dtype = pages_PKTh.dtype
        token_SE = jnp.where(self.source_SE < 0, X, self.source_SE)
        x_SEKh = jnp.take(new_XKh.astype(dtype), token_SE, axis=0, mode="fill", fill_value=0)
        x_SbKRh = x_SEKh.reshape(S, E // R, R, K, h).swapaxes(2, 3)
        held = pages_PKTh.reshape(P, K, T // R, R, h)
        held_SKRh = held[self.block_S // (T // R), :, self.block_S % (T // R)]
        is_held_SbR = self.source_SE.reshape(S, E // R, R) < 0  # in the first R positions
        x_SbKRh = jnp.where(is_held_SbR[:, :, None, :, None], held_SKRh[:, None], x_SbKRh)
        return x_SbKRh.reshape(-1, K, R, h)


def _last(group_X: jax.Array, num_groups: int) -> jax.Array:
    """Return the last member of each group, −1 if empty; scatters are slow on accelerators."""
    is_in_GX = group_X == jnp.arange(num_groups)[:, None]
    return jnp.max(jnp.where(is_in_GX, jnp.arange(len(group_X), dtype=jnp.int32), -1), axis=1)


def _ancestors(parent_X: jax.Array, width: int) -> tuple[list[jax.Array], jax.Array]:
    """Return the 2^i-th ancestor or root of each token, i = 0, 1, …, and its depth < `width`."""
    X = len(parent_X)
    up_X = jnp.where(parent_X < 0, jnp.arange(X, dtype=jnp.int32), parent_X)
    depth_X = (parent_X >= 0).astype(jnp.int32)
    ups = [up_X]
    for _ in range(max(width - 1, 1).bit_length()):
        depth_X = depth_X + depth_X[up_X]
        up_X = up_X[up_X]
        ups.append(up_X)
    return ups, depth_X
