"""The jitted steps that fill a cache; one compilation per bucket, one call for all layers.

Steps write in place. A change of bucket cannot, so `models.kv_cache` copies layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models import kv_cache
from reprise.models.attention import Chunks
from reprise.models.kv_cache import Entries, Kind, KVCache, map_arrays, resize_layer
from reprise.models.paged_cache import Cache, PagedCache, map_pages
from reprise.models.sharding import constrain, replicated
from reprise.rl.records.trajectory import HostKv
from reprise.spec.sampling import Processing
from reprise.spec.verify import Slots

STATE_COPY_TOKENS = 1024  # positions of one copy of hidden states, at most
COPY_TOKENS = 64  # block size of prompt copies between rows
PAGES_AT_ONCE = 16  # pages that one call copies, reads or writes
# Columns of the integer table that `make_slots` turns into device slots.
COLUMNS = ("last_token", "length", "emitted", "limit", "active", "request_id", "top_k", "adapter")


@jax.jit
def make_slots(ints_BC: jax.Array, floats_B2: jax.Array, key: jax.Array) -> Slots:
    """Make device slots from host tables: integer `COLUMNS`, and (temperature, top_p)."""
    column = dict(zip(COLUMNS, ints_BC.T, strict=True))
    keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(column.pop("request_id"))
    active, top_k_B = column.pop("active") > 0, column.pop("top_k")
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
def write_chunks(cache: Cache, entries: Entries, chunks_TX: jax.Array) -> Cache:
    """Write the entries of the chunks of a round; entries past the tokens of a row are dead."""
    chunks = Chunks.of_table(chunks_TX)
    if isinstance(cache, PagedCache):
        new = entries.keys, entries.values, entries.features
        return cache.put(*new, chunks.slot_X, chunks.positions_TC.reshape(-1))
    C = chunks.tokens_TC.shape[1]

    def one(rows: jax.Array, new_X: jax.Array, kind: Kind, i: jax.Array) -> jax.Array:
        axis, K, h = kind.axis, rows.shape[1], rows.shape[5 - kind.axis]
        new_CKh = jax.lax.dynamic_slice_in_dim(new_X, i * C, C).reshape(C, K, h)
        window = jnp.moveaxis(new_CKh, 0, axis - 1)[None].astype(rows.dtype)
        at = {0: chunks.slot_T[i], axis: chunks.start_T[i]}
        return jax.lax.dynamic_update_slice(rows, window, [at.get(d, 0) for d in range(4)])

    return _each(
        jnp.sum(chunks.slot_T >= 0),
        lambda i, cache: map_arrays(partial(one, i=i), cache, entries),
        cache,
    )


@partial(jax.jit, donate_argnames="cache")
def insert_rows(
    cache: KVCache, new: KVCache, source_B: jax.Array, target_B: jax.Array, count: jax.Array
) -> KVCache:
    """Write row `source[i]` of `new` to the start of row `target[i]`, for i < count."""

    def one(rows: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(new, source_B[i], 1, axis=0)
        return jax.lax.dynamic_update_slice(rows, row.astype(rows.dtype), (target_B[i], 0, 0, 0))

    return _each(count, lambda i, cache: jax.tree.map(partial(one, i=i), cache, new), cache)


@partial(jax.jit, donate_argnames="cache")
def copy_rows(
    cache: KVCache,
    source_B: jax.Array,
    target_B: jax.Array,
    count: jax.Array,
    num_tokens: jax.Array,
) -> KVCache:
    """Copy the first `num_tokens` positions of row `source[i]` to `target[i]`, for i < count.

    Rows are copied in order and in blocks, so that dead positions of long rows cost nothing; the
    last block has a few more positions.
    """
    block_tokens = min(COPY_TOKENS, cache.num_positions)
    num_blocks = (num_tokens + block_tokens - 1) // block_tokens

    def one(rows: jax.Array, kind: Kind, i: jax.Array) -> jax.Array:
        sizes = [1, *rows.shape[1:]]
        sizes[kind.axis] = block_tokens
        starts = [jnp.int32(0)] * 4
        starts[kind.axis] = (i % num_blocks) * block_tokens
        row = i // num_blocks
        block = jax.lax.dynamic_slice(rows, [source_B[row], *starts[1:]], sizes)
        return jax.lax.dynamic_update_slice(rows, block, [target_B[row], *starts[1:]])

    def step(i: jax.Array, cache: KVCache) -> KVCache:
        return map_arrays(partial(one, i=i), cache)

    return _each(count * num_blocks, step, cache)


def _each(
    count: jax.Array, step: Callable[[jax.Array, KVCache], KVCache], cache: KVCache
) -> KVCache:
    return map_arrays(kv_cache.pin, jax.lax.fori_loop(0, count, step, cache))


def read_rows(
    cache: KVCache,
    row_P: jax.Array,
    num_tokens: Sequence[int],
    readable: Callable[[jax.Array], jax.Array],
) -> list[HostKv]:
    """Fetch the first `num_tokens[i]` positions of row `row_P[i]` to the host, in one transfer.

    Rows of `row_P` beyond `num_tokens` are padding, which is read but not returned. `readable`
    turns a device array into an array that the host can read.
    """

    def some(rows: jax.Array, kind: Kind) -> jax.Array:
        size = cache.num_positions
        return readable(resize_layer(rows, row_P, num_positions=size, kind=kind))

    result = jax.device_get(map_arrays(some, cache))

    def row(p: int, n: int) -> KVCache:
        return map_arrays(lambda rows, kind: np.take(rows[p], range(n), kind.axis - 1), result)

    return [HostKv(row(p, n)) for p, n in enumerate(num_tokens)]


@partial(jax.jit, static_argnames="num_tokens")
def copy_states(
    features_B1SW: jax.Array, row: jax.Array, start: jax.Array, *, num_tokens: int
) -> jax.Array:
    """Return a copy of the hidden states of a row from position `start` on, [T, W]."""
    W = features_B1SW.shape[-1]
    # a gather leaves rows on their devices; a dynamic slice would collect all rows first
    dims = jax.lax.GatherDimensionNumbers((0, 1), (0, 1), (0, 2))
    place_2, size = jnp.stack([row, start]), (1, 1, num_tokens, W)
    states_TW = jax.lax.gather(features_B1SW, place_2, dims, size, mode="clip")
    return constrain(states_TW, None, "features")


@partial(jax.jit, donate_argnames="cache")
def copy_pages(cache: PagedCache, source_X: jax.Array, target_X: jax.Array) -> PagedCache:
    """Copy page `source[x]` to page `target[x]`; a target of −1 is padding."""

    def one(pages: jax.Array, kind: Kind) -> jax.Array:
        new = jnp.take(pages, jnp.maximum(source_X, 0), axis=0)
        target = jnp.where(target_X < 0, len(pages), target_X)
        return kv_cache.pin(pages.at[target].set(new, mode="drop"), kind)

    return map_pages(one, cache)


@partial(jax.jit, donate_argnames="cache")
def insert_pages(cache: PagedCache, new: PagedCache, target_X: jax.Array) -> PagedCache:
    """Write page x of `new` to page `target[x]`; a target of −1 is padding."""

    def one(pages: jax.Array, new: jax.Array, kind: Kind) -> jax.Array:
        target = jnp.where(target_X < 0, len(pages), target_X)
        return kv_cache.pin(pages.at[target].set(new.astype(pages.dtype), mode="drop"), kind)

    return map_pages(one, cache, new)


@jax.jit
def read_pages(cache: PagedCache, page_X: jax.Array) -> PagedCache:
    """Return copies of pages, without a table."""

    def one(pages: jax.Array, kind: Kind) -> jax.Array:
        return kv_cache.pin(jnp.take(pages, jnp.maximum(page_X, 0), axis=0), kind)

    return map_pages(one, cache)


@jax.jit
def states_of_pages(pages_P1TF: jax.Array, page_X: jax.Array) -> jax.Array:
    """Return copies of the hidden states of pages, concatenated, [X · T, F]."""
    states_XTF = jnp.take(pages_P1TF[:, 0], jnp.maximum(page_X, 0), axis=0)
    return constrain(states_XTF.reshape(-1, states_XTF.shape[-1]), None, "features")


def host_of_pages(parts: Sequence[PagedCache], num_tokens: int, like: PagedCache) -> HostKv:
    """Return the pages read from one row, arrays [X, K, T, h], as one row on the host."""

    def row(pages: Sequence[Any]) -> np.ndarray:
        rows_KSh = [x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in pages]
        return np.concatenate(rows_KSh, axis=1)[:, :num_tokens]

    def rows(name: str) -> tuple[np.ndarray, ...]:
        return tuple(row(pages) for pages in zip(*(getattr(p, name) for p in parts), strict=True))

    keys = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in rows("keys"))
    return HostKv(KVCache(keys, rows("values"), rows("features"), like.feature_layers))


def pages_of_host(kv: HostKv, first: int, page_tokens: int) -> PagedCache:
    """Return `PAGES_AT_ONCE` pages of a host row, from page `first` on."""
    size = PAGES_AT_ONCE * page_tokens

    def pages(row_KSh: Any) -> np.ndarray:
        some_KSh = row_KSh[:, first * page_tokens :][:, :size]
        out_KSh = np.zeros((some_KSh.shape[0], size, some_KSh.shape[2]), some_KSh.dtype)
        out_KSh[:, : some_KSh.shape[1]] = some_KSh
        return out_KSh.reshape(len(out_KSh), PAGES_AT_ONCE, page_tokens, -1).swapaxes(0, 1)

    entries = kv.entries
    keys = tuple(pages(x_KhS.swapaxes(1, 2)) for x_KhS in entries.keys)
    values, features = (tuple(map(pages, rows)) for rows in (entries.values, entries.features))
    return PagedCache(keys, values, features, None, entries.feature_layers)


@jax.jit
def gathered(x: jax.Array) -> jax.Array:
    """Return an array replicated on every device of the mesh."""
    return replicated(x)


def stacked(kvs: Sequence[HostKv], num_rows: int, num_positions: int) -> KVCache:
    """Return host rows padded to one shape, which `insert_rows` takes once it is on the device."""

    def stack(*arrays: Any) -> np.ndarray:
        *rows, (axis, _) = arrays
        shape = [num_rows, *rows[0].shape]
        shape[axis] = num_positions
        out = np.zeros(shape, rows[0].dtype)
        for target, row in zip(np.moveaxis(out, axis, 1), rows, strict=False):
            target[: row.shape[axis - 1]] = np.moveaxis(row, axis - 1, 0)
        return out

    return map_arrays(stack, *(kv.entries for kv in kvs))
