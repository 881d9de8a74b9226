"""The packed round: run the nodes of all requests in one forward pass, draw, and walk.

A round computes token(r, t) at every node and follows, from the root of each slot, the child that
equals the draw; a kept given token (`spec.verification.nodes`) replaces the draw. The emitted
tokens equal the tokens of plain decoding (docs/architecture.md, Exactness, has the bits); a round
with only roots *is* plain decoding. Keys and values of accepted nodes are written at the start of
the next round. Shape legend in docs/architecture.md; E = end tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from reprise.models.attention.attention import Chunks, Trees
from reprise.models.attention.entries import Entries, Pending
from reprise.models.attention.kv_cache import KVCache
from reprise.models.config import ModelConfig
from reprise.models.decoder import lora, transformer
from reprise.models.sharding import constrain, platform_in_use, replicated, ways_in_use
from reprise.spec.verification import nodes as packed_nodes
from reprise.spec.verification import sampling
from reprise.spec.verification.nodes import Drawn, Nodes, pack_draws


@struct.dataclass
class Slots:
    """The device state of B slots; each array has one entry per slot.

    `length` counts live cache positions, including pending entries; `emitted` counts response
    tokens, up to `limit`. `keys` are the noise keys of the requests. Slots that are not `active`
    emit nothing. `adapter` is the index of an adapter of the policy
    (`models.decoder.lora.for_rows`).
    """

    last_token: jax.Array
    length: jax.Array
    emitted: jax.Array
    limit: jax.Array
    active: jax.Array
    adapter: jax.Array
    keys: jax.Array
    processing: sampling.Processing

    def pinned(self) -> Slots:
        """Return the slots replicated on every device: XLA would choose differently per program."""
        return replicated(self)


class Draws(NamedTuple):
    """The draws of an engine: the scheme, and whether any request may cut logits.

    Without cuts, a program has no conditionals for top-k and top-p, which stall GPUs.
    """

    scheme: sampling.Draw
    may_cut: bool = True


LOGITS_AT_ONCE = 2**23  # per device: 32 MiB, in about five copies
ON_ACCELERATORS = 4  # factor, since each part reads the head, which dominates the time there
NO_TOKEN = -2  # no node has this token


def walk(
    nodes: Nodes, trees: Trees, drawn_M: jax.Array, room_B: jax.Array, stop_E: jax.Array
) -> jax.Array:
    """Return whether the draw of each node is emitted; bool [M].

    A draft token is right if its parent draws it and the draw does not end the response. A draw is
    emitted if the node and all of its ancestors but the root are right, for at most `room` tokens
    of the request: the emitted nodes of a slot are a path from its root.
    """
    above_M = drawn_M[jnp.maximum(nodes.parents_M, 0)]
    ended_M = jnp.any(above_M[:, None] == stop_E, axis=1)
    right_M = (nodes.parents_M < 0) | ((nodes.tokens_M == above_M) & ~ended_M)
    W = trees.path_BWW.shape[1]
    right_BW = jnp.take(right_M, trees.first_B[:, None] + jnp.arange(W), mode="clip")
    emitted_BW = jnp.all(~trees.path_BWW | right_BW[:, None], axis=2)
    emitted_BW &= _depths(trees) < room_B[:, None]
    return _of_nodes(emitted_BW, trees) & (nodes.slots_M < len(room_B))


def _depths(trees: Trees) -> jax.Array:
    """Return the number of draft tokens on the path to each place of each slot; int32 [B, W]."""
    return jnp.sum(trees.path_BWW, axis=2, dtype=jnp.int32) - 1


def _of_nodes(x_BW: jax.Array, trees: Trees) -> jax.Array:
    """Return the entries of the nodes; entries of padding are meaningless."""
    W = x_BW.shape[1]
    return jnp.take(x_BW.reshape(-1), trees.row_M * W + trees.place_M, mode="clip")


def verify(
    config: ModelConfig,
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    nodes: Nodes,
    stop_E: jax.Array,
    draws: Draws,
    max_nodes: int,
    num_paths: int = 0,
) -> tuple[KVCache, Pending, Slots, Drawn]:
    """Run one round: write pending entries, run all nodes, draw at every node, walk.

    The trees have at most `num_paths` paths in total; 0: as many as nodes.
    """
    M = len(nodes.tokens_M)
    B = len(slots.active)
    cache = cache.written(pending)
    trees = None
    depth_M = jnp.zeros(M, jnp.int32)
    of_slots = slots
    if M == B:
        nodes = dataclasses.replace(nodes, tokens_M=slots.last_token)
    else:
        nodes = packed_nodes.planted(nodes, slots.last_token)
        trees = packed_nodes.trees(nodes, B, max_nodes, num_paths)
        depth_M = _of_nodes(_depths(trees), trees)
        of_slots = jax.tree.map(lambda x: jnp.take(x, nodes.slots_M, axis=0, mode="clip"), slots)
    positions_M = of_slots.length + depth_M
    room_B = jnp.where(slots.active, slots.limit - slots.emitted, 0)
    length_B = jnp.where(room_B > 0, slots.length, 0)  # idle rows need not be read
    adapted = lora.for_rows(config, params, _adapters(of_slots.adapter, slots, nodes.chunks))
    hidden_XD, entries = transformer.hidden_of_nodes(
        config, adapted, cache, nodes.tokens_M, positions_M, length_B, trees, nodes.chunks
    )
    tokens_M, logprobs_M, reused_M = _draw(
        config, params, _Undrawn(hidden_XD[:M], nodes, of_slots, depth_M), draws
    )
    if trees is None:
        emitted_M = room_B > 0
        count_B = emitted_M.astype(jnp.int32)
        last_B = tokens_M
    else:
        # nothing after a rejected given token is right, even if the policy draws that token
        refused_M = False if nodes.given_M is None else (nodes.given_M >= 0) & ~reused_M
        followed_M = jnp.where(refused_M, NO_TOKEN, tokens_M)
        emitted_M = walk(nodes, trees, followed_M, room_B, stop_E)
        count_B, last_B = _last_of_slots(nodes.slots_M, emitted_M, tokens_M, B)
    dtype = cache.values[0].dtype
    of_nodes = entries.take(np.s_[:M], dtype)
    of_chunks = None if nodes.chunks is None else entries.take(np.s_[M:], dtype)
    pending = pending.replaced(of_nodes, nodes.slots_M, positions_M, emitted_M)
    slots = _advance(slots, count_B, last_B, stop_E)
    return cache, pending, slots, Drawn(tokens_M, logprobs_M, emitted_M, reused_M, of_chunks)


class _Undrawn(NamedTuple):
    """The inputs for the draws of M nodes; `of_slots` has the slot state of each node."""

    hidden_MD: jax.Array
    nodes: Nodes
    of_slots: Slots
    depth_M: jax.Array


def _draw(
    config: ModelConfig, params: transformer.Params, undrawn: _Undrawn, draws: Draws
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the token after each node, its log-probability, and whether it was given; [M] each.

    A given token is kept if the policy can draw it with a log-probability of at least
    `min_logprob_M`, or if `min_logprob_M` is −∞. Logits are computed in parts of limited size per
    device, if the nodes divide.
    """
    undrawn = undrawn._replace(nodes=dataclasses.replace(undrawn.nodes, chunks=None))
    parts = _parts(len(undrawn.hidden_MD), config.vocab_size)
    if parts == 1:
        return _draw_part(config, params, undrawn, draws)
    ways = ways_in_use("batch")  # each device has some of its nodes in every part

    def cut(x_M: jax.Array) -> jax.Array:
        x = x_M.reshape(ways, parts, -1, *x_M.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x_M.shape[1:])

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(parts, ways, -1).swapaxes(0, 1).reshape(-1)

    def drawn(part: _Undrawn) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _draw_part(config, params, part, draws)

    return jax.tree.map(joined, jax.lax.map(drawn, jax.tree.map(cut, undrawn)))


