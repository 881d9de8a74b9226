"""The key/value cache, in pages: memory follows the live positions, not the longest request.

A page holds T positions. `table_BN` has the page of positions n·T … n·T + T − 1 of a slot, or −1.
The host sets the table (spec.page_table); slots may share pages that are no longer written. There
is one array per layer. Values are `[page, kv_head, position, head_dim]`; keys are the same on
accelerators, and transposed on CPUs (`for_cpu`), `[page, kv_head, head_dim, position]`, where both
products of attention then read along rows. For a drafter, `features` keeps the hidden states of the
policy. `length_B` (kept by the engine) is the number of live positions of a slot; later positions
are masked. Writes are in place if the buffers are donated.

Each part of the batch axes of a mesh has a part of the slots and their pages, so that reads and
writes need no collective.

Shape suffixes: B slots, N pages of a slot, P pages in all, T positions of a page, W nodes of a
slot, X entries, L layers, K key/value heads, H query heads, h head size, F feature width. Suffixes
of keys are in the order of accelerators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from reprise.models.attention.attention import (
    After,
    PartialSoftmax,
    Portable,
    causal_mask,
    joined,
    partial_attention,
)
from reprise.models.attention.cached_attention import Split, attend_in_order, is_in_order
from reprise.models.attention.entries import (
    FEATURES,
    KEYS,
    VALUES,
    Entries,
    Kind,
    Pending,
    pin,
    place_of,
    write_entries,
)
from reprise.models.attention.page_attention import append_and_attend, attend_pages
from reprise.models.config import ModelConfig
from reprise.models.layout import CACHE_AXES, FEATURE_AXES

CPU_WRITES = 16  # entries per write on a CPU


@struct.dataclass
class Pages:
    """A layer of a `KVCache`; with `anywhere`, table rows are slots of any part of a mesh."""

    keys_PKTh: jax.Array
    values_PKTh: jax.Array
    table_BN: jax.Array
    for_cpu: bool = struct.field(pytree_node=False, default=False)
    anywhere: bool = struct.field(pytree_node=False, default=False)

    def of_prefix(self, q_BWHh: jax.Array, length_B: jax.Array) -> PartialSoftmax:
        """Attend from W nodes of each slot to the first `length` positions of the slot."""
        split = Split.of_cache(self.values_PKTh)
        row = None if self.anywhere else 0
        assert self.anywhere or len(q_BWHh) % split.ways == 0, (
            "the parts of a mesh have equal slots"
        )
        queries = split.spec(batch=row, heads=2)
        pages = split.spec(batch=0, heads=1)
        inputs = queries, pages, pages, split.spec(batch=row), split.spec(batch=row)

        def local(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, length: jax.Array):  # type: ignore[no-untyped-def]
            table = split.own(table, len(k))
            if not self.anywhere or not split.batch:
                result = attend_pages(q, k, v, table, length, for_cpu=self.for_cpu)
                return result.out, result.top, result.total
            own_length = jnp.where(table[:, 0] < 0, 0, length)
            result = attend_pages(q, k, v, table, own_length, for_cpu=self.for_cpu)
            top = jax.lax.pmax(result.top, split.batch)  # only one part has the pages of a slot
            return (
                jax.lax.psum(result.out, split.batch),
                top,
                jax.lax.psum(result.total, split.batch),
            )

        attend = split.mapped(local, inputs, (queries,) * 3)
        result = attend(q_BWHh, self.keys_PKTh, self.values_PKTh, self.table_BN, length_B)
        return PartialSoftmax(*result)

    def of_chunks(
        self, q_TCHh: jax.Array, slot_T: jax.Array, length_T: jax.Array
    ) -> PartialSoftmax:
        """Attend from each of T chunks of C tokens to the first `length` positions of its slot."""
        table_TN = jnp.take(self.table_BN, slot_T, axis=0)
        of_slots = dataclasses.replace(self, table_BN=table_TN, anywhere=True)
        return of_slots.of_prefix(q_TCHh, length_T)

    def of_new(
        self, q_XHh: jax.Array, k_XKh: jax.Array, v_XKh: jax.Array, after: After, portable: Portable
    ) -> jax.Array:
        """Attend from X tokens to all positions up to themselves; `portable` if no kernel does."""
        return attend_in_order(
            (q_XHh, k_XKh, v_XKh),
            (self.keys_PKTh, self.values_PKTh),
            after,
            portable,
            self.table_BN,
            for_cpu=self.for_cpu,
            has_own_slots=not self.anywhere,
        )

    def whole_slots(self) -> tuple[jax.Array, jax.Array]:
        """Return copies of the keys, [B, K, h, S], and values, [B, K, S, h], of all slots."""
        page_BN = jnp.maximum(self.table_BN, 0)
        keys = self.keys_PKTh[page_BN]
        values = self.values_PKTh[page_BN]
        B, N, K, T, h = values.shape
        keys_BKhNT = keys.transpose((0, 2, 3, 1, 4) if self.for_cpu else (0, 2, 4, 1, 3))
        values_BKNTh = values.transpose(0, 2, 1, 3, 4)
        return keys_BKhNT.reshape(B, K, h, N * T), values_BKNTh.reshape(B, K, N * T, h)

    def append_and_attend(
        self,
        q_BNHh: jax.Array,
        k_BNKh: jax.Array,
        v_BNKh: jax.Array,
        start_B: jax.Array,
    ) -> tuple[Pages, jax.Array]:
        """Write N entries of each slot from `start` on; attend from each node up to itself.

        Slots without a page at `start` write nothing, and get 0 if N is 1.
        """
        platform = is_in_order(q_BNHh.dtype, self.values_PKTh, for_cpu=self.for_cpu)
        is_one_kernel = platform in (None, "tpu")  # TPUs have one kernel for both
        if self.for_cpu or q_BNHh.shape[1] > 1 or not is_one_kernel:
            layer = self._put_window(k_BNKh, v_BNKh, start_B)
            return layer, layer.attend_window(q_BNHh, k_BNKh, v_BNKh, start_B)
        assert not self.anywhere, "slots are written on their own part of a mesh"
        split = Split.of_cache(self.values_PKTh)
        pages = split.spec(batch=0, heads=1)
        queries = split.spec(batch=0, heads=2)
        of_slot = split.spec(batch=0)

        def local(*inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            q, k, v, keys, values, table_BN, start_B = inputs
            own_BN = split.own(table_BN, len(keys))
            return append_and_attend(q, k, v, keys, values, own_BN, start_B)

        inputs = queries, pages, pages, pages, pages, of_slot, of_slot
        out, keys, values = split.mapped(local, inputs, (queries, pages, pages))(
            q_BNHh,
            k_BNKh[:, 0],
            v_BNKh[:, 0],
            self.keys_PKTh,
            self.values_PKTh,
            self.table_BN,
            start_B,
        )
        return dataclasses.replace(self, keys_PKTh=pin(keys), values_PKTh=pin(values)), out

    def _put_window(self, k_BNKh: jax.Array, v_BNKh: jax.Array, start_B: jax.Array) -> Pages:
        B, N = k_BNKh.shape[:2]
        row_X, position_X = places_of_windows(start_B, N)
        page_X, offset_X = place_of(self.table_BN, row_X, position_X, self.values_PKTh)
        k_XKh, v_XKh = (x.reshape(B * N, *x.shape[2:]) for x in (k_BNKh, v_BNKh))
        keys = put_entries(self.keys_PKTh, k_XKh, page_X, offset_X, key_kind(self.for_cpu))
        values = put_entries(self.values_PKTh, v_XKh, page_X, offset_X, VALUES)
        return dataclasses.replace(self, keys_PKTh=keys, values_PKTh=values)

    def attend_window(
        self, q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array, start_B: jax.Array
    ) -> jax.Array:
        """Attend from N nodes of each slot, written from `start` on, up to themselves."""
        B, N = q_BNHh.shape[:2]
        dtype = self.values_PKTh.dtype
        row_X, position_X = places_of_windows(start_B, N)
        page_X, _ = place_of(self.table_BN, row_X, position_X, self.values_PKTh)
        q_XHh, k_XKh, v_XKh = (x.reshape(B * N, *x.shape[2:]) for x in (q_BNHh, k_BNKh, v_BNKh))
        is_there_B = page_X.reshape(B, N)[:, 0] < len(self.keys_PKTh)

        def portable() -> jax.Array:
            of_prefix = self.of_prefix(q_BNHh, jnp.where(is_there_B, start_B, 0))
            k_BKhN = k_BNKh.transpose(0, 2, 3, 1)
            v_BKNh = v_BNKh.transpose(0, 2, 1, 3)
            causal_BNN = jnp.broadcast_to(causal_mask(N), (B, N, N))
            own = partial_attention(q_BNHh, k_BKhN.astype(dtype), v_BKNh.astype(dtype), causal_BNN)
            return joined(of_prefix, own).astype(dtype).reshape(q_XHh.shape)

        x_X = jnp.arange(B * N, dtype=jnp.int32)
        parent_X = jnp.where(x_X % N == 0, -1, x_X - 1)
        own_X = jnp.where(is_there_B[row_X], row_X, -1)
        after = After(own_X, start_B[row_X], parent_X, width=N)
        out_XHh = self.of_new(q_XHh, k_XKh, v_XKh, after, portable)
        return out_XHh.reshape(q_BNHh.shape)


@struct.dataclass
class PagedStates:
    """The features of all slots; `shape` is [B, 1, S, F], as if each slot had one array."""

    pages_P1TF: jax.Array
    table_BN: jax.Array

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, N = self.table_BN.shape
        _, _, T, F = self.pages_P1TF.shape
        return B, 1, N * T, F

    def windows(self, slot_X: jax.Array, start_X: jax.Array, num_tokens: int) -> jax.Array:
        """Return the features of C positions of slots; arbitrary values without a page."""
        B, _, S, _ = self.shape
        T = self.pages_P1TF.shape[2]
        at_XC = jnp.clip(start_X[:, None] + jnp.arange(num_tokens), 0, S - 1)
        page_XC = self.table_BN[jnp.clip(slot_X, 0, B - 1)[:, None], at_XC // T]
        return self.pages_P1TF[jnp.maximum(page_XC, 0), 0, at_XC % T]


@struct.dataclass
class KVCache:
    """Keys and values `[P, K, T, h]` of every layer, features `[P, 1, T, F]` or none, the table.

    Features are the outputs of `feature_layers`, then the hidden states after the final norm. On
    CPUs (`for_cpu`) keys are `[P, K, h, T]`. With `anywhere`, rows of the table belong to slots of
    any part of a mesh.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...]
    table_BN: Any
    feature_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())
    for_cpu: bool = struct.field(pytree_node=False, default=False)
    anywhere: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_slots(self) -> int:
        return self.table_BN.shape[0]

    @property
    def page_tokens(self) -> int:
        return self.values[0].shape[2]

    @property
    def num_positions(self) -> int:
        """The maximum number of positions of a slot."""
        return self.table_BN.shape[1] * self.page_tokens

    @property
    def states(self) -> PagedStates:
        """The features of all slots; the cache must have features."""
        [pages_P1TF] = self.features
        return PagedStates(pages_P1TF, self.table_BN)

    def layer(self, i: int) -> Pages:
        return Pages(self.keys[i], self.values[i], self.table_BN, self.for_cpu, self.anywhere)

    def with_layers(self, layers: Sequence[Pages], features: tuple[jax.Array, ...]) -> Self:
        keys = tuple(layer.keys_PKTh for layer in layers)
        values = tuple(layer.values_PKTh for layer in layers)
        return dataclasses.replace(self, keys=keys, values=values, features=features)

    def with_features(self, features_BNF: jax.Array, start_B: jax.Array) -> tuple[jax.Array, ...]:
        """Return the features with N new nodes written to each slot from `start` on."""
        B, N, F = features_BNF.shape
        row_X, position_X = places_of_windows(start_B, N)

        def one(pages_P1TF: jax.Array) -> jax.Array:
            page_X, offset_X = place_of(self.table_BN, row_X, position_X, pages_P1TF)
            new_X1F = features_BNF.reshape(B * N, 1, F)
            return put_entries(pages_P1TF, new_X1F, page_X, offset_X, FEATURES)

        return tuple(one(pages_P1TF) for pages_P1TF in self.features)

    def written(self, pending: Pending) -> KVCache:
        """Write the accepted entries to their slots and positions."""
        P = len(pending.order_P)
        if self.for_cpu and P > CPU_WRITES:
            return self._written_in_turn(pending)
        # after the accepted entries, `order_P` has leftovers of earlier rounds
        accepted_P = jnp.where(jnp.arange(P) < pending.count, pending.order_P, P)
        is_accepted_P = jnp.zeros(P, bool).at[accepted_P].set(True, mode="drop")
        row_P = jnp.where(is_accepted_P, pending.row_P, self.num_slots)
        entries = Entries(pending.keys, pending.values, pending.features)
        return self.put(entries, row_P, pending.position_P)

    def _written_in_turn(self, pending: Pending) -> KVCache:
        """Write `CPU_WRITES` accepted entries at a time: a CPU scatter visits dropped entries."""
        N = CPU_WRITES
        last = len(pending.order_P) - 1

        def some(i: jax.Array, cache: KVCache) -> KVCache:
            place_N = i * N + jnp.arange(N)
            entry_N = pending.order_P[jnp.minimum(place_N, last)]
            row_N = jnp.where(place_N < pending.count, pending.row_P[entry_N], cache.num_slots)
            entries = Entries(pending.keys, pending.values, pending.features)
            some_entries = jax.tree.map(lambda x: x[entry_N], entries)
            return cache.put(some_entries, row_N, pending.position_P[entry_N])

        return jax.lax.fori_loop(0, (pending.count + N - 1) // N, some, self)

    def put(self, entries: Entries, row_X: jax.Array, position_X: jax.Array) -> KVCache:
        """Write X entries, `[X, K, h]` and `[X, F]`; drop entries without a page."""
        page_X, offset_X = place_of(self.table_BN, row_X, position_X, self.values[0])

        def write(pages: jax.Array, new: jax.Array, kind: Kind) -> jax.Array:
            new_XKh = new.reshape(len(new), *[pages.shape[d] for d in (1, 5 - kind.axis)])
            return put_entries(pages, new_XKh, page_X, offset_X, kind)

        return map_arrays(write, self, entries)


def key_kind(for_cpu: bool) -> Kind:
    """Return the kind of the keys of a cache."""
    return KEYS if for_cpu else VALUES


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, axes: Any = CACHE_AXES) -> jax.Array:
    return jnp.zeros(shape, dtype)


