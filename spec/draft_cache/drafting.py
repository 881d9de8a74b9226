"""The device side of drafters with a cache: tables, the `Drafting` protocol, and jitted steps.

`draft_rounds` drafts a tree for every slot, verifies the best draft tokens of all slots and absorbs
the emitted tokens into the drafter cache, several times between two fetches.

B = slots or rows of the cache, R = rows of the cache, P = chunks, C = tokens of a chunk, W = tokens
of a draft window, X = draft tokens of a row, M = nodes of a round, N = maximum nodes of a slot,
including the root, F = rounds of a fetch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from reprise.models.attention.entries import Pending
from reprise.models.attention.kv_cache import KVCache, pinned
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.sharding import replicated
from reprise.spec.drafter import PADDING, Drafts, Source
from reprise.spec.verification import nodes as packed_nodes
from reprise.spec.verification.nodes import NO_PARENT, Drawn, by_slot, pack_draws
from reprise.spec.verification.sampling import Processing
from reprise.spec.verification.verify import Draws, Slots, verify

CHUNK_COLUMNS = ("row", "slot", "first")  # before the C tokens of a chunk
# after the W tokens of a row; the last three as bits
END_COLUMNS = ("slot", "total", "emitted", "request_id", "max", "temperature", "top_k", "top_p")


@struct.dataclass
class RowEnds:
    """The last W of the `total` tokens of each row (or all tokens, if fewer), to draft from.

    `slot_B` is the row of the request in the policy cache, `emitted_B` counts its response tokens,
    `max_B` limits its draft tokens. Rows with a limit of 0 are idle and are not written.
    """

    tokens_BW: Any
    slot_B: Any
    total_B: Any
    emitted_B: Any
    request_id_B: Any
    max_B: Any
    processing: Processing

    def starts(self, first_token: int, at_rest: int) -> jax.Array:
        """Return the position of the first window token of each row; `at_rest` for idle rows."""
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
    """Return the rows (B: padding), slots, first positions and tokens of chunks."""
    n = len(CHUNK_COLUMNS)
    row_P, slot_P, first_P = table_PX[:, :n].T
    return row_P, slot_P, first_P, table_PX[:, n:]


Inputs = tuple[Any, tuple[Any, ...]]  # constants, and policy states


class DraftTrees(NamedTuple):
    """Trees by cache row (parent −1: root), likeliest first; the first n tokens form a tree."""

    tokens_RX: jax.Array
    parents_RX: jax.Array
    prob_RX: jax.Array
    count_R: jax.Array


class RoundResult(NamedTuple):
    """Pending entries and draws of a round, the slots after it, and the cache row of each slot."""

    pending: Pending
    drawn: Drawn
    slots: Slots
    row_B: jax.Array


class Drafting(Protocol):
    """A way to draft inside a program; hashable, since it is a static argument.

    `constants` are weights and other constants, `last` is the state between rounds in addition to
    the cache. Token `first_token` of a row is the first token with an entry, at position 0. If
    entries do not depend on each other (`apart`), a pass may have several chunks of a row.
    """

    first_token: ClassVar[int]
    apart: ClassVar[bool]

    def catch_up(self, given: Inputs, cache: KVCache, table_PX: jax.Array) -> KVCache:
        """Write the entries of chunks (`unpack_chunks`), computed from policy features."""
        ...

    def begin(self, given: Inputs, cache: KVCache, ends: RowEnds) -> tuple[KVCache, Any]:
        """Absorb the row windows, using policy features; return the cache and `last`."""
        ...

    def draft(
        self,
        constants: Any,
        state: tuple[KVCache, Any],
        ends: RowEnds,
        depth: jax.Array,
        max_tokens: int,
    ) -> tuple[KVCache, DraftTrees]:
        """Draft up to `max_tokens` tokens after the end of each row, at most `depth` deep."""
        ...

    def absorb(
        self, constants: Any, state: tuple[KVCache, Any], result: RoundResult
    ) -> tuple[KVCache, Any]:
        """Absorb the result of a round; return the cache and `last`."""
        ...


@partial(jax.jit, static_argnames="drafting", donate_argnames="cache")
def catch_up(given: Inputs, cache: KVCache, table_PX: jax.Array, *, drafting: Drafting) -> KVCache:
    """Write the missing entries of rows, given as chunks."""
    return drafting.catch_up(given, cache, table_PX)


@partial(jax.jit, static_argnames=("drafting", "max_tokens"), donate_argnames="cache")
def draft(
    given: Inputs,
    cache: KVCache,
    table_RX: jax.Array,
    depth: jax.Array,
    *,
    drafting: Drafting,
    max_tokens: int,
) -> tuple[KVCache, jax.Array]:
    """Draft from the last tokens of rows; return the cache, and int32 [R, 3 X + 1] for `unpack`."""
    ends = unpack_ends(table_RX)
    state = drafting.begin(given, cache, ends)
    cache, trees = drafting.draft(given[0], state, ends, depth, max_tokens)
    bits_RX = jax.lax.bitcast_convert_type(trees.prob_RX, jnp.int32)
    parts = trees.tokens_RX, trees.parents_RX, bits_RX, trees.count_R[:, None]
    return pinned(cache), replicated(jnp.concatenate(parts, axis=1))


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_RX, parents_RX, prob_RX, count_R) on the host; wait for the device."""
    tokens_RX, parents_RX, bits_RX, count_R1 = np.split(
        np.asarray(packed), np.arange(1, 4) * (packed.shape[1] // 3), axis=1
    )
    return tokens_RX, parents_RX, bits_RX.view(np.float32), count_R1[:, 0]


class Shape(NamedTuple):
    """The static sizes: nodes of a round, maximum nodes of a slot, and rounds of a fetch."""

    num_nodes: int
    tree_nodes: int
    max_rounds: int


@partial(
    jax.jit,
    static_argnames=("config", "draws", "drafting", "shape"),
    donate_argnames=("cache", "pending", "slots", "draft_cache"),
)
def draft_rounds(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    draft_cache: KVCache,
    constants: Any,
    table_RX: jax.Array,
    limits_4: jax.Array,
    scale_B: jax.Array,
    *,
    config: ModelConfig,
    draws: Draws,
    drafting: Drafting,
    shape: Shape,
) -> tuple[KVCache, Pending, Slots, KVCache, jax.Array]:
    """Draft and verify until a limit is reached; int32 [F, 6, B, N] is for `unpack_rounds`.

    `table_RX` is from `DraftCache.ends`. `limits_4` holds the maximum number of rounds, the number
    of finished requests after which the rounds stop, the maximum number of tokens of one request,
    and the tree depth. `scale_B` scales the draft token probabilities of each slot. Callers make
    room for one round in the cache; rounds stop when the cache is full. The last token of a request
    is never a draft token.
    """
    num_rounds, stop_after, max_tokens, depth = limits_4
    table = unpack_ends(table_RX)
    N = shape.tree_nodes
    S = cache.num_positions
    cache = cache.written(pending)
    pending = dataclasses.replace(pending, count=jnp.zeros_like(pending.count))
    row_B = _rows_of(table, len(slots.active))
    policy_states = (cache.states,) if cache.features else ()
    state = drafting.begin((constants, policy_states), draft_cache, _at_rest(table, slots))
    active_before = jnp.sum(slots.active)
    emitted_before_B = slots.emitted
    max_length = jnp.minimum(depth + 1, N)
    M = shape.num_nodes

    def more(carry: tuple) -> jax.Array:
        r, _, _, slots, _, _, _ = carry
        left = jnp.sum(slots.active)
        next_B = jnp.minimum(max_length, slots.limit - slots.emitted)
        gained_B = slots.emitted - emitted_before_B + max_length
        fits_B = (slots.length + next_B <= S) & (gained_B <= max_tokens)
        waits = active_before - left < stop_after
        return (r < num_rounds) & (left > 0) & waits & jnp.all(fits_B | ~slots.active)

    def step(carry: tuple) -> tuple:
        r, cache, pending, slots, tokens_RW, state, packed = carry
        ends = _at_rest(dataclasses.replace(table, tokens_BW=tokens_RW), slots)
        held, drafts = drafting.draft(constants, state, ends, depth, N - 1)
        trees_3BN, count_B = _trees(drafts, ends.max_B, row_B, slots, scale_B, shape)
        nodes, place_BN = packed_nodes.of_trees(trees_3BN[0], trees_3BN[1], count_B, M)
        cache, pending, slots, drawn = verify(
            config, params, cache, pending, slots, nodes, stop_E, draws, max_nodes=N
        )
        result = RoundResult(pending, drawn, slots, row_B)
        state = drafting.absorb(constants, (held, state[1]), result)
        drawn_3M = pack_draws(drawn)
        drawn_3BN = jnp.where(place_BN < M, jnp.take(drawn_3M, place_BN, axis=1, mode="clip"), 0)
        tokens_RW = _window(drafting.first_token, ends, *_emitted(drawn_3BN))
        both_6BN = jnp.concatenate([drawn_3BN, trees_3BN])
        packed = jax.lax.dynamic_update_slice_in_dim(packed, both_6BN[None], r, axis=0)
        return r + 1, cache, pending, slots, tokens_RW, state, packed

    none = jnp.zeros((shape.max_rounds, 6, len(row_B), N), jnp.int32)
    start = jnp.int32(0), cache, pending, slots, table.tokens_BW, state, none
    _, cache, pending, slots, _, (held, _), packed = jax.lax.while_loop(more, step, start)
    return cache, pending, slots.pinned(), pinned(held), replicated(packed)


def _rows_of(table: RowEnds, num_slots: int) -> jax.Array:
    """Return the drafter row of each slot, or an arbitrary row for slots without a row."""
    theirs_BR = table.slot_B == jnp.arange(num_slots)[:, None]
    return jnp.argmax(theirs_BR & (table.total_B > 0), axis=1).astype(jnp.int32)


def _at_rest(table: RowEnds, slots: Slots) -> RowEnds:
    """Return the table with current lengths and limits; rows that may not draft are idle."""
    length_R, emitted_R, limit_R, active_R = (
        jnp.take(x, table.slot_B, axis=0)
        for x in (slots.length, slots.emitted, slots.limit, slots.active)
    )
    max_R = jnp.where(active_R, jnp.clip(limit_R - emitted_R - 1, 0, table.max_B), 0)
    return dataclasses.replace(table, total_B=length_R + 1, emitted_B=emitted_R, max_B=max_R)


def _trees(
    drafts: DraftTrees,
    max_R: jax.Array,
    row_B: jax.Array,
    slots: Slots,
    scale_B: jax.Array,
    shape: Shape,
) -> tuple[jax.Array, jax.Array]:
    """Return tokens, parents and probability bits of slots, [3, B, N], and node counts."""
    tokens_BX, parents_BX, prob_BX = (x[row_B] for x in drafts[:3])
    count_B = jnp.minimum(drafts.count_R, max_R)[row_B]
    real_BX = jnp.arange(prob_BX.shape[1]) < jnp.where(slots.active, count_B, 0)[:, None]
    max_drafts = shape.num_nodes - len(row_B)
    if max_drafts < real_BX.size:
        scaled_BX = prob_BX * scale_B[:, None]
        expected_BX = 1 + jnp.cumsum(scaled_BX, axis=1)  # tokens of the request
        # the ranking of `spec.budget.budget.best`
        worth_BX = scaled_BX / (expected_BX - scaled_BX)
        # ties go to the earlier token: a parent precedes its children even after rounding
        worth_BX = jnp.where(real_BX, jax.lax.cummin(worth_BX, axis=1), -1.0)
        _, chosen = jax.lax.top_k(worth_BX.reshape(-1), max_drafts)
        real_BX &= jnp.zeros(real_BX.size, bool).at[chosen].set(True).reshape(real_BX.shape)
    bits_BX = jax.lax.bitcast_convert_type(prob_BX.astype(jnp.float32), jnp.int32)
    below = (
        jnp.where(real_BX, tokens_BX, PADDING),
        jnp.where(real_BX, parents_BX + 1, 0),
        jnp.where(real_BX, bits_BX, 0),
    )
    roots = slots.last_token, jnp.full_like(row_B, NO_PARENT), jnp.zeros_like(row_B)
    pairs = zip(roots, below, strict=True)
    trees_3BN = jnp.stack([jnp.concatenate([r[:, None], x], axis=1) for r, x in pairs])
    return trees_3BN, 1 + jnp.sum(real_BX, axis=1, dtype=jnp.int32)


def _emitted(drawn_3BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the emitted tokens of each slot in order, [B, N], and their number."""
    tokens_BN, _, kind_BN = drawn_3BN
    emitted_BN = kind_BN > 0
    nth_BN = jnp.cumsum(emitted_BN, axis=1) - 1
    is_nth_BNN = nth_BN[:, None] == jnp.arange(nth_BN.shape[1])[:, None]
    is_nth_BNN &= emitted_BN[:, None]
    in_order_BN = jnp.sum(jnp.where(is_nth_BNN, tokens_BN[:, None], 0), axis=2)
    return in_order_BN, jnp.sum(emitted_BN, axis=1, dtype=jnp.int32)


def _window(first: int, ends: RowEnds, tokens_BN: jax.Array, count_B: jax.Array) -> jax.Array:
    """Return the last W tokens of each row after a round that emitted `tokens_BN`."""
    W = ends.tokens_BW.shape[1]
    total_R = ends.total_B
    new_RN = tokens_BN[ends.slot_B]
    count_R = count_B[ends.slot_B]
    start_R = jnp.maximum(total_R - W, first)
    at_RW = jnp.maximum(total_R + count_R - W, first)[:, None] + jnp.arange(W)
    old_RW = jnp.take_along_axis(ends.tokens_BW, jnp.clip(at_RW - start_R[:, None], 0, W - 1), 1)
    nth_RW = at_RW - total_R[:, None]
    new_RW = jnp.take_along_axis(new_RN, jnp.clip(nth_RW, 0, new_RN.shape[1] - 1), 1)
    return jnp.where(nth_RW < 0, old_RW, new_RW)


class DraftedRound(NamedTuple):
    """One round on the host: tokens from `by_slot`, trees (parent −1: root) with bits."""

    tokens_BN: np.ndarray
    logprobs_BN: np.ndarray
    count_B: np.ndarray
    drafts_3BX: np.ndarray
    drafted_B: np.ndarray

    def drafts(self, rows_A: np.ndarray, source: Source) -> Drafts:
        """Return the draft tokens of these slots."""
        tokens_AX, parents_AX, bits_AX = np.take(self.drafts_3BX, rows_A, axis=1)
        sources_AX = np.full(tokens_AX.shape, source, np.uint8)
        drafted_A = self.drafted_B[rows_A]
        return Drafts(tokens_AX, parents_AX, bits_AX.view(np.float32), sources_AX, drafted_A)


def unpack_rounds(packed: jax.Array) -> list[DraftedRound]:
    """Return the rounds that were run; wait for the device."""
    rounds = []
    for packed_6BN in np.asarray(packed):
        B, N = packed_6BN.shape[1:]
        tokens_M, bits_M, kind_M = packed_6BN[:3].reshape(3, -1)
        if not kind_M.any():
            break
        slots_M = np.repeat(np.arange(B), N)
        tokens_BN, logprobs_BN, count_B, _ = by_slot(
            tokens_M, bits_M.view(np.float32), kind_M, slots_M, B
        )
        drafts_3BX = packed_6BN[3:, :, 1:].copy()
        drafts_3BX[1] -= 1
        drafted_B = (drafts_3BX[0] != PADDING).sum(axis=1, dtype=np.int32)
        rounds.append(DraftedRound(tokens_BN, logprobs_BN, count_B, drafts_3BX, drafted_B))
    return rounds
