"""Seconds of rounds with draft tokens against plain ones: `python -m benchmarks.rounds --json`.

Random weights of a small shape, all slots busy, half of the positions live. For each number of
nodes the draft tokens are spread evenly over the slots, and in another row over half of them. Kinds
of rounds take turns; ratios are taken turn by turn, and their medians count. A plain round is one
of eight between two fetches, as the engine runs them; a round with draft tokens includes packing,
call and fetch, but no drafting. Rows of `products` are the products with the weights alone, without
attention: a bound of any round of so many nodes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.baselines.reprise import model_config
from benchmarks.shape import Shape
from benchmarks.turns import in_turns
from models import kv_cache, transformer
from models.config import ModelConfig
from models.rope import rope_turns
from spec import sampling
from spec.buckets import widest_tree
from spec.drafter import Drafts, no_drafts
from spec.drawn import by_slot, unpack
from spec.nodes import pack
from spec.verify import Slots, decode_rounds, verify_round

ROUNDS = 8  # of a call of plain ones
MAX_NODES = 32  # of a slot
NO_STOP_E = np.full(1, -1, np.int32)


def draft(counts: np.ndarray, vocab_size: int) -> Drafts:
    """Return random trees with these draft tokens; a token's parent is one of the three before."""
    rng = np.random.default_rng(0)
    found = no_drafts(len(counts), max(int(counts.max()), 1))
    for a, n in enumerate(counts):
        found.tokens_AN[a, :n] = rng.integers(0, vocab_size, n)
        found.parents_AN[a, :n] = [int(rng.integers(max(i - 3, -1), i)) for i in range(n)]
        found.count_A[a] = n
    return found


def busy(num_slots: int, num_positions: int) -> Slots:
    """Return slots on the device that all run, with half of the positions live."""
    one_B = jnp.ones(num_slots, jnp.int32)
    slots = Slots(
        last_token=one_B,
        length=one_B * (num_positions // 2),
        emitted=one_B * 0,
        limit=one_B * 10**6,
        active=one_B > 0,
        keys=sampling.request_keys(sampling.step_key(0, 0), jnp.arange(num_slots)),
        processing=sampling.Processing(one_B * 1.0, one_B * 0, one_B * 1.0),
    )
    return jax.block_until_ready(slots)


@partial(jax.jit, static_argnames="config")
def products(config: ModelConfig, params: transformer.Params, x_M1D: jax.Array) -> jax.Array:
    """Apply all layers without attention, and the head, to M rows."""
    rope = rope_turns(config, jnp.zeros(x_M1D.shape[:2], jnp.int32))
    for layer in params.layers:
        x_M1D = transformer.block(config, layer, x_M1D, rope, lambda q, k, v: q)
    return transformer.head(params, x_M1D[:, 0])


class Rounds:
    """Rounds of one number of slots and positions; each kind has a cache of its own."""

    def __init__(self, shape: Shape, num_slots: int, max_nodes: int) -> None:
        self.model, self.shape = model_config(shape), shape
        self.num_slots, self.max_nodes = num_slots, max_nodes
        self.params = transformer.init(self.model, jax.random.key(0))

    def state(self, num_slots: int) -> list[Any]:
        cache = kv_cache.init(self.model, num_slots, self.shape.cache, jnp.float32)
        return [cache, kv_cache.no_pending(self.model, self.max_nodes, jnp.float32)]

    def plain(self) -> Callable[[], float]:
        state, B = self.state(self.num_slots), self.num_slots
        counts, options = (np.int32(ROUNDS), np.int32(B)), {"scheme": "cdf", "max_rounds": ROUNDS}

        def run() -> float:
            slots = busy(B, self.shape.cache)
            began_s = time.perf_counter()
            *state[:], _, found = decode_rounds(
                self.params, *state, slots, NO_STOP_E, *counts, config=self.model, **options
            )
            unpack(found)
            return (time.perf_counter() - began_s) / ROUNDS

        return run

    def products(self, num_nodes: int) -> float:
        x_M1D = jnp.ones((num_nodes, 1, self.model.d_model))
        began_s = time.perf_counter()
        products(self.model, self.params, x_M1D).block_until_ready()
        return time.perf_counter() - began_s

    def drafted(self, num_nodes: int, drafting_slots: int) -> Callable[[], float]:
        """Rounds of which the first slots have draft tokens."""
        state, B = self.state(self.num_slots), self.num_slots
        counts = np.zeros(B, int)
        counts[:drafting_slots] = (num_nodes - B) // drafting_slots
        drafts = draft(counts, self.model.vocab_size)
        max_nodes = widest_tree(B, num_nodes, MAX_NODES)
        options: Any = {"config": self.model, "scheme": "cdf", "max_nodes": max_nodes}

        def run() -> float:
            slots = busy(B, self.shape.cache)
            began_s = time.perf_counter()
            nodes_5M = pack(drafts, drafts.count_A, np.arange(B), B, num_nodes, max_nodes)
            *state[:], _, found, _ = verify_round(
                self.params, *state, slots, nodes_5M, NO_STOP_E, None, **options
            )
            by_slot(*unpack(found), nodes_5M[1], B)
            return time.perf_counter() - began_s

        return run


def measure_slots(shape: Shape, slots: int, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each number of nodes and way to spread them, plain rounds first."""
    rounds = Rounds(shape, slots, max(sizes))
    rows: dict[str, dict[str, Any]] = {"plain": {"slots": slots, "nodes": slots}}
    kinds = {"plain": rounds.plain()}

    def add(name: str, nodes: int, run: Callable[[], float], **kind: Any) -> None:
        rows[f"{name} {nodes}"] = {"slots": slots, "nodes": nodes, **kind}
        kinds[f"{name} {nodes}"] = run

    for size in sizes:
        for drafting in (slots, slots // 2):
            run = rounds.drafted(size, drafting)
            add(f"drafts in {drafting}", size, run, slots_with_drafts=drafting)
    for size in (slots, *sizes):
        add("products", size, partial(rounds.products, size), products=True)
    seconds = in_turns(kinds, repeats)
    for name, row in rows.items():
        ratios_T = seconds[name] / seconds["plain"]
        row["ms"] = round(1e3 * float(np.median(seconds[name])), 3)
        row["to_plain"] = round(float(np.median(ratios_T)), 3)
        row["to_plain_quartiles"] = np.quantile(ratios_T, [0.25, 0.75]).round(3).tolist()
    return list(rows.values())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape, rows = Shape(cache=arguments.positions), list[dict[str, Any]]()
    for slots in arguments.slots:
        sizes = [slots * n for n in (2, 4, 8) if slots * n <= 256]
        rows += measure_slots(shape, slots, sizes, arguments.repeats)
    return {"rows": rows}


if __name__ == "__main__":
    environment.run(__doc__, measure, slots=(64, 16, 4), positions=192, repeats=21)
