"""Tokens per second of plain rollouts: `python -m benchmarks.rollout --json`.

Random weights of the given shape; `--batch` different prompts, each answered
with exactly `--new_tokens` tokens (no end token), drawn at temperature 1, with
log-probabilities, prompts included in the time. The first call compiles;
`compile_s` is what it took more than the median of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import environment
from benchmarks.baselines.reprise import generate_batch, make_engine, make_requests
from benchmarks.shape import Shape, add_flags, from_flags
from models import transformer

PACKAGES = ("jax", "jaxlib", "numpy")


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """Figures of `repeats` batches after one that compiles."""
    engine, requests = make_engine(shape), make_requests(shape)
    params = transformer.init(engine.model, jax.random.key(0), jnp.dtype(shape.dtype))
    jax.block_until_ready(params)

    def seconds(seed: int) -> float:
        start = time.perf_counter()
        done = generate_batch(engine, params, requests, seed, greedy=False)
        assert sum(t.num_tokens for t in done) == shape.total_new_tokens
        return time.perf_counter() - start

    first_s = seconds(0)
    all_s = [seconds(seed) for seed in range(1, repeats + 1)]
    median_s = statistics.median(all_s)
    return {
        "tokens_per_s": round(shape.total_new_tokens / median_s, 1),
        "compile_s": round(max(first_s - median_s, 0.0), 2),
        "fetches_per_round": engine.stats.fetches / sum(engine.stats.rounds.values()),
        "tokens_per_s_all": [round(shape.total_new_tokens / s, 1) for s in all_s],
        "ms_per_round": round(1e3 * median_s / shape.new_tokens, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed batches; the median counts")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    try:
        shape = from_flags(arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    figures = measure(shape, arguments.repeats)
    result = {
        "benchmark": "rollout",
        **figures,
        "shape": dataclasses.asdict(shape),
        **environment.record("benchmarks.rollout", PACKAGES),
    }
    environment.show(result, arguments, figures | {"device": result["device"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
