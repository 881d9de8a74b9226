"""The verification kernel: one forward pass over draft trees, the walk, the cache.

A round computes token(r, t) at every node of a tree and follows, from the root,
the child that equals the draw. The emitted tokens are what plain decoding would
have emitted, up to how the pass rounds (docs/architecture.md, Exactness); a tree of one
node *is* plain decoding. Shape legend in
docs/architecture.md; E = end tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models import kv_cache, transformer
from models.config import ModelConfig
from models.kv_cache import KVCache
from models.sharding import constrain
from spec import sampling
from spec.tree import DraftTree, ancestors, depths, roots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The device state of B slots; each array has one entry a slot.

    `length` counts live cache positions, `emitted` the response tokens so far, `limit` is their
    largest number. `keys` are the requests' noise keys. A slot that is not `active` takes part in
    the computation but emits nothing, and its row of the cache is never written.
    """

    last_token: jax.Array
    length: jax.Array
    emitted: jax.Array
    limit: jax.Array
    active: jax.Array
    keys: jax.Array
    processing: sampling.Processing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """The tokens of one round; the first `count_B` of each row are valid."""

    tokens_BN: jax.Array
    logprobs_BN: jax.Array
    count_B: jax.Array


def pack(emitted: Emitted) -> jax.Array:
    """Pack for one transfer: int32 [B, 2 N + 1] of tokens, bits of log-probs, count."""
    bits_BN = jax.lax.bitcast_convert_type(emitted.logprobs_BN.astype(jnp.float32), jnp.int32)
    return jnp.concatenate([emitted.tokens_BN, bits_BN, emitted.count_B[:, None]], axis=1)


def unpack(packed: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens_BN, logprobs_BN, count_B) on the host; waits for the device."""
    packed_BX = np.asarray(packed)
    N = packed_BX.shape[1] // 2
    return packed_BX[:, :N], packed_BX[:, N : 2 * N].view(np.float32), packed_BX[:, 2 * N]


def node_mask(length_B: jax.Array, ancestors_BNN: jax.Array, num_positions: int) -> jax.Array:
    """Return mask[b, n, s]: position s is committed or an ancestor of node n; bool [B, N, S]."""
    N = ancestors_BNN.shape[1]
    committed_BS = jnp.arange(num_positions) < length_B[:, None]
    if N == 1:
        return (jnp.arange(num_positions) <= length_B[:, None])[:, None]
    offset_BS = jnp.arange(num_positions) - length_B[:, None]
    inside_BS = (offset_BS >= 0) & (offset_BS < N)
    index_BNS = jnp.broadcast_to(
        jnp.clip(offset_BS, 0, N - 1)[:, None], (*ancestors_BNN.shape[:2], num_positions)
    )
    own_BNS = jnp.take_along_axis(ancestors_BNN, index_BNS, axis=2) & inside_BS[:, None]
    return committed_BS[:, None] | own_BNS


def walk(
    tree: DraftTree, drawn_BN: jax.Array, room_B: jax.Array, stop_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Find the nodes whose draws are emitted, from the root along children that equal the draw.

    Stops after an end token, after `room` tokens, and where no child equals the
    draw. Returns (path_BN, count_B): draws at path[0 … count−1] are emitted; path
    entries beyond count are 0.
    """
    B, N = drawn_BN.shape
    rows = jnp.arange(B)

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        j, node_B, alive_B, path_BN, count_B = carry
        path_BN = path_BN.at[:, j].set(jnp.where(alive_B, node_B, 0))
        count_B = count_B + alive_B
        token_B = drawn_BN[rows, node_B]
        match_BN = (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == token_B[:, None])
        ended_B = jnp.any(token_B[:, None] == stop_E, axis=1) | (count_B >= room_B)
        alive_B = alive_B & jnp.any(match_BN, axis=1) & ~ended_B
        return j + 1, jnp.argmax(match_BN, axis=1), alive_B, path_BN, count_B

    start = (
        0,
        jnp.zeros(B, jnp.int32),
        room_B > 0,
        jnp.zeros((B, N), jnp.int32),
        jnp.zeros(B, jnp.int32),
    )
    if N == 1:
        return start[3], (room_B > 0).astype(jnp.int32)
    _, _, _, path_BN, count_B = jax.lax.while_loop(
        lambda c: (c[0] < N) & jnp.any(c[2]), step, start
    )
    return path_BN, count_B


