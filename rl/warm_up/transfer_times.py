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
from rl.cluster.processes import ALONE, Processes
from rl.engine import cache_ops
from rl.engine.engine import Engine
from rl.trajectory import HostKv
from rl.warm_up import compile_buckets
from rl.warm_up.measured_run import MoveTimes, moves_of_first, write_moves
from spec.config import SamplingConfig
from spec.verify import decode_beside_chunks

REPEATS = 3


def measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: compile_buckets.Reach,
    path: Path,
    *,
    processes: Processes = ALONE,
) -> MoveTimes:
    """Time both on `engine`, whose programs are compiled; medians of a few.

    Rounds in which keys and values are recomputed decode as well, but count in full. The times are
    kept in `path`, for `rl.warm_up.measured_run.read_moves`. The `processes` of a mesh
    measure together; the times are process 0's.
    """
    seconds, pool = {}, compile_buckets.Pool(engine, params, sampling, reach)
    B = pool.slots[0]
    with engine.mesh_context():
        for S in pool.positions:
            tokens = S - 1
            with engine.shapes_only():
                shapes = engine.empty_cache(1, tokens)
            kv = HostKv(jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), shapes))

            def copied(cache: kv_cache.KVCache, kv: HostKv = kv) -> kv_cache.KVCache:
                return engine.insert_kv(cache, [(kv, 0)])

            def computed(cache: kv_cache.KVCache, S: int = S) -> kv_cache.KVCache:
                return recomputed(pool, cache, S - 1)

            cache = engine.empty_cache(B, S)
            copy_s, cache = _timed(engine, copied, cache)
            pass_s, cache = _timed(engine, computed, cache)
            seconds[tokens] = copy_s, pass_s
    times = moves_of_first(MoveTimes(seconds), processes)
    if processes.is_first:
        write_moves(path, times)
    return times


def recomputed(
    pool: compile_buckets.Pool, cache: kv_cache.KVCache, num_tokens: int
) -> kv_cache.KVCache:
    """Run as many rounds as compute the keys and values of one row's tokens."""
    engine = pool.engine
    B, S, C = cache.num_slots, cache.num_positions, engine.config.chunk_tokens
    (params, _, pending, slots, stop_E, _), options = pool.prompt_arguments(B, S)
    chunks_TX = engine.no_chunks()
    for first in range(0, num_tokens, len(chunks_TX) * C):
        starts = range(first, num_tokens, C)[: len(chunks_TX)]
        chunks_TX[:, 0] = -1
        chunks_TX[: len(starts), :2] = [(0, min(start, S - C)) for start in starts]
        chunks = engine.argument(chunks_TX.copy())
        cache, pending, slots, _, entries = decode_beside_chunks(
            params, cache, pending, slots, stop_E, chunks, **options
        )
        cache = cache_ops.write_chunks(cache, entries, chunks)
    return cache


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
