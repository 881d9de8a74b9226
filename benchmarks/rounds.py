"""Seconds of rounds with draft tokens against plain ones: `python -m benchmarks.rounds --json`.

Random weights of the given shape, all slots busy, half of the positions live. For each number of
nodes the draft tokens are spread evenly over the slots, and in another row over half of them.
Kinds of rounds take turns; ratios are taken turn by turn, and their medians count. A plain round
is one of eight between two fetches, as the engine runs them; a round with draft tokens has its
packing, call and fetch in its seconds, but no drafting. Rows of `halves` are two batches of half
the slots and nodes in turns: the host packs, calls and fetches for one while the device verifies
the other, so that none of that is waited for. Rows of `products` are the products with
the weights alone, without attention: what no round of so many nodes can be faster than here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, roofline
from benchmarks.baselines.reprise import model_config
from benchmarks.shape import Shape
from models import kv_cache, transformer
from models.config import ModelConfig
from models.rope import rope_turns
from sched.simulator.roofline import Instance
from spec import sampling
from spec.buckets import widest_tree
from spec.drafter import Drafts, no_drafts
from spec.drawn import by_slot, unpack
from spec.nodes import pack
from spec.verify import Slots, decode_rounds, verify_round

ROUNDS = 8  # of a call of plain ones, and of two halves in turns
MAX_NODES = 32  # of a slot
PROJECTED = Instance(roofline.H100, roofline.QWEN3_8B, efficiency=roofline.PRICED)
NO_STOP_E = np.full(1, -1, np.int32)
Round = Callable[[], float]  # its seconds


def draft(counts: np.ndarray, vocab_size: int) -> Drafts:
    """Random trees of these numbers of draft tokens; a token hangs from one of the three before."""
    rng = np.random.default_rng(0)
    found = no_drafts(len(counts), max(int(counts.max()), 1))
    for a, n in enumerate(counts):
        found.tokens_AN[a, :n] = rng.integers(0, vocab_size, n)
        found.parents_AN[a, :n] = [int(rng.integers(max(i - 3, -1), i)) for i in range(n)]
        found.count_A[a] = n
    return found


def busy(num_slots: int, num_positions: int) -> Slots:
    one_B = jnp.ones(num_slots, jnp.int32)
    return Slots(
        last_token=one_B,
        length=one_B * (num_positions // 2),
        emitted=one_B * 0,
        limit=one_B * 10**6,
        active=one_B > 0,
        keys=sampling.request_keys(sampling.step_key(0, 0), jnp.arange(num_slots)),
        processing=sampling.Processing(one_B * 1.0, one_B * 0, one_B * 1.0),
    )


@partial(jax.jit, static_argnames="config")
def products(config: ModelConfig, params: transformer.Params, x_M1D: jax.Array) -> jax.Array:
    """Apply all layers without attention, and the head, to M rows."""
    rope = rope_turns(config, jnp.zeros(x_M1D.shape[:2], jnp.int32))
    for layer in params.layers:
        x_M1D = transformer.block(config, layer, x_M1D, rope, lambda q, k, v: q)
    return transformer.head(params, x_M1D[:, 0])


class Rounds:
    """Rounds of one number of slots and positions; each kind has a cache of its own."""

    def __init__(self, shape: Shape, num_slots: int, most_nodes: int) -> None:
        self.model, self.shape = model_config(shape), shape
        self.num_slots, self.most_nodes = num_slots, most_nodes
        self.params = transformer.init(self.model, jax.random.key(0))

    def state(self, num_slots: int) -> list[Any]:
        cache = kv_cache.init(self.model, num_slots, self.shape.cache, jnp.float32)
        return [cache, kv_cache.no_pending(self.model, self.most_nodes, jnp.float32)]

    def plain(self) -> Round:
        state, B = self.state(self.num_slots), self.num_slots

        def run() -> float:
            slots = jax.block_until_ready(busy(B, self.shape.cache))
            began_s = time.perf_counter()
            *state[:], _, found = decode_rounds(
                self.params,
                *state,
                slots,
                NO_STOP_E,
                np.int32(ROUNDS),
                np.int32(B),
                config=self.model,
                scheme="cdf",
                max_rounds=ROUNDS,
            )
            unpack(found)
            return (time.perf_counter() - began_s) / ROUNDS

        return run

    def products(self, num_nodes: int) -> Round:
        x_M1D = jnp.ones((num_nodes, 1, self.model.d_model))

        def run() -> float:
            began_s = time.perf_counter()
            products(self.model, self.params, x_M1D).block_until_ready()
            return time.perf_counter() - began_s

        return run

    def drafted(self, num_nodes: int, drafting_slots: int) -> Round:
        batch = Batch(self, self.num_slots, num_nodes, drafting_slots)

        def run() -> float:
            batch.start()
            began_s = time.perf_counter()
            batch.call()
            batch.fetch()
            return time.perf_counter() - began_s

        return run

    def halves(self, num_nodes: int) -> Round:
        """Two batches of half the slots and nodes; the host is at one, the device at the other."""
        B = self.num_slots // 2
        one, other = (Batch(self, B, num_nodes // 2, B) for _ in range(2))

        def run() -> float:
            one.start()
            other.start()
            began_s = time.perf_counter()
            one.call()
            for _ in range(ROUNDS):
                other.call()
                one.fetch()
                one.call()
                other.fetch()
            one.fetch()
            # one round of a half more than `ROUNDS` of both
            return (time.perf_counter() - began_s) / (ROUNDS + 0.5)

        return run


class Batch:
    """Slots of which some have draft tokens, with a cache of their own."""

    def __init__(self, rounds: Rounds, num_slots: int, num_nodes: int, drafting_slots: int) -> None:
        self.rounds, self.num_slots, self.num_nodes = rounds, num_slots, num_nodes
        self.state = rounds.state(num_slots)
        counts = np.zeros(num_slots, int)
        counts[:drafting_slots] = (num_nodes - num_slots) // drafting_slots
        self.drafts = draft(counts, rounds.model.vocab_size)
        self.max_nodes = widest_tree(num_slots, num_nodes, MAX_NODES)
        self.nodes_5M = np.zeros((5, 0), np.int32)

    def start(self) -> None:
        self.slots = jax.block_until_ready(busy(self.num_slots, self.rounds.shape.cache))

    def call(self) -> None:
        B, M, drafts = self.num_slots, self.num_nodes, self.drafts
        self.nodes_5M = pack(drafts, drafts.count_A, np.arange(B), B, M, self.max_nodes)
        *self.state, self.slots, self.found, _ = verify_round(
            self.rounds.params,
            *self.state,
            self.slots,
            self.nodes_5M,
            NO_STOP_E,
            None,
            config=self.rounds.model,
            scheme="cdf",
            max_nodes=self.max_nodes,
        )

    def fetch(self) -> None:
        by_slot(*unpack(self.found), self.nodes_5M[1], self.num_slots)


def projected_halves(num_slots: int, num_positions: int, num_nodes: int) -> float:
    """Seconds of two rounds of half the slots and nodes, to those of one of all, by the roofline.

    Nothing of the host is in either.
    """
    slots = num_slots // 2, num_slots
    half_s, whole_s = (
        PROJECTED.round_seconds(b, b * num_positions / 2, num_nodes / num_slots) for b in slots
    )
    return 2 * half_s / whole_s


def measure(shape: Shape, num_slots: int, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each number of nodes and way to spread them, plain rounds first."""
    rounds = Rounds(shape, num_slots, max(sizes))
    plain: dict[str, Any] = {"slots": num_slots, "nodes": num_slots}
    kinds = [(plain, rounds.plain())]
    for size in sizes:
        for drafting in (num_slots, num_slots // 2):
            row = {"slots": num_slots, "nodes": size, "slots_with_drafts": drafting}
            kinds.append((row, rounds.drafted(size, drafting)))
        row = {"slots": num_slots, "nodes": size, "halves": True}
        row["projected_to_whole"] = round(projected_halves(num_slots, shape.cache, size), 3)
        kinds.append((row, rounds.halves(size)))
    for size in (num_slots, *sizes):
        row = {"slots": num_slots, "nodes": size, "products": True}
        kinds.append((row, rounds.products(size)))
    seconds = [[run() for _, run in kinds] for _ in range(repeats + 2)][2:]  # two warm up
    taken_KT = np.array(seconds).T
    for (row, _), taken_T in zip(kinds, taken_KT, strict=True):
        ratios_T = taken_T / taken_KT[0]
        row["ms"] = round(1e3 * float(np.median(taken_T)), 3)
        row["to_plain"] = round(float(np.median(ratios_T)), 3)
        row["to_plain_quartiles"] = np.quantile(ratios_T, [0.25, 0.75]).round(3).tolist()
        if row.get("slots_with_drafts") == num_slots:
            whole_T = taken_T
        if "halves" in row:  # of the size before it
            row["to_whole"] = round(float(np.median(taken_T / whole_T)), 3)
    return [row for row, _ in kinds]


def _name(row: dict[str, Any]) -> str:
    kind = f"drafts in {row.get('slots_with_drafts', 0)}"
    if "halves" in row:
        kind = "two halves in turns"
    if "products" in row:
        kind = "products alone"
    return f"{row['slots']} slots, {row['nodes']} nodes, {kind}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 16, 4])
    parser.add_argument("--positions", type=int, default=192, help="of the cache")
    parser.add_argument("--repeats", type=int, default=21, help="turns; the medians count")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    shape, rows = Shape(cache=arguments.positions), list[dict[str, Any]]()
    for slots in arguments.slots:
        sizes = [slots * n for n in (2, 4, 8) if slots * n <= 256]
        rows += measure(shape, slots, sizes, arguments.repeats)
    record = environment.record("benchmarks.rounds", ("jax", "jaxlib", "numpy"))
    result = {"benchmark": "rounds", "rows": rows, **record}
    figures = {_name(row): f"{row['ms']} ms, {row['to_plain']}× a plain round" for row in rows}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
