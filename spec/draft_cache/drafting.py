"""The device's part of drafters that have a cache: what each kind computes, and steps that call it.

The steps are those of drafts that the host sees; `spec.draft_cache.rounds` has those of drafts that
it does not. R = rows of the cache, X = draft tokens of a row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.kv_cache import Pending
from models.paged_cache import Cache, pinned
from models.sharding import replicated
from spec.draft_cache.tables import Ends, unpack_ends
from spec.drawn import Drawn
from spec.verify import Slots

Given = tuple[Any, tuple[Any, ...]]  # constants, and the policy's states (`StateSource`)


class StateSource(Protocol):
    """Where a drafter finds the policy's hidden states, as `models.kv_cache.state_windows` does."""

    def array(self) -> Any:
        """Return those of all slots, as they are now."""
        ...

    def empty(self, num_slots: int, num_positions: int) -> Any:
        """Return zeroed ones, to compile programs with."""
        ...


class Found(NamedTuple):
    """Trees by row of the drafter's cache, the likeliest first: the first n of one are a tree.

    `tokens_RX`, `parents_RX` (−1: the root) and `prob_RX`, of which `count_R` are valid.
    """

    tokens_RX: jax.Array
    parents_RX: jax.Array
    prob_RX: jax.Array
    count_R: jax.Array


class Brought(NamedTuple):
    """The results of a round: entries that wait, draws, slots after it; and each slot's row."""

    pending: Pending
    drawn: Drawn
    slots: Slots
    row_B: jax.Array


class Drafting(Protocol):
    """A way to draft inside a program; hashable, as it is a static argument.

    `constants` are its weights and all else that stays; `last` is what it carries from round to
    round beside its cache. Token `first_token` of a row is the first that has an entry, at position
    0. Where entries do not depend on one another (`apart`) a pass may have several chunks of a row.
    """

    first_token: ClassVar[int]
    apart: ClassVar[bool]

    def catch_up(self, given: Given, cache: Cache, table_PX: jax.Array) -> Cache:
        """Write the entries of chunks (`unpack_chunks`), by the policy's features."""
        ...

    def begin(self, given: Given, cache: Cache, ends: Ends) -> tuple[Cache, Any]:
        """Absorb the rows' windows, by the policy's features; return the cache and `last`."""
        ...

    def draft(
        self, constants: Any, state: tuple[Cache, Any], ends: Ends, depth: jax.Array, most: int
    ) -> tuple[Cache, Found]:
        """Draft up to `most` tokens behind the rows' ends, at most `depth` deep."""
        ...

    def absorb(
        self, constants: Any, state: tuple[Cache, Any], brought: Brought
    ) -> tuple[Cache, Any]:
        """Take up what a round brought; return the cache and `last`."""
        ...


@partial(jax.jit, static_argnames="drafting", donate_argnames="cache")
def catch_up(given: Given, cache: Cache, table_PX: jax.Array, *, drafting: Drafting) -> Cache:
    """Write the entries of chunks that rows lack."""
    return drafting.catch_up(given, cache, table_PX)


@partial(jax.jit, static_argnames=("drafting", "most_tokens"), donate_argnames="cache")
def draft(
    given: Given,
    cache: Cache,
    table_RX: jax.Array,
    depth: jax.Array,
    *,
    drafting: Drafting,
    most_tokens: int,
) -> tuple[Cache, jax.Array]:
    """Draft from the ends of all rows; return the cache, and int32 [R, 3 X + 1] for `unpack`.

    What rows at rest draft has no meaning.
    """
    ends = unpack_ends(table_RX)
    state = drafting.begin(given, cache, ends)
    cache, found = drafting.draft(given[0], state, ends, depth, most_tokens)
    bits_RX = jax.lax.bitcast_convert_type(found.prob_RX, jnp.int32)
    parts = found.tokens_RX, found.parents_RX, bits_RX, found.count_R[:, None]
    return pinned(cache), replicated(jnp.concatenate(parts, axis=1))


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_RX, parents_RX, prob_RX, count_R) on the host: waits for the device."""
    tokens_RX, parents_RX, bits_RX, count_R1 = np.split(
        np.asarray(packed), np.arange(1, 4) * (packed.shape[1] // 3), axis=1
    )
    return tokens_RX, parents_RX, bits_RX.view(np.float32), count_R1[:, 0]
