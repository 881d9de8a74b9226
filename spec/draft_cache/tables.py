"""Tables of what the steps of a drafter's cache compute: chunks of rows, and the rows' ends.

B = rows of the cache, P = chunks, C = tokens of a chunk, W = tokens of a draft's own window.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spec.sampling import Processing

CHUNK_COLUMNS = ("row", "slot", "first")  # before the C tokens of a chunk
# behind the W tokens of a row; of the last three, the bits
END_COLUMNS = ("slot", "total", "emitted", "request_id", "most", "temperature", "top_k", "top_p")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ends:
    """The last W of a row's `total` tokens (all, if there are fewer), and what is drafted next.

    `slot_B` is the request's row among the policy's, `emitted_B` its response tokens so far,
    `most_B` the draft tokens that it may have: rows with none are at rest, and not written.
    """

    tokens_BW: Any
    slot_B: Any
    total_B: Any
    emitted_B: Any
    request_id_B: Any
    most_B: Any
    processing: Processing

    def starts(self, first_token: int, at_rest: int) -> jax.Array:
        """Return the place of each row's first token in the window; `at_rest` for rows at rest."""
        start_B = jnp.maximum(self.total_B - self.tokens_BW.shape[1], first_token)
        return jnp.where(self.most_B > 0, start_B, at_rest)


def unpack_ends(table_BX: jax.Array) -> Ends:
    """Return what `DraftCache.ends` has packed."""
    W = table_BX.shape[1] - len(END_COLUMNS)
    slot_B, total_B, emitted_B, id_B, most_B, *bits = table_BX[:, W:].T
    temperature_B, top_k_B, top_p_B = (
        jax.lax.bitcast_convert_type(bits_B, jnp.float32) for bits_B in bits
    )
    processing = Processing(temperature_B, top_k_B, top_p_B)
    return Ends(table_BX[:, :W], slot_B, total_B, emitted_B, id_B, most_B, processing)


def unpack_chunks(table_PX: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return chunks' rows (B: padding), slots, places of their first tokens, and tokens."""
    n = len(CHUNK_COLUMNS)
    row_P, slot_P, first_P = table_PX[:, :n].T
    return row_P, slot_P, first_P, table_PX[:, n:]