def verify(
    config: ModelConfig,
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    tree: DraftTree,
    stop_E: jax.Array,
    scheme: sampling.Draw,
) -> tuple[KVCache, Slots, Emitted]:
    """Run one round: forward over the trees, draw at every node, walk, compact the cache.

    The trees' root tokens are taken from `slots`. Requires `length + N <= S` in every active slot.
    Source: docs/architecture.md, "The round".
    """
    N = tree.tokens_BN.shape[1]
    tree = DraftTree(tree.tokens_BN.at[:, 0].set(slots.last_token), tree.parents_BN)
    reach_BNN = ancestors(tree.parents_BN)
    depth_BN = depths(reach_BNN)
    # inactive slots are never written: their prompt, or their request, may be resumed
    start_B = jnp.where(slots.active, slots.length, cache.num_positions)
    mask_BNS = node_mask(start_B, reach_BNN, cache.num_positions)
    hidden_BND, cache = transformer.hidden_with_cache(
        config, params, cache, tree.tokens_BN, start_B[:, None] + depth_BN, start_B, mask_BNS
    )
    logits_BNV = constrain(transformer.head(params, hidden_BND), "batch", None, "vocab")
    keys_BN = sampling.position_keys(slots.keys, slots.emitted[:, None] + depth_BN)
    temperature_BN, *cuts_BN = slots.processing.broadcast(depth_BN.shape)
    processed_BNV = sampling.processed_logits(logits_BNV, temperature_BN, *cuts_BN)
    drawn_BN, logprobs_BN = sampling.draw(processed_BNV, keys_BN, temperature_BN, scheme)
    room_B = jnp.where(slots.active, slots.limit - slots.emitted, 0)
    path_BN, count_B = walk(tree, drawn_BN, room_B, stop_E)
    if N > 1:
        cache = kv_cache.compact(cache, start_B, path_BN)
    emitted = Emitted(
        jnp.take_along_axis(drawn_BN, path_BN, axis=1),
        jnp.take_along_axis(logprobs_BN, path_BN, axis=1),
        count_B,
    )
    return cache, _advance(slots, emitted, stop_E), emitted


def _advance(slots: Slots, emitted: Emitted, stop_E: jax.Array) -> Slots:
    """Commit the tokens of a round; a slot whose response ended is no longer active."""
    last_B = jnp.take_along_axis(
        emitted.tokens_BN, jnp.maximum(emitted.count_B - 1, 0)[:, None], axis=1
    )[:, 0]
    last_B = jnp.where(emitted.count_B > 0, last_B, slots.last_token)
    total_B = slots.emitted + emitted.count_B
    ended_B = jnp.any(last_B[:, None] == stop_E, axis=1) | (total_B >= slots.limit)
    return dataclasses.replace(
        slots,
        last_token=last_B,
        length=slots.length + emitted.count_B,
        emitted=total_B,
        active=slots.active & ~ended_B,
    )


@partial(jax.jit, static_argnames=("config", "scheme"), donate_argnames=("cache", "slots"))
def verify_round(
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    tree: DraftTree,
    stop_E: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw,
) -> tuple[KVCache, Slots, jax.Array]:
    """Run `verify`, compiled once per bucket (slots, nodes, positions); its `Emitted` is packed."""
    cache, slots, emitted = verify(config, params, cache, slots, tree, stop_E, scheme)
    return cache, slots, pack(emitted)


@partial(
    jax.jit,
    static_argnames=("config", "scheme", "max_rounds"),
    donate_argnames=("cache", "slots"),
)
def decode_rounds(
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    stop_E: jax.Array,
    num_rounds: jax.Array,
    stop_after: jax.Array,
    *,
    config: ModelConfig,
    scheme: sampling.Draw,
    max_rounds: int,
) -> tuple[KVCache, Slots, jax.Array]:
    """Run up to `num_rounds` rounds without drafts on the device, between two fetches.

    Ends early once `stop_after` slots have finished (requests wait for them) or none is active.
    The packed result's N axis is the round: a slot emits in each round until it ends, so its
    first `count` entries are its tokens.
    """
    B = slots.active.shape[0]
    active_before = jnp.sum(slots.active)

    def more(carry: tuple) -> jax.Array:
        r, _, slots, _, _, _ = carry
        left = jnp.sum(slots.active)
        return (r < num_rounds) & (left > 0) & (active_before - left < stop_after)

    def step(carry: tuple) -> tuple:
        r, cache, slots, tokens_BR, logprobs_BR, count_B = carry
        cache, slots, out = verify(
            config, params, cache, slots, roots(slots.last_token), stop_E, scheme
        )
        tokens_BR = jax.lax.dynamic_update_slice(tokens_BR, out.tokens_BN, (0, r))
        logprobs_BR = jax.lax.dynamic_update_slice(logprobs_BR, out.logprobs_BN, (0, r))
        return r + 1, cache, slots, tokens_BR, logprobs_BR, count_B + out.count_B

    start = (
        jnp.int32(0),
        cache,
        slots,
        jnp.zeros((B, max_rounds), jnp.int32),
        jnp.zeros((B, max_rounds), jnp.float32),
        jnp.zeros(B, jnp.int32),
    )
    _, cache, slots, tokens_BR, logprobs_BR, count_B = jax.lax.while_loop(more, step, start)
    return cache, slots, pack(Emitted(tokens_BR, logprobs_BR, count_B))
