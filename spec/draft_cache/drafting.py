"""The device's part of drafters with a cache: their tables, the protocol, steps that call it.

`spec.draft_cache.rounds` has the steps whose drafts stay on the device. B, R = rows of the cache,
P = chunks, C = tokens of a chunk, W = tokens of a draft's window, X = draft tokens of a row.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.kv_cache import Pending
from models.paged_cache import Cache, pinned
from models.sharding import replicated
from spec.nodes import Drawn
from spec.sampling import Processing
from spec.verify import Slots

CHUNK_COLUMNS = ("row", "slot", "first")  # before the C tokens of a chunk
# after the W tokens of a row; the last three as bits
END_COLUMNS = ("slot", "total", "emitted", "request_id", "max", "temperature", "top_k", "top_p")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowEnds:
    """The last W of a row's `total` tokens (all, if there are fewer), to draft from.

    `slot_B` is the request's row among the policy's, `emitted_B` counts its response tokens,
    `max_B` its draft tokens at most: rows with none are at rest, and not written.
    """

    tokens_BW: Any
    slot_B: Any
    total_B: Any
    emitted_B: Any
    request_id_B: Any
    max_B: Any
    processing: Processing

    def starts(self, first_token: int, at_rest: int) -> jax.Array:
        """Return the place of each row's first token in the window; `at_rest` for rows at rest."""
        start_B = jnp.maximum(self.total_B - self.tokens_BW.shape[1], first_token)
        return jnp.where(self.max_B > 0, start_B, at_rest)


def unpack_ends(table_BX: jax.Array) -> RowEnds:
    """Unpack a table of `DraftCache.ends`."""
    W = table_BX.shape[1] - len(END_COLUMNS)
    slot_B, total_B, emitted_B, id_B, max_B, *bits = table_BX[:, W:].T
    temperature_B, top_k_B, top_p_B = (
        jax.lax.bitcast_convert_type(bits_B, jnp.float32) for bits_B in bits
    )
    processing = Processing(temperature_B, top_k_B, top_p_B)
    return RowEnds(table_BX[:, :W], slot_B, total_B, emitted_B, id_B, max_B, processing)


def unpack_chunks(table_PX: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return chunks' rows (B: padding), slots, places of their first tokens, and tokens."""
    n = len(CHUNK_COLUMNS)
    row_P, slot_P, first_P = table_PX[:, :n].T
    return row_P, slot_P, first_P, table_PX[:, n:]


Inputs = tuple[Any, tuple[Any, ...]]  # constants, and the policy's states (`StateSource`)


class StateSource(Protocol):
    """The policy's hidden states for a drafter, as `models.kv_cache.state_windows` finds them."""

    def array(self) -> Any:
        """Return the present states of all slots."""
        ...

    def empty(self, num_slots: int, num_positions: int) -> Any:
        """Return zeros, to compile programs with."""
        ...


class DraftTrees(NamedTuple):
    """Trees by row of the cache (parent −1: root), likeliest first: the first n are a tree."""

    tokens_RX: jax.Array
    parents_RX: jax.Array
    prob_RX: jax.Array
    count_R: jax.Array


class RoundResult(NamedTuple):
    """A round's waiting entries, draws, slots after it; and each slot's row."""

    pending: Pending
    drawn: Drawn
    slots: Slots
    row_B: jax.Array


class Drafting(Protocol):
    """A way to draft inside a program; hashable, as it is a static argument.

    `constants` are its weights and other constants, `last` its state between rounds besides the
    cache. Token `first_token` of a row is the first with an entry, at position 0. If entries do not
    depend on one another (`apart`), a pass may have several chunks of a row.
    """

    first_token: ClassVar[int]
    apart: ClassVar[bool]

    def catch_up(self, given: Inputs, cache: Cache, table_PX: jax.Array) -> Cache:
        """Write the entries of chunks (`unpack_chunks`), by the policy's features."""
        ...

    def begin(self, given: Inputs, cache: Cache, ends: RowEnds) -> tuple[Cache, Any]:
        """Absorb the rows' windows, by the policy's features; return the cache and `last`."""
        ...

    def draft(
        self,
        constants: Any,
        state: tuple[Cache, Any],
        ends: RowEnds,
        depth: jax.Array,
        max_tokens: int,
    ) -> tuple[Cache, DraftTrees]:
        """Draft up to `max_tokens` tokens after the rows' ends, at most `depth` deep."""
        ...

    def absorb(
        self, constants: Any, state: tuple[Cache, Any], result: RoundResult
    ) -> tuple[Cache, Any]:
        """Absorb a round's result; return the cache and `last`."""
        ...


@partial(jax.jit, static_argnames="drafting", donate_argnames="cache")
def catch_up(given: Inputs, cache: Cache, table_PX: jax.Array, *, drafting: Drafting) -> Cache:
    """Write the entries of chunks that rows lack."""
    return drafting.catch_up(given, cache, table_PX)


@partial(jax.jit, static_argnames=("drafting", "max_tokens"), donate_argnames="cache")
def draft(
    given: Inputs,
    cache: Cache,
    table_RX: jax.Array,
    depth: jax.Array,
    *,
    drafting: Drafting,
    max_tokens: int,
) -> tuple[Cache, jax.Array]:
    """Draft from the ends of all rows; return the cache, and int32 [R, 3 X + 1] for `unpack`."""
    ends = unpack_ends(table_RX)
    state = drafting.begin(given, cache, ends)
    cache, trees = drafting.draft(given[0], state, ends, depth, max_tokens)
    bits_RX = jax.lax.bitcast_convert_type(trees.prob_RX, jnp.int32)
    parts = trees.tokens_RX, trees.parents_RX, bits_RX, trees.count_R[:, None]
    return pinned(cache), replicated(jnp.concatenate(parts, axis=1))


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_RX, parents_RX, prob_RX, count_R) on the host: waits for the device."""
    tokens_RX, parents_RX, bits_RX, count_R1 = np.split(
        np.asarray(packed), np.arange(1, 4) * (packed.shape[1] // 3), axis=1
    )
    return tokens_RX, parents_RX, bits_RX.view(np.float32), count_R1[:, 0]
