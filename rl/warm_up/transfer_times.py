"""The seconds in which a worker takes over an unfinished request: by a copy, or by recomputing it.

Measured once, after the warm-up, on one row of every bucket of tokens; a scheduler asks which of
the two is faster (RhymeRL recomputes, Seer copies).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from models import kv_cache, transformer
from rl.engine import admission
from rl.engine.engine import Engine
from rl.trajectory import HostKv
from rl.warm_up.measured_run import MoveTimes, write_moves
from spec.buckets import bucket

REPEATS = 3


def measure(
    engine: Engine, params: transformer.Params, *, max_requests: int, max_tokens: int, path: Path
) -> MoveTimes:
    """Time both on `engine`, whose programs are compiled; medians of a few.

    They are kept in `path`, for `rl.warm_up.measured_run.read_moves`.
    """
    seconds = {}
    B = engine.config.slot_bucket(max_requests)
    with engine.mesh_context():
        for S in engine.position_sizes(max_tokens):
            tokens = bucket(min(S, max_tokens) - 1, engine.config.min_prompt_tokens, S) - 1
            prompt = (0,) * (tokens + 1)
            plan = admission.AdmissionPlan((0,), (prompt,), ((0, 0),), ())
            row = jax.tree.map(lambda x: np.asarray(x[0]), engine.empty_cache(1, tokens))
            kv = HostKv(row)

            def copied(cache: kv_cache.KVCache, kv: HostKv = kv) -> kv_cache.KVCache:
                return engine.insert_kv(cache, [(kv, 0)])

            def computed(
                cache: kv_cache.KVCache, plan: admission.AdmissionPlan = plan
            ) -> kv_cache.KVCache:
                return engine.fill_rows(params, cache, plan)[0]

            cache = engine.empty_cache(B, S)
            copy_s, cache = _timed(engine, copied, cache)
            pass_s, cache = _timed(engine, computed, cache)
            seconds[tokens] = copy_s, pass_s
    times = MoveTimes(seconds)
    write_moves(path, times)
    return times


def _timed(
    engine: Engine,
    move: Callable[[kv_cache.KVCache], kv_cache.KVCache],
    cache: kv_cache.KVCache,
) -> tuple[float, kv_cache.KVCache]:
    """Median seconds of `move`, which takes a cache and gives one, and the last of them."""
    taken = []
    for _ in range(1 + REPEATS):  # the first one finds its memory
        jax.block_until_ready(cache)
        began_s = engine.clock()
        cache = jax.block_until_ready(move(cache))
        taken.append(engine.clock() - began_s)
    return statistics.median(taken[1:]), cache
