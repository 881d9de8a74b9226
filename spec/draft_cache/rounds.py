"""Rounds that draft on the device and verify at once, several between two fetches.

Each round drafts a tree for every slot, verifies the best draft tokens of all slots, and absorbs
the emitted tokens into the drafter's cache.

B = slots, R = rows of the drafter's cache, M = nodes of a round, N = nodes of a slot at most, the
root included, X = its draft tokens, W = tokens of a row's window, F = rounds of a fetch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.kv_cache import KVCache, Pending
from models.paged_cache import Cache, pinned
from models.sharding import replicated
from spec import nodes as packed_nodes
from spec import sampling
from spec.draft_cache.drafting import Drafting, DraftTrees, RoundResult, RowEnds, unpack_ends
from spec.drafter import PADDING, Drafts, Source
from spec.nodes import NO_PARENT, by_slot, pack_draws
from spec.verify import Slots, verify


class Shape(NamedTuple):
    """The nodes of a round, the most of a slot, and the rounds of a fetch; static."""

    num_nodes: int
    tree_nodes: int
    max_rounds: int


@partial(
    jax.jit,
    static_argnames=("config", "scheme", "drafting", "shape"),
    donate_argnames=("cache", "pending", "slots", "draft_cache"),
)
def draft_rounds(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    draft_cache: Cache,
    constants: Any,
    table_RX: jax.Array,
    limits_4: jax.Array,
    scale_B: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw,
    drafting: Drafting,
    shape: Shape,
) -> tuple[KVCache, Pending, Slots, Cache, jax.Array]:
    """Draft and verify until a limit is reached; int32 [F, 6, B, N] for `unpack_rounds`.

    `table_RX` is of `DraftCache.ends`. `limits_4` are the most rounds, the requests after whose end
    the host is waited for, the most tokens of one request, and the depth of trees. Probabilities
    of a slot's draft tokens are scaled by `scale_B`. Callers make room for one round in the cache;
    rounds end when it is full. A request's last token is never among its draft tokens.
    """
    num_rounds, stop_after, max_tokens, depth = limits_4
    table, N, S = unpack_ends(table_RX), shape.tree_nodes, cache.num_positions
    cache = cache.written(pending)
    pending = dataclasses.replace(pending, count=jnp.zeros_like(pending.count))
    row_B = _rows_of(table, len(slots.active))
    policy_states = (cache.states,) if cache.features else ()
    state = drafting.begin((constants, policy_states), draft_cache, _at_rest(table, slots))
    active_before, emitted_before_B = jnp.sum(slots.active), slots.emitted
    max_length, M = jnp.minimum(depth + 1, N), shape.num_nodes

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
            config, params, cache, pending, slots, nodes, stop_E, scheme, max_nodes=N
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
    """Return the drafter's row of each slot; of slots without one any row."""
    theirs_BR = table.slot_B == jnp.arange(num_slots)[:, None]
    return jnp.argmax(theirs_BR & (table.total_B > 0), axis=1).astype(jnp.int32)


def _at_rest(table: RowEnds, slots: Slots) -> RowEnds:
    """Return the rows' ends as the slots are now; rows that may draft nothing rest."""
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
    """Return each slot's tokens, parents and bits of probabilities, [3, B, N], and its nodes."""
    tokens_BX, parents_BX, prob_BX = (x[row_B] for x in drafts[:3])
    count_B = jnp.minimum(drafts.count_R, max_R)[row_B]
    real_BX = jnp.arange(prob_BX.shape[1]) < jnp.where(slots.active, count_B, 0)[:, None]
    max_drafts = shape.num_nodes - len(row_B)
    if max_drafts < real_BX.size:
        scaled_BX = prob_BX * scale_B[:, None]
        expected_BX = 1 + jnp.cumsum(scaled_BX, axis=1)  # tokens of the request
        # as of `spec.budget.budget.best`
        worth_BX = scaled_BX / (expected_BX - scaled_BX)
        # of equals the earlier one is taken, a parent before its children, also if it is rounded
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
    """Return each slot's emitted tokens in their order, [B, N], and their number."""
    tokens_BN, _, kind_BN = drawn_3BN
    emitted_BN = kind_BN > 0
    nth_BN = jnp.cumsum(emitted_BN, axis=1) - 1
    is_nth_BNN = nth_BN[:, None] == jnp.arange(nth_BN.shape[1])[:, None]
    is_nth_BNN &= emitted_BN[:, None]
    in_order_BN = jnp.sum(jnp.where(is_nth_BNN, tokens_BN[:, None], 0), axis=2)
    return in_order_BN, jnp.sum(emitted_BN, axis=1, dtype=jnp.int32)


def _window(first: int, ends: RowEnds, tokens_BN: jax.Array, count_B: jax.Array) -> jax.Array:
    """Return the last W tokens of each row after a round that emitted these."""
    W, total_R = ends.tokens_BW.shape[1], ends.total_B
    new_RN, count_R = tokens_BN[ends.slot_B], count_B[ends.slot_B]
    start_R = jnp.maximum(total_R - W, first)
    at_RW = jnp.maximum(total_R + count_R - W, first)[:, None] + jnp.arange(W)
    old_RW = jnp.take_along_axis(ends.tokens_BW, jnp.clip(at_RW - start_R[:, None], 0, W - 1), 1)
    nth_RW = at_RW - total_R[:, None]
    new_RW = jnp.take_along_axis(new_RN, jnp.clip(nth_RW, 0, new_RN.shape[1] - 1), 1)
    return jnp.where(nth_RW < 0, old_RW, new_RW)


class DraftedRound(NamedTuple):
    """One round on the host: tokens as of `by_slot`, trees (parent −1: the root) with bits."""

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
    """Return the rounds that were run; waits for the device."""
    rounds = []
    for packed_6BN in np.asarray(packed):
        B, N = packed_6BN.shape[1:]
        tokens_M, bits_M, kind_M = packed_6BN[:3].reshape(3, -1)
        if not kind_M.any():
            break
        slots_M = np.repeat(np.arange(B), N)
        drawn = by_slot(tokens_M, bits_M.view(np.float32), kind_M, slots_M, B)[:3]
        drafts_3BX = packed_6BN[3:, :, 1:].copy()
        drafts_3BX[1] -= 1
        drafted_B = (drafts_3BX[0] != PADDING).sum(axis=1, dtype=np.int32)
        rounds.append(DraftedRound(*drawn, drafts_3BX, drafted_B))
    return rounds
