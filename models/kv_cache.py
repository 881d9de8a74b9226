"""The key/value cache, with one buffer per layer; values are `[slot, kv_head, position, head_dim]`.

Keys are transposed, `[slot, kv_head, head_dim, position]`, so that both products of attention read
the cache along its rows. For a drafter, `features` keeps the hidden states of the policy in one
array `[slot, 1, position, width]`. `length_B` (kept by the engine) is the number of live positions
of a row; later positions are masked. Writes are in place if the buffers are donated.

Shape suffixes: B slots, S positions, N tree nodes, L layers, D model width, K key/value heads,
h head size, W feature width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from reprise.models.attention import After, PartialSoftmax, Portable, attend, partial_attention
from reprise.models.cached_attention import attend_in_order
from reprise.models.config import ModelConfig
from reprise.models.layout import CACHE_AXES, ENTRY_AXES, FEATURE_AXES
from reprise.models.sharding import constrain

KEY_AXIS, VALUE_AXIS = 3, 2  # axis of positions in keys, and in values and features
CPU_WRITES = 16  # entries per write on a CPU


class Kind(NamedTuple):
    """The position axis of a cache array, and its logical axes (models.layout)."""

    axis: int
    axes: tuple[str | None, ...]


KEYS, VALUES = Kind(KEY_AXIS, CACHE_AXES), Kind(VALUE_AXIS, CACHE_AXES)
FEATURES = Kind(VALUE_AXIS, FEATURE_AXES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One layer of a `KVCache` (a `models.attention.CachedLayer`)."""

    keys_BKhS: jax.Array
    values_BKSh: jax.Array

    def of_prefix(self, q_BWHh: jax.Array, length_B: jax.Array) -> PartialSoftmax:
        """Attend from W nodes of each row to the first `length` positions of the row."""
        committed_BS = jnp.arange(self.keys_BKhS.shape[-1]) < length_B[:, None]
        size = *q_BWHh.shape[:2], committed_BS.shape[1]
        mask_BWS = jnp.broadcast_to(committed_BS[:, None], size)
        return partial_attention(q_BWHh, self.keys_BKhS, self.values_BKSh, mask_BWS)

    def of_chunks(
        self, q_TCHh: jax.Array, slot_T: jax.Array, length_T: jax.Array
    ) -> PartialSoftmax:
        """Attend from each of T chunks of C tokens to the first `length` positions of its slot.

        Reads copies of these rows, cut to the fewest eighths of all positions that suffice.
        """
        num_positions = self.keys_BKhS.shape[-1]
        sizes = sorted({-(-num_positions * eighths // 8) for eighths in (2, 3, 4, 5, 6, 8)})

        def of_first(size: int) -> PartialSoftmax:
            keys, values = self.keys_BKhS[..., :size], self.values_BKSh[:, :, :size]
            rows = Rows(*(jnp.take(x, slot_T, axis=0) for x in (keys, values)))
            return rows.of_prefix(q_TCHh, length_T)

        which = jnp.sum(jnp.max(length_T) > jnp.array(sizes[:-1]))
        return jax.lax.switch(which, [partial(of_first, size) for size in sizes])

    def of_new(
        self, q_XHh: jax.Array, k_XKh: jax.Array, v_XKh: jax.Array, after: After, portable: Portable
    ) -> jax.Array:
        """Attend from X tokens to all positions up to themselves; `portable` if no kernel does."""
        return attend_in_order(
            (q_XHh, k_XKh, v_XKh), (self.keys_BKhS, self.values_BKSh), after, portable
        )

    def append_and_attend(
        self, q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array, start_B: jax.Array
    ) -> tuple[Rows, jax.Array]:
        """Write N entries of each row from `start` on; attend from each node up to itself."""
        (B, N), S = q_BNHh.shape[:2], self.keys_BKhS.shape[-1]
        keys = pin(write_keys(self.keys_BKhS, k_BNKh, start_B))
        values = pin(write_values(self.values_BKSh, v_BNKh, start_B))
        x_X = jnp.arange(B * N, dtype=jnp.int32)
        row_X = jnp.where((start_B + N <= S)[x_X // N], x_X // N, -1)
        parent_X = jnp.where(x_X % N == 0, -1, x_X - 1)
        after = After(row_X, start_B[x_X // N], parent_X)

        def portable() -> jax.Array:
            mask_BNS = jnp.arange(S) <= (start_B[:, None] + jnp.arange(N))[..., None]
            return attend(q_BNHh, keys, values, mask_BNS).reshape(B * N, *q_BNHh.shape[2:])

        written = Rows(keys, values)
        new = q_BNHh, k_BNKh, v_BNKh
        q_XHh, k_XKh, v_XKh = (x.reshape(B * N, *x.shape[2:]) for x in new)
        out_XHh = written.of_new(q_XHh, k_XKh, v_XKh, after, portable)
        return written, out_XHh.reshape(q_BNHh.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys `[B, K, h, S]`, values `[B, K, S, h]` of every layer; features `[B, 1, S, W]` or none.

    Features are the outputs of `feature_layers`, then the hidden states after the final norm.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...] = ()
    feature_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def num_positions(self) -> int:
        return self.values[0].shape[2]

    @property
    def states(self) -> Any:
        """The features of all rows, for `state_windows`; the cache must have features."""
        [features_B1SW] = self.features
        return features_B1SW

    def layer(self, i: int) -> Rows:
        return Rows(self.keys[i], self.values[i])

    def with_layers(self, layers: Sequence[Rows], features: tuple[jax.Array, ...]) -> Self:
        keys = tuple(layer.keys_BKhS for layer in layers)
        values = tuple(layer.values_BKSh for layer in layers)
        return dataclasses.replace(self, keys=keys, values=values, features=features)

    def with_features(self, features_BNW: jax.Array, start_B: jax.Array) -> tuple[jax.Array, ...]:
        """Return the features with N new nodes written to each row from `start` on."""
        new = features_BNW[:, :, None]
        return tuple(pin(write_values(rows, new, start_B), FEATURES) for rows in self.features)

    def written(self, pending: Pending) -> Self:
        """Write the accepted entries to their rows and positions."""
        few = partial(_write_entries, num_at_once=CPU_WRITES)
        return jax.lax.platform_dependent(self, pending, cpu=few, default=_write_entries)


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, axes: Any = CACHE_AXES) -> jax.Array:
    return jnp.zeros(shape, dtype)


def init(
    config: ModelConfig,
    num_slots: int,
    num_positions: int,
    dtype: jnp.dtype,
    feature_layers: tuple[int, ...] | None = None,
    zeros: Callable[..., Any] = _zeros,
) -> KVCache:
    """Return a zeroed cache, without features if `feature_layers` is None.

    `zeros(shape, dtype, axes)` makes each array on its devices; `axes` default to `CACHE_AXES`.
    """
    B, K, S, h = num_slots, config.num_kv_heads, num_positions, config.head_dim
    features: tuple[jax.Array, ...] = ()
    if feature_layers is not None:
        width = config.d_model * (len(feature_layers) + 1)
        features = (zeros((B, 1, S, width), dtype, FEATURE_AXES),)
    return KVCache(
        keys=tuple(zeros((B, K, h, S), dtype) for _ in range(config.num_layers)),
        values=tuple(zeros((B, K, S, h), dtype) for _ in range(config.num_layers)),
        features=features,
        feature_layers=feature_layers or (),
    )


def map_arrays(
    one: Callable[..., Any], cache: Any, *more: Any, keys: Kind = KEYS, values: Kind = VALUES
) -> Any:
    """Map `one(array, *other_arrays, kind)` over all arrays of caches."""

    def each(name: str, kind: Kind) -> tuple[Any, ...]:
        columns = zip(*(getattr(c, name) for c in (cache, *more)), strict=True)
        return tuple(one(*arrays, kind) for arrays in columns)

    kinds = {"keys": keys, "values": values, "features": FEATURES}
    return dataclasses.replace(cache, **{name: each(name, kind) for name, kind in kinds.items()})


def pin(rows: jax.Array, kind: Kind = VALUES) -> jax.Array:
    """Pin keys or values of a layer, or features, to the sharding of models.layout."""
    return constrain(rows, *kind.axes)


def state_windows(states: Any, slot_P: jax.Array, start_P: jax.Array, num_tokens: int) -> jax.Array:
    """Return the features of C positions per slot from `start` on, in rows or pages; [P, C, W]."""
    if not isinstance(states, jax.Array):
        return states.windows(slot_P, start_P, num_tokens)

    def cut(slot: jax.Array, start: jax.Array) -> jax.Array:
        size = 1, 1, num_tokens, states.shape[3]
        return jax.lax.dynamic_slice(states, (slot, 0, start, 0), size)[0, 0]

    return jax.vmap(cut)(slot_P, start_P)


def write_keys(keys_BKhS: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write N new keys at `start … start+N−1` of each row; drop windows that do not fit."""
    return _write(keys_BKhS, new_BNKh.transpose(0, 2, 3, 1), start_B, KEY_AXIS)


def write_values(values_BKSh: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write N new values to each row as `write_keys` does."""
    return _write(values_BKSh, new_BNKh.transpose(0, 2, 1, 3), start_B, VALUE_AXIS)


def _write(rows: jax.Array, new: jax.Array, start_B: jax.Array, axis: int) -> jax.Array:
    """Write one window per row along `axis`; drop a window that exceeds its row."""
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 1, 2),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(axis - 1,),
    )

    def one(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.scatter(
            row, start[None], new, dims, mode=jax.lax.GatherScatterMode.FILL_OR_DROP
        )

    return jax.vmap(one)(rows, new.astype(rows.dtype), start_B)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """Entries that one round computes and the next round writes in place before it reads.

    Keys and values of every layer are `[P, K, h]`, features `[P, W]` or none. Entry i belongs to
    `position_P[i]` of row `row_P[i]`; only entries `order_P[:count]` are written.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...]
    row_P: jax.Array
    position_P: jax.Array
    order_P: jax.Array
    count: jax.Array

    def replaced(
        self, entries: Entries, row_M: jax.Array, position_M: jax.Array, accepted_M: jax.Array
    ) -> Pending:
        """Return the M ≤ P entries of a new round; only `accepted_M` will be written."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            new = constrain(new.astype(old.dtype), *ENTRY_AXES[: old.ndim])
            return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)

        return Pending(
            jax.tree.map(put, self.keys, entries.keys),
            jax.tree.map(put, self.values, entries.values),
            jax.tree.map(put, self.features, entries.features),
            put(self.row_P, row_M),
            put(self.position_P, position_M),
            put(self.order_P, jnp.argsort(~accepted_M)),
            jnp.sum(accepted_M, dtype=jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Keys and values of M nodes in every layer, `[M, K, h]`, and features `[M, W]` or none."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    features: tuple[jax.Array, ...] = ()

    def take(self, part: slice, dtype: Any) -> Entries:
        """Return a part of the entries, in the dtype and sharding of a cache."""

        def some(x: jax.Array) -> jax.Array:
            return constrain(x[part].astype(dtype), *ENTRY_AXES[: x.ndim])

        return jax.tree.map(some, self)


def no_pending(
    config: ModelConfig,
    num_entries: int,
    dtype: jnp.dtype,
    feature_layers: tuple[int, ...] | None = None,
    zeros: Callable[..., Any] = jnp.zeros,
) -> Pending:
    """Return P entries with a count of 0; `zeros` as in `init`."""
    P, K, h = num_entries, config.num_kv_heads, config.head_dim
    features: tuple[jax.Array, ...] = ()
    if feature_layers is not None:
        features = (zeros((P, config.d_model * (len(feature_layers) + 1)), dtype),)
    keys, values = (
        tuple(zeros((P, K, h), dtype) for _ in range(config.num_layers)) for _ in range(2)
    )
    row_P, position_P, order_P = (zeros((P,), jnp.int32) for _ in range(3))
    count = zeros((), jnp.int32)
    return Pending(keys, values, features, row_P, position_P, order_P, count)


def _write_entries(cache: KVCache, pending: Pending, num_at_once: int | None = None) -> KVCache:
    """Write entries, on CPUs `num_at_once` per scatter, which visits dropped entries too."""
    P = len(pending.order_P)
    N = min(num_at_once or P, P)

    def some(i: jax.Array, cache: KVCache) -> KVCache:
        place_N = i * N + jnp.arange(N)
        entry_N = pending.order_P[jnp.minimum(place_N, P - 1)]
        row_N = jnp.where(place_N < pending.count, pending.row_P[entry_N], cache.num_slots)
        position_N = pending.position_P[entry_N]

        def key(rows_BKhS: jax.Array, new_PKh: jax.Array) -> jax.Array:
            at = rows_BKhS.at[row_N, :, :, position_N]
            return pin(at.set(new_PKh[entry_N], mode="drop"))

        def value(rows_BKSh: jax.Array, new_PKh: jax.Array, kind: Kind = VALUES) -> jax.Array:
            new_NKh = new_PKh[entry_N].reshape(N, -1, rows_BKSh.shape[-1])
            return pin(rows_BKSh.at[row_N, :, position_N].set(new_NKh, mode="drop"), kind)

        return KVCache(
            jax.tree.map(key, cache.keys, pending.keys),
            jax.tree.map(value, cache.values, pending.values),
            jax.tree.map(partial(value, kind=FEATURES), cache.features, pending.features),
            cache.feature_layers,
        )

    if N == P:
        return some(jnp.int32(0), cache)
    return jax.lax.fori_loop(0, (pending.count + N - 1) // N, some, cache)


@partial(jax.jit, static_argnames=("num_positions", "kind"))
def resize_layer(rows: jax.Array, row_B: jax.Array, *, num_positions: int, kind: Kind) -> jax.Array:
    """Return one array with rows `row_B`, cut or padded to `num_positions`."""
    rows, axis = jnp.take(rows, row_B, axis=0, mode="clip"), kind.axis
    size = rows.shape[axis]
    if size >= num_positions:
        return pin(jax.lax.slice_in_dim(rows, 0, num_positions, axis=axis), kind)
    widths = [(0, 0)] * 4
    widths[axis] = (0, num_positions - size)
    return pin(jnp.pad(rows, widths), kind)


def resize(cache: KVCache, row_B: jax.Array, num_positions: int) -> KVCache:
    """Return a cache with row `row_B[b]` as row b, cut or padded to `num_positions`.

    Each buffer of `cache` is deleted once copied, so two whole caches never exist.
    """

    def one(rows: jax.Array, kind: Kind) -> jax.Array:
        new = resize_layer(rows, row_B, num_positions=num_positions, kind=kind)
        rows.delete()
        return new

    return map_arrays(one, cache)
