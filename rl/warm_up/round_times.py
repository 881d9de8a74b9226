"""The seconds of a round by bucket, for budgets: measured once, kept in the run folder.

A resumed run decides as before by the file; delete it to measure again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import transformer
from rl.cluster.processes import ALONE, Processes
from rl.engine import cache_ops
from rl.engine.ending import NO_TOKEN, padded_ids
from rl.engine.engine import Engine
from rl.engine.rollout_spec import CachedStates, DrafterContext, RolloutSpec
from rl.engine.slot_table import SlotTable
from rl.engine.stats import EngineStats, host_seconds
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DeviceDrafterSource
from rl.trajectory import PartialRequest, Request
from rl.warm_up.measured_run import read_rounds, rounds_of_first, write_rounds
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.budget.budget import best
from spec.budget.union import DrafterUnion
from spec.config import SamplingConfig
from spec.nodes import NOT_GIVEN, by_slot, pack, unpack_draws
from spec.retrieval.group import GroupDrafter
from spec.retrieval.suffix_drafter import NgramDrafter
from spec.reuse.chunk_price import Pass
from spec.round_times import RoundTimes, monotone
from spec.sampling import step_key
from spec.verify import Slots, chunks_alone, chunks_beside_roots, decode_rounds, verify_round

REPEATS = 7
FETCHES = 4  # of a rollout that times the host
MIN_SECONDS = 1e-9


def load_or_measure(
    path: Path,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    max_positions: int | None = None,
    *,
    beside: Sequence[Engine] = (),
    processes: Processes = ALONE,
) -> RoundTimes:
    """Return the table in `path` if it was made for this device and these shapes, else a new one.

    Call it after the warm-up, in all `processes` of a mesh: they get process 0's table. Buckets of
    more than `max_positions` count as the longest measured one until `complete`. Other workers
    decode meanwhile. Raises ValueError for a damaged file.
    """
    buckets = list(round_buckets(engine, sampling, reach))
    valid_for = _valid_for(engine, buckets, reach, 1 + len(beside))
    if (table := _table_in(path, valid_for, processes)) is not None:
        return table
    now = [b for b in buckets if max_positions is None or b[2] <= max_positions]
    options: dict[str, Any] = {"drafters": reach.drafters, "beside": beside, "processes": processes}
    times = measure(engine, params, sampling, now, draws=reach.reuse, **options)
    if max_positions is None:
        if processes.is_first:
            write_rounds(path, times, valid_for)
        return times
    for B, M, S in buckets:
        if S > max_positions:
            max_length = max(s for b, m, s in now if (b, m) == (B, M))
            times.put(RoundTimes({(B, M, S): times.rounds[B, M, max_length]}))
    return times


def _table_in(path: Path, valid_for: dict[str, Any], processes: Processes) -> RoundTimes | None:
    """The table that process 0 finds in its file."""
    return rounds_of_first(read_rounds(path, valid_for) if processes.is_first else None, processes)


def complete(
    path: Path,
    times: RoundTimes,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    max_positions: int,
    *,
    processes: Processes = ALONE,
) -> None:
    """Measure the buckets that `load_or_measure` skipped, add them to `times`, write the table."""
    buckets = list(round_buckets(engine, sampling, reach))
    valid_for = _valid_for(engine, buckets, reach, num_workers=1)
    if _table_in(path, valid_for, processes) is None:
        rest = [bucket for bucket in buckets if bucket[2] > max_positions]
        measured = engine, params, sampling, rest
        times.put(measure(*measured, draws=reach.reuse, processes=processes))
        if processes.is_first:
            write_rounds(path, times, valid_for)


def measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    buckets: list[tuple[int, int, int]],
    *,
    drafters: DeviceDrafters = NO_DRAFTERS,
    beside: Sequence[Engine] = (),
    draws: bool = False,
    processes: Processes = ALONE,
) -> RoundTimes:
    """Return the median seconds of a round of each (slots, nodes, positions), its fetch included.

    All slots are busy and half of the positions live. Plain rounds are timed as the engine runs
    them, several to a fetch; rounds with draft tokens include drafting (siblings and own text) and
    committing. Drafts of `drafters` are timed at one token and at full depth; with `draws`, passes
    that draw in chunks, as the engine makes them, and the host in a fetch, at the slots that
    rollouts start with. Sizes take turns, so that a slow machine slows all of them alike. More
    nodes never take less time.
    """
    spec = RolloutSpec(params, sampling, step_key(0, 0))
    nodes_of: dict[tuple[int, int], list[int]] = {}
    for B, M, S in buckets:
        nodes_of.setdefault((B, S), []).append(M)
    seconds: dict[tuple[int, int, int], float] = {}
    draft_seconds: dict[str, dict[tuple[int, int, int], float]] = {}
    chunk_seconds: dict[tuple[int, int, int], float] = {}
    beside_seconds: dict[tuple[int, int, int], float] = {}
    fetch_seconds: dict[tuple[int, int, int], float] = {}
    with engine.mesh_context():
        for (B, S), sizes in nodes_of.items():
            rounds = None  # free its cache before the next one is made
            rounds = _Rounds(engine, spec, B, S)
            in_chunks = _passes(engine, B) if draws and B in engine.first_slots else []
            with _decoding(beside, spec, B, S):
                turns: list[int | Pass] = [*sizes, *in_chunks]
                tries = [(M, rounds.seconds(M)) for M in turns * (REPEATS + 1)]
                drafts = {name: rounds.draft_seconds(d) for name, d in drafters.items()}
            medians: dict[Any, float] = _medians(tries)
            for one in in_chunks:
                table = beside_seconds if one.is_beside else chunk_seconds
                table[B, one.num_chunks * engine.drawing_tokens, S] = medians.pop(one)
            seconds |= {(B, M, S): taken_s for M, taken_s in medians.items()}
            for name, results in drafts.items():
                times = {(B, depth, S): taken_s for depth, taken_s in results.items()}
                draft_seconds.setdefault(name, {}).update(times)
    for B in {B for B, *_ in chunk_seconds}:
        [S, *_] = engine.round_positions(B)
        fetch_seconds[B, 1, S] = _fetch_seconds(engine, spec, B, S)
    apart = draft_seconds, chunk_seconds, beside_seconds, fetch_seconds
    own = RoundTimes(monotone(seconds), *apart)
    return rounds_of_first(own, processes) or own


@contextlib.contextmanager
def _decoding(
    engines: Sequence[Engine], spec: RolloutSpec, num_slots: int, num_positions: int
) -> Iterator[None]:
    """Have these engines decode plainly, each in a thread, until the body is done."""
    over = threading.Event()

    def decode(engine: Engine) -> None:
        own = dataclasses.replace(spec, params=engine.place(spec.params))
        with engine.mesh_context():
            rounds = _Rounds(engine, own, num_slots, num_positions)
            while not over.is_set():
                rounds.seconds(num_slots)

    with ThreadPoolExecutor(max(len(engines), 1)) as threads:
        ends = [threads.submit(decode, engine) for engine in engines]
        try:
            yield
        finally:
            over.set()
        for end in ends:
            end.result()


def _passes(engine: Engine, num_slots: int) -> list[Pass]:
    """Return the passes of chunks that draw, alone and with a round."""
    alone = [Pass(T, is_beside=False) for T in engine.drawing_chunks(num_slots)]
    return [*alone, *(Pass(T, is_beside=True) for T in engine.beside_chunks)]


def _fetch_seconds(engine: Engine, spec: RolloutSpec, num_slots: int, num_positions: int) -> float:
    """Return the host's median seconds in a fetch of a plain rollout in all slots."""
    limit = min(FETCHES * engine.config.rounds_per_fetch, num_positions - 1)
    requests = [Request(b, (0,), b, 0, max_new_tokens=limit) for b in range(num_slots)]
    sampling = dataclasses.replace(spec.sampling, stop=())
    engine.run(dataclasses.replace(spec, sampling=sampling), requests)
    rounds, engine.stats = engine.stats.timeline, EngineStats()
    engine.free()
    seconds = [r.ready_s - r.began_s + host_seconds([r]) for r in rounds]
    return max(float(statistics.median(seconds)), MIN_SECONDS)


