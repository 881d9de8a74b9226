"""The key/value cache: one buffer per layer, values `[slot, kv_head, position, head_dim]`.

Keys are kept transposed, `[slot, kv_head, head_dim, position]`: both products of
attention then read the cache along its rows (q·K and w·V need no transposed operand).

Rows are independent. `length_B` (kept by the engine) says how many positions of
a row are live; what lies behind is dead and masked. Writes are in place when the
buffers are donated.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.sharding import constrain

AXES = ("batch", "kv_heads", None, None)  # of keys and values alike
KEY_AXIS, VALUE_AXIS = 3, 2  # where positions lie in a layer's keys and values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys `[B, K, h, S]` and values `[B, K, S, h]` of every layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def num_positions(self) -> int:
        return self.values[0].shape[2]


def init(config: ModelConfig, num_slots: int, num_positions: int, dtype: jnp.dtype) -> KVCache:
    """A zeroed cache of `num_slots` rows of `num_positions`."""
    B, K, S, h = num_slots, config.num_kv_heads, num_positions, config.head_dim
    return KVCache(
        keys=tuple(jnp.zeros((B, K, h, S), dtype) for _ in range(config.num_layers)),
        values=tuple(jnp.zeros((B, K, S, h), dtype) for _ in range(config.num_layers)),
    )


def bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Cache bytes of one token: 2 · layers · kv_heads · head_dim · itemsize."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def pin(rows: jax.Array) -> jax.Array:
    """Keep a layer's keys or values on the shards that the table gives them."""
    return constrain(rows, *AXES)


def write_keys(keys_BKhS: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Put N new keys at positions `start … start+N−1` of each row; needs start+N <= S."""
    new_BKhN = new_BNKh.transpose(0, 2, 3, 1).astype(keys_BKhS.dtype)
    return jax.vmap(lambda row, new, s: jax.lax.dynamic_update_slice(row, new, (0, 0, s)))(
        keys_BKhS, new_BKhN, start_B
    )


def write_values(values_BKSh: jax.Array, new_BNKh: jax.Array, start_B: jax.Array) -> jax.Array:
    """Put N new values at positions `start … start+N−1` of each row; needs start+N <= S."""
    new_BKNh = new_BNKh.transpose(0, 2, 1, 3).astype(values_BKSh.dtype)
    return jax.vmap(lambda row, new, s: jax.lax.dynamic_update_slice(row, new, (0, s, 0)))(
        values_BKSh, new_BKNh, start_B
    )


def compact(cache: KVCache, start_B: jax.Array, path_BN: jax.Array) -> KVCache:
    """Move entry `start + path[j]` to `start + j` for every j < N.

    `path` lists the accepted nodes of a tree whose entries were written at
    `start`; what it holds beyond their count is dead after the move.
    """
    N = path_BN.shape[1]

    def keys(row_KhS: jax.Array, start: jax.Array, path_N: jax.Array) -> jax.Array:
        K, h, _ = row_KhS.shape
        window = jax.lax.dynamic_slice(row_KhS, (0, 0, start), (K, h, N))
        return jax.lax.dynamic_update_slice(row_KhS, window[:, :, path_N], (0, 0, start))

    def values(row_KSh: jax.Array, start: jax.Array, path_N: jax.Array) -> jax.Array:
        K, _, h = row_KSh.shape
        window = jax.lax.dynamic_slice(row_KSh, (0, start, 0), (K, N, h))
        return jax.lax.dynamic_update_slice(row_KSh, window[:, path_N], (0, start, 0))

    return KVCache(
        tuple(pin(jax.vmap(keys)(k, start_B, path_BN)) for k in cache.keys),
        tuple(pin(jax.vmap(values)(v, start_B, path_BN)) for v in cache.values),
    )


@partial(jax.jit, static_argnames=("num_positions", "axis"))
def resize_layer(rows: jax.Array, row_B: jax.Array, *, num_positions: int, axis: int) -> jax.Array:
    """A layer's keys or values with rows `row_B`, cut or padded to `num_positions` along `axis`."""
    rows = jnp.take(rows, row_B, axis=0, mode="clip")
    size = rows.shape[axis]
    if size >= num_positions:
        return pin(jax.lax.slice_in_dim(rows, 0, num_positions, axis=axis))
    widths = [(0, 0)] * 4
    widths[axis] = (0, num_positions - size)
    return pin(jnp.pad(rows, widths))


def resize(cache: KVCache, row_B: jax.Array, num_positions: int) -> KVCache:
    """The cache whose row b is row `row_B[b]`, cut or padded to `num_positions`.

    Consumes `cache`: each of its buffers is deleted once it is copied, so that there are
    never two whole caches.
    """

    def one(rows: jax.Array, axis: int) -> jax.Array:
        new = resize_layer(rows, row_B, num_positions=num_positions, axis=axis)
        rows.delete()
        return new

    return KVCache(
        tuple(one(k, KEY_AXIS) for k in cache.keys),
        tuple(one(v, VALUE_AXIS) for v in cache.values),
    )