def init(
    config: ModelConfig,
    num_slots: int,
    slot_pages: int,
    num_pages: int,
    page_tokens: int,
    dtype: Any,
    *,
    for_cpu: bool,
    feature_layers: tuple[int, ...] | None = None,
    zeros: Callable[..., Any] = _zeros,
) -> KVCache:
    """Return a zeroed cache, without features if `feature_layers` is None.

    `zeros(shape, dtype, axes)` makes each array on its devices; `axes` default to `CACHE_AXES`.
    """
    P = num_pages
    K = config.num_kv_heads
    T = page_tokens
    h = config.head_dim
    key_shape = (P, K, h, T) if for_cpu else (P, K, T, h)
    features: tuple[jax.Array, ...] = ()
    if feature_layers is not None:
        width = config.d_model * (len(feature_layers) + 1)
        features = (zeros((P, 1, T, width), dtype, FEATURE_AXES),)
    return KVCache(
        keys=tuple(zeros(key_shape, dtype, CACHE_AXES) for _ in range(config.num_layers)),
        values=tuple(zeros((P, K, T, h), dtype, CACHE_AXES) for _ in range(config.num_layers)),
        features=features,
        table_BN=zeros((num_slots, slot_pages), jnp.int32, (None, None)),
        feature_layers=feature_layers or (),
        for_cpu=for_cpu,
    )


