"""The blocks of keys that each tile of tokens reads, in lists, for the kernels for Hopper.

N tiles, L blocks in the list of a tile, X parts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reprise.models.kernels.gpu.hopper import PART_TOKENS, ROWS
from reprise.models.kernels.shared.page_reads import Reads

SLICE = 8  # positions of a side slice: the rows of a tile of the layout in shared memory
WHOLE = -1  # the path of a block that every row of its tile sees in full


class Blocks(NamedTuple):
    """The blocks of keys that each tile reads, in order of position; int32.

    Blocks are halves or wholes of pages. A row sees blocks of its path up to its position, and
    blocks of the path `WHOLE`. In blocks of path i, positions from `SLICE` · `held_N` on are in
    side slices, from slice `side_N` + i · (slices of a path) on. The blocks of a part are at
    `bound_NX[:, x : x + 2]`; `begins_NL` is 1 at the first block. Positions from `end_N` on are
    arbitrary.
    """

    number_NL: jax.Array
    first_NL: jax.Array
    path_NL: jax.Array
    begins_NL: jax.Array
    bound_NX: jax.Array
    end_N: jax.Array
    held_N: jax.Array
    side_N: jax.Array


def blocks_of(table_BN: jax.Array, reads: Reads, page_tokens: int) -> Blocks:
    """Return the blocks that tiles read; paths have blocks of `SLICE` positions."""
    table_NX = jnp.take(table_BN, reads.row_N, axis=0, mode="clip")
    length_N = reads.length_N
    last_N = reads.last_N
    paths = reads.paths
    each = page_tokens // ROWS
    N, max_pages = table_NX.shape
    num_paths_N1 = jnp.ones((N, 1), jnp.int32) if paths is None else paths.num_N[:, None]
    max_blocks = max_pages * each
    if paths is not None:  # a path starts at any slice of a block
        max_blocks += -(-((paths.blocks - 1) * SLICE + ROWS) // ROWS) * paths.max_paths
    whole_N1 = jnp.where(last_N > 0, length_N // ROWS, 0)[:, None]
    tail_N1 = jnp.maximum(-(-last_N[:, None] // ROWS) - whole_N1, 0)
    at_NL = jnp.broadcast_to(jnp.arange(max_blocks, dtype=jnp.int32), (N, max_blocks))
    behind_NL = jnp.maximum(at_NL - whole_N1, 0)
    ways_N1 = jnp.maximum(num_paths_N1, 1)
    nth_NL = behind_NL // ways_N1
    path_NL = behind_NL % ways_N1
    block_NL = jnp.where(at_NL < whole_N1, at_NL, whole_N1 + nth_NL)
    page_NL = jnp.clip(block_NL // each, 0, max_pages - 1)
    page_NL = jnp.maximum(jnp.take_along_axis(table_NX, page_NL, axis=1), 0)
    number_NL = page_NL * each + block_NL % each
    part_blocks = PART_TOKENS // ROWS
    begins_NL = (block_NL % part_blocks == 0) & (path_NL == 0)
    edge_X = part_blocks * jnp.arange(-(-max_pages * each // part_blocks) + 1)
    into_tail_NX = jnp.clip(edge_X - whole_N1, 0, tail_N1)
    bound_NX = jnp.minimum(edge_X, whole_N1) + into_tail_NX * num_paths_N1
    path_NL = jnp.where(at_NL < whole_N1, WHOLE, path_NL)
    held_N = length_N // SLICE
    side_N = jnp.zeros_like(length_N) if paths is None else paths.first_N * paths.blocks
    blocks = Blocks(
        number_NL=number_NL,
        first_NL=block_NL * ROWS,
        path_NL=path_NL,
        begins_NL=begins_NL,
        bound_NX=bound_NX,
        end_N=last_N,
        held_N=held_N,
        side_N=side_N,
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), blocks)
