"""Plain rounds and rounds that verify eight nodes a slot, against the floor of bandwidth.

    floor = (weights + keys and values of live positions) · bytes of a number / bandwidth

Both kinds begin with the same slots and the same pages of random keys and values. The draft tokens
are those that the plain rounds draw, so that both emit the same tokens (up to rounding).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.sizes import (
    Row,
    Rows,
    Size,
    accelerator,
    in_turns,
    num_weights,
    random_weights,
    summary,
    timed,
)
from benchmarks.rounds import NO_STOP_E, busy
from models.paged_cache import PagedCache
from rl.engine.config import EngineConfig
from rl.engine.engine import Engine
from spec.drafter import no_drafts
from spec.drawn import by_slot, unpack
from spec.nodes import pack
from spec.verify import Slots, decode_rounds, verify_round


class Bench:
    """A policy's pages, as long as the longest slots, and both kinds of rounds on them."""

    def __init__(self, size: Size) -> None:
        self.size, B, N = size, size.slots, size.node_count
        config = EngineConfig(
            slots=B,
            min_slots=B,
            max_nodes=N,
            rounds_per_fetch=N,
            cache="pages",
            page_tokens=size.page_tokens,
        )
        self.engine = Engine(size.model, config, dtype=size.dtype)
        self.engine.expect(B, max(size.live_positions) + N + 1)
        [positions] = self.engine.round_positions(B)
        self.params = random_weights(size.model, size.dtype)
        cache = self.engine.full_cache(B, positions)
        assert isinstance(cache, PagedCache)
        self.state: list[Any] = [_filled(cache), self.engine.empty_pending(B)]
        self.nodes_5M = np.zeros((5, 0), np.int32)

    def slots(self, live: int) -> Slots:
        """Return the slots that rounds begin with, which is not a part of their seconds."""
        return jax.block_until_ready(busy(self.size.slots, 2 * live))

    def seconds(self, run: Callable[[Slots], Any], live: int) -> float:
        """Return the seconds of `plain` or `verify`."""
        slots = self.slots(live)
        return timed(lambda: run(slots))

    def plain(self, slots: Slots) -> np.ndarray:
        """Run a fetch's rounds without drafts; returns the tokens, [B, rounds]."""
        N, options = np.int32(self.size.node_count), self.engine.decode_options("cdf")
        *self.state, _, found = decode_rounds(
            self.params, *self.state, slots, NO_STOP_E, N, np.int32(self.size.slots), **options
        )
        return unpack(found)[0].T

    def draft(self, tokens_BN: np.ndarray) -> None:
        """Give the rounds to verify chains of these tokens, all but the last."""
        B, N = tokens_BN.shape
        drafts = no_drafts(B, N - 1)
        drafts.tokens_AN[:] = tokens_BN[:, :-1]
        drafts.parents_AN[:] = np.arange(-1, N - 2)
        drafts.count_A[:] = N - 1
        self.nodes_5M = pack(drafts, drafts.count_A, np.arange(B), B, B * N, N)

    def verify(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        """Run a round that verifies; returns the tokens, [B, N], and how many each slot got."""
        B, M = self.size.slots, self.nodes_5M.shape[1]
        *self.state, _, found, _ = verify_round(
            self.params,
            *self.state,
            slots,
            self.nodes_5M,
            NO_STOP_E,
            None,
            **self.engine.verify_options("cdf", B, M),
        )
        tokens_BN, _, count_B, _ = by_slot(*unpack(found), self.nodes_5M[1], B)
        return tokens_BN, count_B


def _filled(cache: PagedCache) -> PagedCache:
    """Fill all pages with the same random numbers: zeros would be faster than what is real."""

    def one(x: jax.Array, seed: int) -> jax.Array:
        return _repeat(jax.random.normal(jax.random.key(seed), x.shape[1:], x.dtype), x)

    keys = tuple(one(x, 2 * i) for i, x in enumerate(cache.keys))
    values = tuple(one(x, 2 * i + 1) for i, x in enumerate(cache.values))
    return PagedCache(keys, values, cache.features, cache.table_BN, cache.feature_layers)


def _broadcast(page: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.broadcast_to(page, pages.shape)


# without `keep_unused` the pages would not be donated: there is no room for them twice
_repeat = jax.jit(_broadcast, donate_argnums=1, keep_unused=True)


def floor_s(size: Size, live: int) -> float | None:
    """Return the seconds in which the device reads weights, keys and values once."""
    device = accelerator()
    return None if device is None else num_bytes(size, live) / device.bytes_per_s


def num_bytes(size: Size, live: int) -> int:
    """Return the bytes of the weights, and of keys and values of all live positions."""
    model = size.model
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size.slots * live
    return (num_weights(model) + kv) * size.itemsize


def rows(size: Size) -> Rows:
    device_bytes = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    for live in size.live_positions:
        if (needed := 1.05 * num_bytes(size, live)) > device_bytes:  # pages are whole
            why = f"expected {needed / 1e9:.0f} GB, got {device_bytes / 1e9:.0f} GB of the device"
            yield {"live_positions": live, "not_run": f"{why}; mend: a device with more memory"}
            size = dataclasses.replace(
                size, live_positions=tuple(n for n in size.live_positions if n != live)
            )
    if not size.live_positions:
        return
    bench = Bench(size)
    for live in size.live_positions:
        tokens_BN = bench.plain(bench.slots(live))
        bench.draft(tokens_BN)
        yield from _measured(bench, live, tokens_BN)


def _measured(bench: Bench, live: int, plain_BN: np.ndarray) -> Rows:
    size = bench.size
    verified_BN, count_B = bench.verify(bench.slots(live))
    N = size.node_count
    padded_BN = np.pad(verified_BN, ((0, 0), (0, N - verified_BN.shape[1])))
    emitted_BN = np.arange(N) < count_B[:, None]
    # behind the first token that differs nothing is emitted
    differ = int(((padded_BN != plain_BN) & emitted_BN).sum())
    kinds = {
        "plain": lambda: bench.seconds(bench.plain, live) / N,  # a round of one fetch's
        "verify": lambda: bench.seconds(bench.verify, live),
    }
    seconds, floor = in_turns(kinds, size.repeats), floor_s(size, live)
    for name, taken_T in seconds.items():
        row: Row = {"round": name, "slots": size.slots, "live_positions": live}
        row["nodes"] = size.slots * (N if name == "verify" else 1)
        row |= summary(taken_T, seconds["plain"], "to_plain")
        row["floor_ms"] = None if floor is None else round(1e3 * floor, 4)
        row["to_floor"] = None if floor is None else round(float(np.median(taken_T)) / floor, 3)
        row["tokens"] = int(count_B.sum()) if name == "verify" else plain_BN.size
        if name == "verify":
            row["tokens_that_differ"] = differ
        yield row