def _parts(num_nodes: int, vocab_size: int) -> int:
    """Return the number of parts for computing logits: the fewest that are small enough."""
    nodes = num_nodes // ways_in_use("batch")
    vocab = vocab_size // ways_in_use("vocab")
    at_once = LOGITS_AT_ONCE * (1 if platform_in_use() == "cpu" else ON_ACCELERATORS)
    min_parts = max(1, -(-nodes * vocab // at_once))
    return next((n for n in range(min_parts, 2 * min_parts) if nodes % n == 0), 1)


def _draw_part(
    config: ModelConfig, params: transformer.Params, undrawn: _Undrawn, draws: Draws
) -> tuple[jax.Array, jax.Array, jax.Array]:
    hidden_MD, nodes, of_slots, depth_M = undrawn
    params = lora.for_rows(config, params, of_slots.adapter)
    logits_MV = constrain(transformer.head(config, params, hidden_MD), "batch", "vocab")
    keys_M = sampling.position_keys(of_slots.keys, (of_slots.emitted + depth_M)[:, None])[:, 0]
    temperature_M, top_k_M, top_p_M = of_slots.processing.broadcast(depth_M.shape)
    if draws.may_cut:
        processed_MV = sampling.processed_logits(logits_MV, temperature_M, top_k_M, top_p_M)
    else:
        processed_MV = sampling.processed_logits(logits_MV, temperature_M)
    mass = sampling.masses(processed_MV)
    drawn_M, logprobs_M = sampling.draw(processed_MV, keys_M, temperature_M, draws.scheme, mass)
    if nodes.given_M is None:
        return drawn_M, logprobs_M, jnp.zeros(drawn_M.shape, bool)
    given_M = nodes.given_M
    min_logprob_M = nodes.min_logprob_M
    # without cuts, logits are processed in their place: one array of the vocabulary fewer
    uncut_MV = logits_MV if draws.may_cut else None
    given_logprobs_M, possible_M = sampling.given_log_probs(
        uncut_MV, processed_MV, mass, jnp.maximum(given_M, 0), temperature_M
    )
    possible_M &= (temperature_M > 0) | (drawn_M == given_M)
    reused_M = (min_logprob_M == -jnp.inf) | (possible_M & (given_logprobs_M >= min_logprob_M))
    reused_M &= given_M >= 0
    tokens_M = jnp.where(reused_M, given_M, drawn_M)
    return tokens_M, jnp.where(reused_M, given_logprobs_M, logprobs_M), reused_M


def decode(
    config: ModelConfig,
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    stop_E: jax.Array,
    draws: Draws,
    chunks: Chunks | None = None,
) -> tuple[KVCache, Slots, Drawn]:
    """Run one round with only roots; no entries may be pending.

    Each layer writes its entry before it reads the row: without a kernel for rows it computes one
    softmax instead of two, so that `decode` rounds differently from `verify`. It rounds the same
    with and without `chunks`. Idle rows are not written.
    """
    room_B = jnp.where(slots.active, slots.limit - slots.emitted, 0)
    start_B = jnp.where(room_B > 0, slots.length, cache.num_positions)
    adapted = lora.for_rows(config, params, _adapters(slots.adapter, slots, chunks))
    hidden_B1D, cache, entries = transformer.hidden_with_cache(
        config, adapted, cache, slots.last_token[:, None], slots.length[:, None], start_B, chunks
    )
    hidden_BD = hidden_B1D[:, 0]
    of_chunks = None if chunks is None else entries.take(np.s_[:], cache.values[0].dtype)
    roots = packed_nodes.roots(slots.last_token)
    depth_B = jnp.zeros_like(slots.length)
    tokens_B, logprobs_B, reused_B = _draw(
        config, params, _Undrawn(hidden_BD, roots, slots, depth_B), draws
    )
    emitted_B = room_B > 0
    slots = _advance(slots, emitted_B.astype(jnp.int32), tokens_B, stop_E)
    return cache, slots, Drawn(tokens_B, logprobs_B, emitted_B, reused_B, of_chunks)


def _adapters(adapter_M: jax.Array, slots: Slots, chunks: Chunks | None) -> jax.Array:
    """Return the adapters of the nodes of a round, then of the tokens of its chunks."""
    if chunks is None:
        return adapter_M
    chunks_X = jnp.take(slots.adapter, chunks.slot_X, mode="clip")
    return jnp.concatenate([adapter_M, chunks_X])


def _last_of_slots(
    slots_M: jax.Array, emitted_M: jax.Array, drawn_M: jax.Array, num_slots: int
) -> tuple[jax.Array, jax.Array]:
    """Return the number of tokens that each slot got, and the last token."""
    theirs_BM = (slots_M == jnp.arange(num_slots)[:, None]) & emitted_M
    last_B = jnp.max(jnp.where(theirs_BM, jnp.arange(len(slots_M)), 0), axis=1)
    return jnp.sum(theirs_BM, axis=1, dtype=jnp.int32), drawn_M[last_B]


def _advance(slots: Slots, count_B: jax.Array, last_B: jax.Array, stop_E: jax.Array) -> Slots:
    """Commit the tokens of a round; a slot with a finished response is no longer active."""
    last_B = jnp.where(count_B > 0, last_B, slots.last_token)
    total_B = slots.emitted + count_B
    ended_B = jnp.any(last_B[:, None] == stop_E, axis=1) | (total_B >= slots.limit)
    return dataclasses.replace(
        slots,
        last_token=last_B,
        length=slots.length + count_B,
        emitted=total_B,
        active=slots.active & ~ended_B,
    )


@partial(jax.jit, donate_argnames=("cache", "pending"))
def settle(cache: KVCache, pending: Pending) -> tuple[KVCache, Pending]:
    """Write pending entries outside a round."""
    return cache.written(pending), dataclasses.replace(pending, count=jnp.zeros_like(pending.count))


@partial(
    jax.jit,
    static_argnames=("config", "draws", "max_nodes", "num_paths"),
    donate_argnames=("cache", "pending", "slots"),
)
def verify_round(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    nodes_5M: jax.Array,
    stop_E: jax.Array,
    chunks_TX: jax.Array | None,
    *,
    config: ModelConfig,
    draws: Draws,
    max_nodes: int,
    num_paths: int = 0,
) -> tuple[KVCache, Pending, Slots, jax.Array, Entries | None]:
    """Run `verify`, compiled once per bucket (slots, nodes, positions).

    Returns draws as [3, M] of `pack_draws`. `nodes_5M` come from `spec.verification.nodes.pack`.
    With a table for `Chunks.of_table` the round also computes chunks;
    `rl.slot_memory.cache_ops.write_chunks` writes their entries afterwards, since XLA for CPUs
    copies a cache that is written after it is read.
    """
    nodes = packed_nodes.unpack(nodes_5M)
    if chunks_TX is not None:
        nodes = dataclasses.replace(nodes, chunks=Chunks.of_table(chunks_TX))
    cache, pending, slots, drawn = verify(
        config, params, cache, pending, slots, nodes, stop_E, draws, max_nodes, num_paths
    )
    return cache, pending, slots.pinned(), replicated(pack_draws(drawn)), drawn.of_chunks


@partial(
    jax.jit,
    static_argnames=("config", "draws"),
    donate_argnames=("cache", "pending", "slots"),
)
def decode_beside_chunks(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    chunks_TX: jax.Array,
    *,
    config: ModelConfig,
    draws: Draws,
) -> tuple[KVCache, Pending, Slots, jax.Array, Entries]:
    """Run a round without drafts that also computes chunks; return what `verify_round` does."""
    cache, pending = settle(cache, pending)
    chunks = Chunks.of_table(chunks_TX)
    cache, slots, drawn = decode(config, params, cache, slots, stop_E, draws, chunks)
    assert drawn.of_chunks is not None
    return cache, pending, slots.pinned(), replicated(pack_draws(drawn)), drawn.of_chunks


@partial(jax.jit, static_argnames=("config", "draws"))
def chunks_alone(
    params: transformer.Params,
    cache: KVCache,
    slots: Slots,
    chunks_TX: jax.Array,
    given_2X: jax.Array,
    *,
    config: ModelConfig,
    draws: Draws,
) -> tuple[jax.Array, Entries]:
    """Compute chunks without nodes, at most one chunk per row; no entries may be pending.

    A token is drawn after each chunk token: [3, X] of `pack_draws`. `given_2X` holds tokens and
    bits of log-probabilities as in `spec.verification.nodes.pack`. The host keeps the draws of a
    row up to the first that differs from the cached token. Also returns the entries of the chunks.
    """
    chunks = Chunks.of_table(chunks_TX, are_apart=True)
    none_M = jnp.zeros(0, jnp.int32)
    adapted = lora.for_rows(config, params, _adapters(none_M, slots, chunks))
    hidden_XD, entries = transformer.hidden_of_nodes(
        config, adapted, cache, none_M, none_M, slots.length, None, chunks
    )
    entries = entries.take(np.s_[:], cache.values[0].dtype)
    of_slots = jax.tree.map(lambda x: jnp.take(x, chunks.slot_X, axis=0, mode="clip"), slots)
    depth_X = chunks.positions_TC.reshape(-1) - of_slots.length
    nodes = _chunk_nodes(chunks, given_2X)
    tokens_X, logprobs_X, reused_X = _draw(
        config, params, _Undrawn(hidden_XD, nodes, of_slots, depth_X), draws
    )
    packed = pack_draws(Drawn(tokens_X, logprobs_X, chunks.slot_X >= 0, reused_X, None))
    return replicated(packed), entries


@partial(
    jax.jit,
    static_argnames=("config", "draws"),
    donate_argnames=("cache", "pending", "slots"),
)
def chunks_beside_roots(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    chunks_TX: jax.Array,
    given_2X: jax.Array,
    *,
    config: ModelConfig,
    draws: Draws,
) -> tuple[KVCache, Pending, Slots, jax.Array, Entries]:
    """Run a round of roots, and draw after each token of chunks, at most one chunk per idle row.

    Returns what `verify_round` does, with [3, B + X] of `pack_draws`: the roots, then the tokens of
    the chunks (`chunks_alone`).
    """
    B = len(slots.active)
    chunks = Chunks.of_table(chunks_TX, are_apart=True)
    cache = cache.written(pending)
    roots = packed_nodes.roots(slots.last_token)
    of_chunks = _chunk_nodes(chunks, given_2X)
    room_B = jnp.where(slots.active, slots.limit - slots.emitted, 0)
    length_B = jnp.where(room_B > 0, slots.length, 0)  # idle rows need not be read
    adapted = lora.for_rows(config, params, _adapters(slots.adapter, slots, chunks))
    hidden_MD, entries = transformer.hidden_of_nodes(
        config, adapted, cache, roots.tokens_M, slots.length, length_B, None, chunks
    )
    places_M = jnp.concatenate([roots.slots_M, chunks.slot_X])
    of_slots = jax.tree.map(lambda x: jnp.take(x, places_M, axis=0, mode="clip"), slots)
    positions_M = jnp.concatenate([slots.length, chunks.positions_TC.reshape(-1)])
    none_B = jnp.full(B, packed_nodes.NOT_GIVEN, jnp.int32)
    roots = dataclasses.replace(roots, given_M=none_B, min_logprob_M=jnp.zeros(B, jnp.float32))
    nodes = jax.tree.map(lambda *parts: jnp.concatenate(parts), roots, of_chunks)
    undrawn = _Undrawn(hidden_MD, nodes, of_slots, positions_M - of_slots.length)
    tokens_M, logprobs_M, reused_M = _draw(config, params, undrawn, draws)
    emitted_B = room_B > 0
    dtype = cache.values[0].dtype
    of_roots = entries.take(np.s_[:B], dtype)
    pending = pending.replaced(of_roots, roots.slots_M, slots.length, emitted_B)
    slots = _advance(slots, emitted_B.astype(jnp.int32), tokens_M[:B], stop_E)
    emitted_M = jnp.concatenate([emitted_B, chunks.slot_X >= 0])
    packed = pack_draws(Drawn(tokens_M, logprobs_M, emitted_M, reused_M, None))
    return cache, pending, slots.pinned(), replicated(packed), entries.take(np.s_[B:], dtype)


def _chunk_nodes(chunks: Chunks, given_2X: jax.Array) -> Nodes:
    """Return the tokens of chunks as nodes to draw at."""
    tokens_X = chunks.tokens_TC.reshape(-1)
    least_X = jax.lax.bitcast_convert_type(given_2X[1], jnp.float32)
    return Nodes(tokens_X, chunks.slot_X, jnp.full_like(tokens_X, -1), given_2X[0], least_X)


@partial(
    jax.jit,
    static_argnames=("config", "draws", "max_rounds"),
    donate_argnames=("cache", "pending", "slots"),
)
def decode_rounds(
    params: transformer.Params,
    cache: KVCache,
    pending: Pending,
    slots: Slots,
    stop_E: jax.Array,
    num_rounds: jax.Array,
    stop_after: jax.Array,
    *,
    config: ModelConfig,
    draws: Draws,
    max_rounds: int,
) -> tuple[KVCache, Pending, Slots, jax.Array]:
    """Run up to `num_rounds` rounds without drafts on the device.

    Returns draws as [3, rounds, B] of `pack_draws`. Stops early once `stop_after` slots have
    finished or no slot is active.
    """
    B = slots.active.shape[0]
    active_before = jnp.sum(slots.active)

    def more(carry: tuple) -> jax.Array:
        r, _, slots, _ = carry
        left = jnp.sum(slots.active)
        return (r < num_rounds) & (left > 0) & (active_before - left < stop_after)

    def step(carry: tuple) -> tuple:
        r, cache, slots, packed_3RB = carry
        cache, slots, out = decode(config, params, cache, slots, stop_E, draws)
        packed_3RB = jax.lax.dynamic_update_slice(packed_3RB, pack_draws(out)[:, None], (0, r, 0))
        return r + 1, cache, slots, packed_3RB

    cache, pending = settle(cache, pending)
    start = jnp.int32(0), cache, slots, jnp.zeros((3, max_rounds, B), jnp.int32)
    _, cache, slots, packed_3RB = jax.lax.while_loop(more, step, start)
    return cache, pending, slots.pinned(), replicated(packed_3RB)
