"""The key/value cache: one buffer per layer, values `[slot, kv_head, position, head_dim]`.

Keys are kept transposed, `[slot, kv_head, head_dim, position]`: both products of
attention then read the cache along its rows (q·K and w·V need no transposed operand).

For a drafter that reads them, the policy's hidden states are kept by position too: `features`,
one array `[slot, 1, position, width]`, so that whatever moves rows moves them along.

Rows are independent. `length_B` (kept by the engine) is the number of live positions of a row;
those after it are dead and masked. Writes are in place when the buffers are donated.

Shape suffixes: B slots, S positions, N tree nodes, L layers, D model width, K key/value heads,
h head size, W feature width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.layout import CACHE_AXES
from models.sharding import constrain

KEY_AXIS, VALUE_AXIS = 3, 2  # where positions lie in a layer's keys, and in values and features


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


def init(
    config: ModelConfig,
    num_slots: int,
    num_positions: int,
    dtype: jnp.dtype,
    feature_layers: tuple[int, ...] | None = None,
    zeros: Callable[..., Any] = jnp.zeros,
) -> KVCache:
    """Return a zeroed cache; with `feature_layers` None it keeps no features.

    `zeros(shape, dtype)` makes each array, on the devices that are to hold it.
    """
    B, K, S, h = num_slots, config.num_kv_heads, num_positions, config.head_dim
    features: tuple[jax.Array, ...] = ()
    if feature_layers is not None:
        width = config.d_model * (len(feature_layers) + 1)
        features = (zeros((B, 1, S, width), dtype),)
    return KVCache(
        keys=tuple(zeros((B, K, h, S), dtype) for _ in range(config.num_layers)),
        values=tuple(zeros((B, K, S, h), dtype) for _ in range(config.num_layers)),
        features=features,
        feature_layers=feature_layers or (),
    )


def map_arrays(one: Callable[..., Any], cache: KVCache, *more: KVCache) -> KVCache:
    """Map `one(array, *arrays of the others, axis)` over all arrays; `axis` is of positions."""

    def each(name: str, axis: int) -> tuple[Any, ...]:
        columns = zip(*(getattr(c, name) for c in (cache, *more)), strict=True)
        return tuple(one(*arrays, axis) for arrays in columns)

    return KVCache(
        each("keys", KEY_AXIS),
        each("values", VALUE_AXIS),
        each("features", VALUE_AXIS),
        cache.feature_layers,
    )


def pin(rows: jax.Array) -> jax.Array:
    """Pin a layer's keys, values or features to the sharding of models.layout."""
    return constrain(rows, *CACHE_AXES)


def write_keys(keys_BKhS: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write N new keys at `start … start+N−1` of each row; drop those of rows they do not fit."""
    return _write(keys_BKhS, new_BNKh.transpose(0, 2, 3, 1), start_B, KEY_AXIS)


def write_values(values_BKSh: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write N new values at `start … start+N−1` of each row; drop those of rows they do not fit."""
    return _write(values_BKSh, new_BNKh.transpose(0, 2, 1, 3), start_B, VALUE_AXIS)


def _write(rows: jax.Array, new: jax.Array, start_B: jax.Array, axis: int) -> jax.Array:
    """Write one window per row along `axis`; drop a window that does not lie inside its row.

    (`dynamic_update_slice` would shift it.) So rows at rest, whose start is their end, stay as
    they are.
    """
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


def compact(cache: KVCache, start_B: jax.Array, path_BN: jax.Array) -> KVCache:
    """Move entry `start + path[j]` to `start + j` for every j < N.

    `path_BN` lists the accepted nodes of a tree whose entries were written at `start_B`; entries
    beyond their count are dead after the move. Rows whose entries did not fit stay as they are.
    """
    N = path_BN.shape[1]

    def move(rows: jax.Array, axis: int) -> jax.Array:
        def moved(row: jax.Array, start: jax.Array, path_N: jax.Array) -> jax.Array:
            window = jax.lax.dynamic_slice_in_dim(row, start, N, axis - 1)
            return jnp.take(window, path_N, axis - 1, mode="clip")

        return pin(_write(rows, jax.vmap(moved)(rows, start_B, path_BN), start_B, axis))

    return map_arrays(move, cache)
