"""The jitted steps that fill a cache; one compilation per bucket, one call for all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.attention.attention import Chunks
from reprise.models.attention.entries import Entries, Kind, pin
from reprise.models.attention.kv_cache import KVCache, map_arrays
from reprise.models.sharding import constrain, replicated
from reprise.rl.records.trajectory import HostKv
from reprise.spec.verification.sampling import Processing, step_key
from reprise.spec.verification.verify import Slots

STATE_COPY_TOKENS = 1024  # positions of one copy of hidden states, at most
PAGES_AT_ONCE = 16  # pages that one call copies, reads or writes
# Columns of the integer table that `make_slots` turns into device slots.
COLUMNS = (
    *("last_token", "length", "emitted", "limit", "active", "request_id", "seed", "top_k"),
    "adapter",
)


@jax.jit
def make_slots(ints_BC: jax.Array, floats_B2: jax.Array, key: jax.Array) -> Slots:
    """Make device slots from host tables: integer `COLUMNS`, and (temperature, top_p).

    Requests without a seed (−1) have the noise of `key`.
    """
    column = dict(zip(COLUMNS, ints_BC.T, strict=True))
    seed_B = column.pop("seed")
    base_B = jnp.where(seed_B < 0, key, jax.vmap(step_key, (0, None))(seed_B, 0))
    keys = jax.vmap(jax.random.fold_in)(base_B, column.pop("request_id"))
    active = column.pop("active") > 0
    top_k_B = column.pop("top_k")
    processing = Processing(floats_B2[:, 0], top_k_B, floats_B2[:, 1])
    return Slots(**column, active=active, keys=keys, processing=processing).pinned()


@partial(jax.jit, donate_argnames="slots")
def join_slots(
    slots: Slots, ints_BC: jax.Array, floats_B2: jax.Array, key: jax.Array, joins_B: jax.Array
) -> Slots:
    """Replace slots with new slots from `make_slots` where `joins_B` is True."""

    def one(before: jax.Array, made: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(joins_B, range(1, made.ndim)), made, before)

    return jax.tree.map(one, slots, make_slots(ints_BC, floats_B2, key)).pinned()


@partial(jax.jit, donate_argnames="cache")
def write_chunks(cache: KVCache, entries: Entries, chunks_TX: jax.Array) -> KVCache:
    """Write the entries of the chunks of a round; entries past the tokens of a row are dead."""
    chunks = Chunks.of_table(chunks_TX)
    return cache.put(entries, chunks.slot_X, chunks.positions_TC.reshape(-1))


@partial(jax.jit, donate_argnames="cache")
def copy_pages(cache: KVCache, source_X: jax.Array, target_X: jax.Array) -> KVCache:
    """Copy page `source[x]` to page `target[x]`; a target of −1 is padding, at the end."""
    if cache.for_cpu:
        return _copied_in_turn(cache, source_X, target_X)

    def one(pages: jax.Array, kind: Kind) -> jax.Array:
        new = jnp.take(pages, jnp.maximum(source_X, 0), axis=0)
        target = jnp.where(target_X < 0, len(pages), target_X)
        return pin(pages.at[target].set(new, mode="drop"), kind)

    return map_arrays(one, cache)


def _copied_in_turn(cache: KVCache, source_X: jax.Array, target_X: jax.Array) -> KVCache:
    """Copy pages one by one: few of X are real, and a CPU would copy the padding too."""

    def one(i: jax.Array, cache: KVCache) -> KVCache:
        def copied(pages: jax.Array, kind: Kind) -> jax.Array:
            page = jax.lax.dynamic_index_in_dim(pages, source_X[i], axis=0)
            return jax.lax.dynamic_update_index_in_dim(pages, page, target_X[i], axis=0)

        return map_arrays(copied, cache)

    cache = jax.lax.fori_loop(0, jnp.sum(target_X >= 0), one, cache)
    return map_arrays(pin, cache)


@partial(jax.jit, donate_argnames="cache")
def insert_pages(cache: KVCache, new: KVCache, target_X: jax.Array) -> KVCache:
    """Write page x of `new` to page `target[x]`; a target of −1 is padding."""

    def one(pages: jax.Array, new: jax.Array, kind: Kind) -> jax.Array:
        target = jnp.where(target_X < 0, len(pages), target_X)
        return pin(pages.at[target].set(new.astype(pages.dtype), mode="drop"), kind)

    return map_arrays(one, cache, new)


@jax.jit
def read_pages(cache: KVCache, page_X: jax.Array) -> KVCache:
    """Return copies of pages, without a table."""

    def one(pages: jax.Array, kind: Kind) -> jax.Array:
        return pin(jnp.take(pages, jnp.maximum(page_X, 0), axis=0), kind)

    return map_arrays(one, cache)


@jax.jit
def states_of_pages(pages_P1TF: jax.Array, page_X: jax.Array) -> jax.Array:
    """Return copies of the hidden states of pages, concatenated, [X · T, F]."""
    states_XTF = jnp.take(pages_P1TF[:, 0], jnp.maximum(page_X, 0), axis=0)
    return constrain(states_XTF.reshape(-1, states_XTF.shape[-1]), None, "features")


def host_of_pages(parts: Sequence[KVCache], num_tokens: int) -> HostKv:
    """Return the pages read from one slot as entries on the host, by position."""

    def by_position(kind: Kind, *pages: Any) -> np.ndarray:
        entries = [np.moveaxis(x, (0, kind.axis), (0, 1)) for x in pages]  # [X, T, K, h]
        entries = [x.reshape(-1, *x.shape[2:]) for x in entries]
        return np.concatenate(entries)[:num_tokens]

    joined = map_arrays(lambda *given: by_position(given[-1], *given[:-1]), *parts)
    features = tuple(x[:, 0] for x in joined.features)
    return HostKv(Entries(joined.keys, joined.values, features))


def pages_of_host(kv: HostKv, first: int, like: KVCache) -> KVCache:
    """Return `PAGES_AT_ONCE` pages of host entries, from page `first` on, without a table."""
    T = like.page_tokens
    size = PAGES_AT_ONCE * T

    def pages(_: Any, entries: np.ndarray, kind: Kind) -> np.ndarray:
        some = entries[first * T :][:size]
        out = np.zeros((size, *some.shape[1:]), some.dtype)
        out[: len(some)] = some
        if out.ndim == 2:
            out = out[:, None]
        return np.moveaxis(out.reshape(PAGES_AT_ONCE, T, *out.shape[1:]), 1, kind.axis)

    return dataclasses.replace(map_arrays(pages, like, kv.entries), table_BN=None)


@jax.jit
def gathered(x: jax.Array) -> jax.Array:
    """Return an array replicated on every device of the mesh."""
    return replicated(x)
