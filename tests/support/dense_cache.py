"""A cache with one page for each slot: its arrays are `[slot, …]`, as if there were no pages."""

import dataclasses

import jax.numpy as jnp

from reprise.models.attention import kv_cache


def dense_cache(config, num_slots, num_positions, dtype=jnp.float32, **options):
    """Return a zeroed cache of a CPU: keys `[B, K, h, S]`, values `[B, K, S, h]`."""
    cache = kv_cache.init(
        config,
        num_slots=num_slots,
        slot_pages=1,
        num_pages=num_slots,
        page_tokens=num_positions,
        dtype=dtype,
        for_cpu=True,
        **options,
    )
    return dataclasses.replace(cache, table_BN=own_pages(num_slots))


def own_pages(num_slots):
    """Return the table of slots that have one page each: page b belongs to slot b."""
    return jnp.arange(num_slots, dtype=jnp.int32)[:, None]