def _medians(tries: Sequence[tuple[Any, float]]) -> dict[Any, float]:
    """Return the median seconds of each size without its first try, always positive."""
    by_size: dict[Any, list[float]] = {}
    for size, taken_s in tries:
        by_size.setdefault(size, []).append(taken_s)
    return {n: max(float(statistics.median(s[1:])), MIN_SECONDS) for n, s in by_size.items()}


class _Rounds:
    """Rounds of one bucket, for B busy slots whose requests have random texts."""

    def __init__(self, engine: Engine, spec: RolloutSpec, num_slots: int, num_positions: int):
        B, S = num_slots, num_positions
        self._engine, self._spec = engine, spec
        self._drafter = DrafterUnion((GroupDrafter(), NgramDrafter()))
        self._cache, self._pending = engine.full_cache(B, S), engine.empty_pending(B)
        ends = (*engine.model.eos_token_ids, *spec.sampling.stop_ids)
        self._stop_E = engine.put(np.full_like(padded_ids(ends), NO_TOKEN))
        self._table = SlotTable(B, S + engine.config.max_nodes)
        for b in range(B):
            request = Request(b, (0,) * (S // 4), b // 8, b % 8, S)
            self._table.enter(b, PartialRequest(request))
        letters = min(16, engine.model.vocab_size)  # few, so that there is something to draft from
        rng, shape = np.random.default_rng(0), self._table.tokens_BL.shape
        self._table.tokens_BL[:] = rng.integers(0, letters, shape)

    def seconds(self, num_nodes: int | Pass) -> float:
        """Time a round with draft tokens, one of a fetch of plain rounds, or a pass of chunks."""
        slots, rounds = self._busy_slots(), 1
        jax.block_until_ready((self._cache, slots))
        start_s = self._engine.clock()
        if isinstance(num_nodes, Pass):
            self._pass(slots, num_nodes)
        elif num_nodes > len(self._table):
            self._drafted_round(slots, num_nodes)
        else:
            rounds = self._engine.config.rounds_per_fetch
            self._plain_rounds(slots, rounds)
        return (self._engine.clock() - start_s) / rounds

    def draft_seconds(self, made_by: DeviceDrafterSource) -> dict[int, float]:
        """Median seconds of the drafts of all rows, by depth: one, and the deepest."""
        context = DrafterContext(
            self._engine, self._spec, CachedStates(self._engine, lambda: self._cache)
        )
        drafter = made_by.drafter_for(context)
        live, max_tokens = self._table.live(), self._engine.config.max_nodes - 1
        # rounds that were timed before have made them longer, beyond a small bucket's positions
        total_A = np.minimum(live.total_tokens_A, self._cache.num_positions // 2)
        live = dataclasses.replace(live, total_tokens_A=total_A)
        tries = []
        for depth in sorted({1, drafter.depth}) * (REPEATS + 1):
            drafter.depth = depth
            start_s = self._engine.clock()
            drafter.propose(live, np.full(len(live), max_tokens, np.int32), max_tokens)
            tries.append((depth, self._engine.clock() - start_s))
        return _medians(tries)

    def _drafted_round(self, slots: Slots, num_nodes: int) -> None:
        """Draft, verify, and commit one token of each slot, whether or not drafts were accepted."""
        table, engine = self._table, self._engine
        live, max_tokens = table.live(), engine.config.max_nodes - 1
        drafts = self._drafter.propose(live, np.full(len(live), max_tokens, np.int32), max_tokens)
        taken_A = best(drafts, np.ones(len(live)), len(table), num_nodes)
        options = engine.verify_options(self._spec.sampling.scheme, len(table), num_nodes)
        sizes = len(table), num_nodes, options["max_nodes"]
        nodes_5M = pack(drafts, taken_A, live.rows_A, *sizes)
        state = self._spec.params, self._cache, self._pending, slots
        self._cache, self._pending, _, results, _ = verify_round(
            *state, engine.argument(nodes_5M), self._stop_E, None, **options
        )
        self._drafter.committed(live)
        emitted_BN, logprobs_BN, count_B, reused_B = by_slot(
            *unpack_draws(results), nodes_5M[1], len(table)
        )
        full = table.total_tokens_B.max() >= table.tokens_BL.shape[1] - 1
        one_B = np.zeros_like(count_B) if full else np.ones_like(count_B)
        table.commit(emitted_BN, logprobs_BN, one_B, count_B > 1, reused_B)

    def _pass(self, slots: Slots, one: Pass) -> None:
        engine, B = self._engine, len(self._table)
        options = engine.prompt_options(self._spec.sampling.scheme)
        if one.is_beside:
            chunks, given = self._chunks(one.num_chunks)
            state = self._cache, self._pending, slots, self._stop_E
            self._cache, self._pending, _, results, entries = chunks_beside_roots(
                self._spec.params, *state, chunks, given, **options
            )
            passes, calls = [chunks], [(results, entries)]
        else:
            tables = [self._chunks(T) for T in engine.parts_of_pass(one.num_chunks, B)]
            given = self._spec.params, self._cache, slots
            calls = engine.at_once([partial(chunks_alone, *given, *t, **options) for t in tables])
            passes = [chunks for chunks, _ in tables]
        for chunks, (_, entries) in zip(passes, calls, strict=True):
            self._cache = cache_ops.write_chunks(self._cache, entries, chunks)
        for results, _ in calls:
            unpack_draws(results)

    def _chunks(self, T: int) -> tuple[Any, Any]:
        """Return tables of chunks in the middle of rows, and of the tokens given to a rule."""
        engine, C = self._engine, self._engine.drawing_tokens
        chunks_TX = engine.no_chunks(T, C)
        chunks_TX[:, 0] = np.arange(T) % len(self._table)
        chunks_TX[:, 1] = self._cache.num_positions // 2
        given_2X = np.full((2, T * C), NOT_GIVEN, np.int32)
        return engine.argument(chunks_TX), engine.argument(given_2X)

    def _plain_rounds(self, slots: Slots, rounds: int) -> None:
        state = self._spec.params, self._cache, self._pending, slots, self._stop_E
        options = self._engine.decode_options(self._spec.sampling.scheme)
        counts = np.int32(rounds), np.int32(len(self._table))
        self._cache, self._pending, _, results = decode_rounds(*state, *counts, **options)
        unpack_draws(results)

    def _busy_slots(self) -> Slots:
        B, sampling = len(self._table), self._spec.sampling
        columns: dict[str, Any] = {
            "length": self._cache.num_positions // 2,
            "limit": 2**30,
            "active": 1,
            "request_id": np.arange(B),
            "top_k": sampling.top_k,
        }
        ints_BC = np.zeros((B, len(cache_ops.COLUMNS)), np.int32)
        for name, values in columns.items():
            ints_BC[:, cache_ops.COLUMNS.index(name)] = values
        processing_B2 = np.full((B, 2), (sampling.temperature, sampling.top_p), np.float32)
        key = self._engine.put(self._spec.key)
        return cache_ops.make_slots(*self._engine.slot_arguments(ints_BC, processing_B2, key))


def _valid_for(
    engine: Engine, buckets: list[tuple[int, int, int]], reach: Reach, num_workers: int
) -> dict[str, Any]:
    """Return the device, policy shape, buckets and workers that a table is valid for."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "workers": num_workers,
        "model": repr(engine.model),
        "dtype": str(engine.dtype),
        "rounds_per_fetch": engine.config.rounds_per_fetch,
        "chunks": [engine.config.prefill_rows, engine.chunk_tokens, reach.reuse],
        "drawing": engine.drawing_tokens,
        "drafters": {name: d.made_for for name, d in reach.drafters.items()},
        "buckets": [list(bucket) for bucket in buckets],
    }