def places_of_windows(start_B: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows and positions of N tokens in each of B rows from `start` on; [B · N]."""
    position_BN = start_B[:, None] + jnp.arange(num_tokens)
    return jnp.repeat(jnp.arange(len(start_B)), num_tokens), position_BN.reshape(-1)


def pinned(cache: KVCache) -> KVCache:
    """Pin all arrays to the sharding of models.layout, as loop results may be on other shards."""
    return map_arrays(pin, cache)


def put_entries(
    pages_PKTh: jax.Array, new_XKh: jax.Array, page_X: jax.Array, offset_X: jax.Array, kind: Kind
) -> jax.Array:
    """Write entries to (page, offset); drop entries with page P."""
    split = Split.of_cache(pages_PKTh)
    pages = split.spec(batch=0, heads=1)
    new = split.spec(heads=1)

    def local(pages: jax.Array, new: jax.Array, page_X: jax.Array, offset_X: jax.Array):  # type: ignore[no-untyped-def]
        return write_entries(pages, new, split.own(page_X, len(pages)), offset_X, kind)

    write = split.mapped(local, (pages, new, PartitionSpec(), PartitionSpec()), pages)
    return pin(write(pages_PKTh, new_XKh, page_X, offset_X), kind)


def map_arrays(one: Callable[..., Any], cache: KVCache, *more: Any) -> KVCache:
    """Map `one(array, *others, kind)` over all arrays of a cache, and of entries or caches."""

    def each(name: str, kind: Kind) -> tuple[Any, ...]:
        columns = zip(*(getattr(c, name) for c in (cache, *more)), strict=True)
        return tuple(one(*arrays, kind) for arrays in columns)

    return dataclasses.replace(
        cache,
        keys=each("keys", key_kind(cache.for_cpu)),
        values=each("values", VALUES),
        features=each("features", FEATURES),
    )
