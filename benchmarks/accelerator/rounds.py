"""Plain rounds and rounds that verify 2, 4 and 8 nodes a slot, against weights and pages read once.

    floor = (weights + keys and values of live positions) · bytes of a number / bandwidth

Draft tokens are those of the plain rounds, so that both emit the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.budget import Figures, Log, NotRun
from benchmarks.accelerator.sizes import (
    Size,
    accelerator,
    num_weights,
    random_weights,
    summary,
    to_floor,
    turns_of,
)
from benchmarks.rounds import Rounds, busy
from reprise.models.attention.kv_cache import KVCache
from reprise.rl.engine.engine import Engine
from reprise.spec.drafter import no_drafts


def paged_rounds(size: Size, live: int) -> Rounds:
    """Return rounds on pages of random keys and values, as many of a fetch as a slot has nodes."""
    config = dataclasses.replace(size.engine_config, rounds_per_fetch=size.node_count)
    engine = Engine(size.model, config, dtype=size.dtype)
    bench = Rounds(engine, random_weights(size.model, size.dtype), live)
    bench.state[0] = filled(bench.state[0])
    return bench


def chains(bench: Rounds, plain_BN: np.ndarray, node_count: int) -> np.ndarray:
    """Return the nodes [5, M] of a round that drafts the tokens of plain rounds."""
    B = len(plain_BN)
    drafts = no_drafts(B, node_count - 1)
    drafts.tokens_AN[:] = plain_BN[:, : node_count - 1]
    drafts.parents_AN[:] = np.arange(-1, node_count - 2)
    drafts.count_A[:] = node_count - 1
    return bench.pack(drafts, B * node_count)


def filled(cache: KVCache) -> KVCache:
    """Fill all pages in place with random numbers: zeros would be faster than real values."""

    def fill(pages: tuple[jax.Array, ...], seed: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), len(pages))
        return tuple(
            _repeat(jax.random.normal(k, x.shape[1:], x.dtype), x)
            for k, x in zip(keys, pages, strict=True)
        )

    return dataclasses.replace(cache, keys=fill(cache.keys, 0), values=fill(cache.values, 1))


def _broadcast(page: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.broadcast_to(page, pages.shape)


# Without `keep_unused` the pages would not be donated: they do not fit twice.
_repeat = jax.jit(_broadcast, donate_argnums=1, keep_unused=True)


def rounds(size: Size, live: int, log: Log) -> Iterator[Figures]:
    """Yield plain rounds, then each size of verifying rounds in turns with them."""
    device, model, B = accelerator(), size.model, size.slots
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * B * live
    num_bytes = (num_weights(model) + kv) * jnp.dtype(size.dtype).itemsize
    floor_s = num_bytes / device.bytes_per_s if device else None
    log.phase("fill pages")
    bench = paged_rounds(size, live)

    def plain() -> float:
        return bench.seconds(bench.plain) / size.node_count

    shape: Figures = {"slots": B, "live_positions": live}
    seconds_T = turns_of(log, {"plain": plain}, size.repeats)["plain"]
    plain_BN = bench.plain(busy(B, live))
    figures = {"round": "plain", **shape, "nodes": B, **summary(seconds_T)}
    yield figures | to_floor(seconds_T, floor_s) | {"tokens": plain_BN.size}
    for node_count in size.node_counts:
        nodes_5M = chains(bench, plain_BN, node_count)
        is_chains = bench.engine.has_chains(B, nodes_5M.shape[1])
        verify = partial(bench.verify, nodes_5M=nodes_5M, chains=is_chains)
        kinds = {"plain": plain, "verify": partial(bench.seconds, verify)}
        seconds = turns_of(log, kinds, size.repeats)
        verified_BN, count_B = verify(busy(B, live))
        emitted_BN = np.arange(verified_BN.shape[1]) < count_B[:, None]
        differ = (verified_BN != plain_BN[:, : verified_BN.shape[1]]) & emitted_BN
        yield {
            "round": "verify",
            **shape,
            "nodes": B * node_count,
            **summary(seconds["verify"], seconds["plain"], "to_plain"),
            **to_floor(seconds["verify"], floor_s),
            "tokens": int(count_B.sum()),
            "tokens_that_differ": int(differ.sum()),
        }


def in_command_buffers(size: Size, live: int, log: Log) -> Iterator[Figures]:
    """Yield the same figures from a process whose XLA keeps loops in command buffers."""
    if jax.default_backend() not in ("gpu", "cpu"):  # a rehearsal passes on CPUs
        raise NotRun(f"command buffers are those of GPUs, and this is a {jax.default_backend()}")
    yield from rounds(size, live, log)
