"""Rows of a cache moved to another bucket: chosen, cut or padded, one array after the other."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from models.kv_cache import Kind, KVCache, map_arrays, pin


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
    """Return the cache whose row b is row `row_B[b]`, cut or padded to `num_positions`.

    Each buffer of `cache` is deleted once it is copied: two whole caches never exist.
    """

    def one(rows: jax.Array, kind: Kind) -> jax.Array:
        new = resize_layer(rows, row_B, num_positions=num_positions, kind=kind)
        rows.delete()
        return new

    return map_arrays(one, cache)
