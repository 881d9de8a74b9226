"""The draws of a round, and their way to the host: one transfer, then the tokens of each slot.

M nodes, B slots, N tokens of a slot.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numba
import numpy as np

from models.kv_cache import Entries

DRAWN, KEPT = 1, 2  # what an emitted token is; 0 where none is emitted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """Draws of a round at each node; those of `emitted_M` are the slots' next tokens.

    At nodes of `kept_M` the given token was kept in place of the draw. `of_chunks` are the entries
    of the chunks' tokens, if the round has chunks.
    """

    tokens_M: jax.Array
    logprobs_M: jax.Array
    emitted_M: jax.Array
    kept_M: jax.Array
    of_chunks: Entries | None


def pack(drawn: Drawn) -> jax.Array:
    """Pack for one transfer: tokens, bits of log-probs, `DRAWN` or `KEPT`; int32 [3, M]."""
    bits_M = jax.lax.bitcast_convert_type(drawn.logprobs_M.astype(jnp.float32), jnp.int32)
    kind_M = jnp.where(drawn.emitted_M, jnp.where(drawn.kept_M, KEPT, DRAWN), 0)
    return jnp.stack([drawn.tokens_M, bits_M, kind_M])


def unpack(packed: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, log-probs, kinds) on the host; waits for the device."""
    tokens, bits, kind = np.asarray(packed)
    return tokens, bits.view(np.float32), kind


def by_slot(
    tokens_M: np.ndarray,
    logprobs_M: np.ndarray,
    kind_M: np.ndarray,
    slots_M: np.ndarray,
    num_slots: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_BN, logprobs_BN, count_B, kept_B): each slot's emitted tokens in their order.

    The first `kept_B` were given and kept. Nodes are sorted by slot, and those on a path by depth.
    """
    return _by_slot(tokens_M, logprobs_M, kind_M, slots_M, num_slots)


@numba.njit(cache=True, nogil=True)
def _by_slot(tokens_M, logprobs_M, kind_M, slots_M, num_slots):  # type: ignore[no-untyped-def]
    count_B, kept_B = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
    for m in range(len(slots_M)):
        if kind_M[m]:
            count_B[slots_M[m]] += 1
    size = num_slots, max(1, count_B.max())
    tokens_BN, logprobs_BN = np.zeros(size, np.int32), np.zeros(size, np.float32)
    count_B[:] = 0
    for m in range(len(slots_M)):
        if kind_M[m]:
            b = slots_M[m]
            tokens_BN[b, count_B[b]], logprobs_BN[b, count_B[b]] = tokens_M[m], logprobs_M[m]
            count_B[b] += 1
            kept_B[b] += kind_M[m] == KEPT
    return tokens_BN, logprobs_BN, count_B, kept_B
