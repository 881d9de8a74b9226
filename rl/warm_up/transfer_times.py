"""The seconds until a worker can continue an unfinished request, by a copy or by recomputing it.

Measured once, after the warm-up, on one row of few, half and all tokens; the scheduler takes the
faster way (RhymeRL recomputes, Seer copies).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from reprise.models.attention.entries import Entries, no_pending
from reprise.models.attention.kv_cache import KVCache
from reprise.models.decoder import transformer
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.engine.engine import Engine
from reprise.rl.records.trajectory import HostKv
from reprise.rl.slot_memory import cache_ops
from reprise.rl.slot_memory.page_memory import PageMemory
from reprise.rl.slots.slot_table import SlotTable
from reprise.rl.warm_up.measured_run import MoveTimes, moves_of_first, write_moves
from reprise.rl.warm_up.rollout_programs import Pool, Reach
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.verify import decode_beside_chunks

REPEATS = 3
PARTS = (8, 2, 1)  # divisors of the longest request that give the measured lengths


def measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    path: Path,
    *,
    processes: Processes = ALONE,
) -> MoveTimes:
    """Time copies and passes on a warmed-up `engine`; return medians, also written to `path`.

    Rounds that recompute keys and values decode as well, but count in full. The `processes` of a
    mesh measure together and return the times of process 0.
    """
    seconds = {}
    pool = Pool(engine, params, sampling, reach)
    B = pool.slots[0]
    with engine.mesh_context():
        for part in PARTS:
            tokens = max(1, engine.num_positions // part - 1)
            seconds[tokens] = _seconds(pool, B, tokens)
    times = moves_of_first(MoveTimes(seconds), processes)
    if processes.is_first:
        write_moves(path, times)
    return times


def _seconds(pool: Pool, num_slots: int, num_tokens: int) -> tuple[float, float]:
    """Return the seconds to copy and to recompute `num_tokens` tokens, in a separate memory."""
    engine = pool.engine
    memory = PageMemory(engine)
    kv = _host_kv(engine, num_tokens)
    memory.reset(num_slots)
    memory.room_for((), [(kv, 0)], SlotTable(num_slots, 1))

    def copied() -> KVCache:
        memory.insert([(kv, 0)])
        return memory.held

    def computed() -> KVCache:
        memory.cache = recomputed(pool, memory.held, num_tokens)
        return memory.held

    return _timed(engine, copied), _timed(engine, computed)


def recomputed(pool: Pool, cache: KVCache, num_tokens: int) -> KVCache:
    """Run the rounds that compute keys and values of `num_tokens` tokens in one row."""
    engine = pool.engine
    B = cache.num_slots
    C = engine.chunk_tokens
    pending, slots, stop_E = pool.at_rest(B)
    options = engine.prompt_options(pool.sampling.scheme)
    chunks_TX = engine.no_chunks(engine.config.prefill_rows)
    for first in range(0, num_tokens, len(chunks_TX) * C):
        starts = range(first, num_tokens, C)[: len(chunks_TX)]
        chunks_TX[:, 0] = -1
        chunks_TX[: len(starts), :2] = [(0, start) for start in starts]
        chunks = engine.argument(chunks_TX.copy())
        cache, pending, slots, _, entries = decode_beside_chunks(
            pool.params, cache, pending, slots, stop_E, chunks, **options
        )
        cache = cache_ops.write_chunks(cache, entries, chunks)
    return cache


def _host_kv(engine: Engine, num_tokens: int) -> HostKv:
    """Return zeroed keys and values of `num_tokens` tokens, on the host."""
    none = no_pending(engine.model, num_tokens, engine.dtype, engine.feature_layers, np.zeros)
    return HostKv(Entries(none.keys, none.values, none.features))


def _timed(engine: Engine, move: Callable[[], KVCache]) -> float:
    """Return the median seconds of `move`, which returns the cache."""
    taken = []
    for _ in range(1 + REPEATS):  # the first call allocates its memory
        start_s = engine.clock()
        jax.block_until_ready(move())
        taken.append(engine.clock() - start_s)
    return statistics.median(taken[1:])
