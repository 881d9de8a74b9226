"""Seconds of rounds with draft tokens against plain ones: `python -m benchmarks.rounds --json`.

Random weights of a small shape, or of a --policy's, all slots busy, half of the positions live. For
each number of nodes the draft tokens are spread evenly over the slots, and in another row over half
of them. Kinds of rounds take turns; ratios are taken turn by turn, and their medians count. A plain
round is one of eight between two fetches, as the engine runs them; a round with draft tokens
includes packing, call and fetch, but no drafting. Rows of `products` are the products with the
weights alone, without attention: a bound of any round of so many nodes.
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
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.decoder.layers import rope_turns
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf
from reprise.rl.engine.engine import Engine
from reprise.rl.slots.config import EngineConfig
from reprise.spec.drafter import Drafts, no_drafts
from reprise.spec.verification import sampling
from reprise.spec.verification.nodes import by_slot, pack, unpack_draws
from reprise.spec.verification.verify import Slots, decode_rounds, verify_round

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


def busy(num_slots: int, live: int) -> Slots:
    """Return slots on the device that all run, with so many live positions."""
    one_B = jnp.ones(num_slots, jnp.int32)
    slots = Slots(
        last_token=one_B,
        length=one_B * live,
        emitted=one_B * 0,
        limit=one_B * 10**6,
        active=one_B > 0,
        adapter=one_B * 0,
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
    return transformer.head(config, params, x_M1D[:, 0])


class Rounds:
    """Plain and verifying rounds of an engine's programs on one cache, with all slots busy."""

    def __init__(self, engine: Engine, params: Params, live: int) -> None:
        self.engine, self.params, self.live = engine, params, live
        self.num_slots = engine.config.slots
        engine.expect(self.num_slots, live + engine.config.max_nodes + 1)
        cache = engine.full_cache(self.num_slots)
        self.state: list[Any] = [cache, engine.empty_pending(self.num_slots)]

    def seconds(self, run: Callable[[Slots], Any]) -> float:
        slots = busy(self.num_slots, self.live)  # not part of a round's seconds
        began_s = time.perf_counter()
        jax.block_until_ready(run(slots))
        return time.perf_counter() - began_s

    def plain(self, slots: Slots) -> np.ndarray:
        """Run the plain rounds of one fetch; returns the tokens, [B, rounds]."""
        counts = np.int32(self.engine.config.rounds_per_fetch), np.int32(self.num_slots)
        options = self.engine.decode_options("cdf")
        *self.state, _, drawn = decode_rounds(
            self.params, *self.state, slots, NO_STOP_E, *counts, **options
        )
        return unpack_draws(drawn)[0].T

    def pack(self, drafts: Drafts, num_nodes: int) -> np.ndarray:
        """Return the nodes of a round that verifies these drafts, [5, num_nodes]."""
        B = self.num_slots
        max_nodes = self.engine.verify_options("cdf", B, num_nodes)["max_nodes"]
        return pack(drafts, drafts.count_A, np.arange(B), B, num_nodes, max_nodes)

    def verify(
        self, slots: Slots, nodes_5M: np.ndarray, *, chains: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a verifying round, of any trees or of chains; returns tokens [B, N], counts [B]."""
        num_nodes = nodes_5M.shape[1]
        options = self.engine.verify_options("cdf", self.num_slots, num_nodes, chains=chains)
        *self.state, _, drawn, _ = verify_round(
            self.params, *self.state, slots, nodes_5M, NO_STOP_E, None, **options
        )
        tokens_BN, _, count_B, _ = by_slot(*unpack_draws(drawn), nodes_5M[1], self.num_slots)
        return tokens_BN, count_B


def measure_slots(
    model: ModelConfig, positions: int, slots: int, sizes: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each number of nodes and way to spread them, plain rounds first."""
    counts = {"slots": slots, "min_slots": slots, "rounds_per_fetch": ROUNDS}
    config = EngineConfig(**counts, max_nodes=MAX_NODES)
    params = transformer.init(model, jax.random.key(0))
    rounds = Rounds(Engine(model, config, dtype=jnp.float32), params, positions // 2)
    rows: dict[str, dict[str, Any]] = {"plain": {"slots": slots, "nodes": slots}}
    kinds = {"plain": lambda: rounds.seconds(rounds.plain) / ROUNDS}

    def drafted(size: int, drafting: int) -> float:
        drafts_A = np.zeros(slots, int)
        drafts_A[:drafting] = (size - slots) // drafting
        drafts = draft(drafts_A, model.vocab_size)
        return rounds.seconds(lambda given: rounds.verify(given, rounds.pack(drafts, size)))

    def multiplied(size: int) -> float:
        x_M1D = jnp.ones((size, 1, model.d_model))
        return rounds.seconds(lambda _: products(model, params, x_M1D))

    for size, drafting in ((n, d) for n in sizes for d in (slots, slots // 2)):
        name = f"{size} nodes, drafts in {drafting}"
        rows[name] = {"slots": slots, "nodes": size, "slots_with_drafts": drafting}
        kinds[name] = partial(drafted, size, drafting)
    for size in (slots, *sizes):
        rows[f"products of {size}"] = {"slots": slots, "nodes": size, "products": True}
        kinds[f"products of {size}"] = partial(multiplied, size)
    seconds = in_turns(kinds, repeats)
    for name, row in rows.items():
        ratios_T = seconds[name] / seconds["plain"]
        row["ms"] = round(1e3 * float(np.median(seconds[name])), 3)
        row["to_plain"] = round(float(np.median(ratios_T)), 3)
        row["to_plain_quartiles"] = np.quantile(ratios_T, [0.25, 0.75]).round(3).tolist()
    return list(rows.values())


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    positions, rows = arguments.positions, list[dict[str, Any]]()
    shape = Shape(cache=positions)
    model = hf.shape(arguments.policy) if arguments.policy else model_config(shape)
    for slots in arguments.slots:
        sizes = [slots * n for n in (2, 4, 8) if slots * n <= arguments.max_nodes]
        rows += measure_slots(model, positions, slots, sizes, arguments.repeats)
    return {"rows": rows}


if __name__ == "__main__":
    environment.run(
        __doc__, measure, slots=(64, 16, 4), positions=192, max_nodes=256, repeats=21, policy=""
    )
