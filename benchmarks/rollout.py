"""Tokens per second of plain rollouts: `python -m benchmarks.rollout --json`.

Random weights of a 4-layer, Qwen3-like model (`shape.py`); `--batch` different prompts, each
answered with exactly `--new_tokens` tokens (no end token), drawn at temperature 1, with
log-probabilities. The time includes prompts. The first call compiles: `compile_s` is its time less
the median of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import environment
from benchmarks.baselines.reprise import generate_batch, make_engine, make_requests
from benchmarks.shape import BATCH, Shape
from reprise.models.decoder import transformer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return figures of `repeats` batches after one that compiles."""
    shape = Shape(batch=arguments.batch, **{name: getattr(arguments, name) for name in BATCH})
    engine, requests = make_engine(shape), make_requests(shape)
    params = transformer.init(engine.model, jax.random.key(0), jnp.dtype(shape.dtype))
    jax.block_until_ready(params)

    def seconds(seed: int) -> float:
        start = time.perf_counter()
        done = generate_batch(engine, params, requests, seed, greedy=False)
        assert sum(t.num_tokens for t in done) == shape.total_new_tokens
        return time.perf_counter() - start

    first_s = seconds(0)
    all_s = [seconds(seed) for seed in range(1, arguments.repeats + 1)]
    median_s = statistics.median(all_s)
    return {
        "tokens_per_s": round(shape.total_new_tokens / median_s, 1),
        "compile_s": round(max(first_s - median_s, 0.0), 2),
        "fetches_per_round": engine.stats.fetches / sum(engine.stats.rounds.values()),
        "tokens_per_s_all": [round(shape.total_new_tokens / s, 1) for s in all_s],
        "ms_per_round": round(1e3 * median_s / shape.new_tokens, 3),
        "shape": dataclasses.asdict(shape),
    }


if __name__ == "__main__":
    environment.run(__doc__, measure, batch=16, repeats=7, **BATCH)
