"""The seconds of a round by bucket, for budgets: of whole fetches, by the engine's own path.

A run has its table in its folder, so that it decides as before when it is resumed; delete the file
to measure again. Tables of a quiet machine are also kept with the compiled programs, for other runs
of the same device, policy shape, settings, versions and code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models import transformer
from rl.cluster.processes import ALONE, Processes
from rl.engine.engine import Engine
from rl.engine.rollout_spec import (
    DrafterContext,
    DrafterFactory,
    Drafting,
    RolloutSpec,
    no_drafts,
)
from rl.speculation.config import SpeculationConfig
from rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters, DeviceDrafterSource
from rl.speculation.sources import Speculation
from rl.trajectory import PartialRequest, Request
from rl.warm_up import kept_rounds
from rl.warm_up.measured_run import read_rounds, rounds_of_first, write_rounds
from rl.warm_up.rollout_programs import Reach, round_buckets
from spec.budget.budget import Budget, DraftDecision, FixedBudget, Sizes, best
from spec.budget.config import BANDIT, LEARNED, MODEL
from spec.config import SamplingConfig
from spec.drafter import Acceptance, Drafter, Drafts, LiveSlots
from spec.drafter import no_drafts as empty_drafts
from spec.nodes import NOT_GIVEN, unpack_draws
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, RolloutCache
from spec.round_times import LIVE_PART, SHORT_PART, RoundTimes, monotone
from spec.sampling import step_key
from spec.verify import chunks_alone

TRIES = 4  # of each kind of fetch, after one that does not count
MIN_SECONDS = 1e-9
CHUNKS = 0  # in place of a number of nodes
DEVICE_SOURCES = LEARNED, MODEL  # whose drafts are timed apart
OF_TEXT = SpeculationConfig(sources=("history", "group", "own"))
BUSY = 0.5  # spread of tries, by their median: a table of a machine that is this busy is not kept


def load_or_measure(
    path: Path | None,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    max_positions: int | None = None,
    *,
    speculation: SpeculationConfig = OF_TEXT,
    beside: Sequence[Engine] = (),
    processes: Processes = ALONE,
    kept: Path | None = None,
    say: Callable[[str], object] = warnings.warn,
) -> RoundTimes:
    """Return the table in `path` if it was made for this device and these shapes, else a new one.

    The table of an earlier run in the folder `kept` is as good as a new one, which goes there.
    Call it after the warm-up, in all `processes` of a mesh: they get process 0's table. Buckets of
    more than `max_positions` count as the longest measured one until `complete`. Other workers
    decode meanwhile. Raises ValueError for a damaged file in `path`; one in `kept` is passed to
    `say`.
    """
    buckets = list(round_buckets(engine, sampling, reach))
    valid_for = _valid_for(engine, buckets, reach, 1 + len(beside), speculation)
    table = _table_in(path, valid_for, processes, kept, say)
    if table is not None:
        return table
    now = [b for b in buckets if max_positions is None or b[2] <= max_positions]
    options: dict[str, Any] = {"drafters": reach.drafters, "beside": beside, "processes": processes}
    policy = engine, params, sampling, now
    times, spread = _measure(*policy, draws=reach.reuse, speculation=speculation, **options)
    if max_positions is None:
        if processes.is_first:
            _write(path, times, valid_for, kept if spread < BUSY else None, say)
        return times
    for B, M, S in buckets:
        if S > max_positions:
            times.put(times.longer(B, M, S))
    return times


def _table_in(
    path: Path | None,
    valid_for: dict[str, Any],
    processes: Processes,
    kept: Path | None = None,
    say: Callable[[str], object] = warnings.warn,
) -> RoundTimes | None:
    """The table that process 0 finds in its file, or in a folder of other runs'."""
    own = None
    if processes.is_first:
        own = None if path is None else read_rounds(path, valid_for)
        if own is None and kept is not None:
            own = kept_rounds.read(kept, valid_for, say)
            if own is not None and path is not None:
                write_rounds(path, own, valid_for)
    return rounds_of_first(own, processes)


def _write(
    path: Path | None,
    times: RoundTimes,
    valid_for: dict[str, Any],
    kept: Path | None,
    say: Callable[[str], object],
) -> None:
    if path is not None:
        write_rounds(path, times, valid_for)
    if kept is not None:
        kept_rounds.write(kept, times, valid_for, say)


def complete(
    path: Path,
    times: RoundTimes,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    max_positions: int,
    *,
    speculation: SpeculationConfig = OF_TEXT,
    processes: Processes = ALONE,
) -> None:
    """Measure the buckets that `load_or_measure` skipped, add them to `times`, write the table."""
    buckets = list(round_buckets(engine, sampling, reach))
    valid_for = _valid_for(engine, buckets, reach, 1, speculation)
    if _table_in(path, valid_for, processes) is None:
        rest = [bucket for bucket in buckets if bucket[2] > max_positions]
        policy = engine, params, sampling, rest
        options: dict[str, Any] = {"speculation": speculation, "processes": processes}
        times.put(measure(*policy, draws=reach.reuse, **options))
        if processes.is_first:
            write_rounds(path, times, valid_for)


def measure(*policy: Any, **options: Any) -> RoundTimes:
    """Return the seconds of a round of each bucket: see `_measure`."""
    return _measure(*policy, **options)[0]


def _measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    buckets: list[tuple[int, int, int]],
    *,
    speculation: SpeculationConfig = OF_TEXT,
    drafters: DeviceDrafters = NO_DRAFTERS,
    beside: Sequence[Engine] = (),
    draws: bool = False,
    processes: Processes = ALONE,
) -> tuple[RoundTimes, float]:
    """Return the least seconds of a round of each (slots, nodes, positions), and their spread.

    They are of whole fetches: admission, drafters and budget as in `speculation`, the device,
    committing. All slots are busy, and half of the positions live, then an eighth. Plain rounds are
    several to a fetch, as the engine runs them. Drafts of `drafters` on the device are timed apart,
    at one token and at full depth; with `draws`, passes that draw in chunks, at the slots that
    rollouts start with. Kinds of fetches take turns, so that a slow machine slows all of them
    alike. More nodes never take less time. The spread is (most − least) / median of the tries, its
    median.
    """
    spec = RolloutSpec(params, sampling, step_key(0, 0))
    nodes_of: dict[tuple[int, int], list[int]] = {}
    for B, M, S in buckets:
        nodes_of.setdefault((B, S), []).append(M)
    seconds: dict[tuple[int, int, int], float] = {}
    draft_seconds: dict[str, dict[tuple[int, int, int], float]] = {}
    chunk_seconds: dict[tuple[int, int, int], float] = {}
    short_seconds: dict[tuple[int, int, int], float] = {}
    spreads = list[float]()
    for (B, S), sizes in nodes_of.items():
        in_chunks = [CHUNKS] if draws and B in engine.first_slots else []
        config = speculation if max(sizes) > B else None
        with _decoding(beside, spec, B, S):
            with _Fetches(engine, spec, (B, S), config) as fetches:
                tries = [(M, fetches.seconds(M)) for M in [*sizes, *in_chunks] * (TRIES + 1)]
                drafts = {name: fetches.draft_seconds(d) for name, d in drafters.items()}
            with _Fetches(engine, spec, (B, S), config, SHORT_PART) as fetches:
                short = _least([(M, fetches.seconds(M)) for M in sizes * (TRIES + 1)])
        least = _least(tries)
        spreads += [_spread([t for m, t in tries if m == M][1:]) for M in sizes]
        if in_chunks:
            X = engine.drawing_chunks(B)[-1] * engine.chunk_tokens
            chunk_seconds[B, X, S] = least.pop(CHUNKS)
        seconds |= {(B, M, S): taken_s for M, taken_s in least.items()}
        short_seconds |= {(B, M, S): taken_s for M, taken_s in short.items()}
        for name, results in drafts.items():
            times = {(B, depth, S): taken_s for depth, taken_s in results.items()}
            draft_seconds.setdefault(name, {}).update(times)
    short_s = monotone(short_seconds)
    own = RoundTimes(monotone(seconds), draft_seconds, chunk_seconds, short_seconds=short_s)
    return rounds_of_first(own, processes) or own, statistics.median(spreads or [0.0])


def _spread(tries: Sequence[float]) -> float:
    return (max(tries) - min(tries)) / max(statistics.median(tries), MIN_SECONDS)


@contextlib.contextmanager
def _decoding(
    engines: Sequence[Engine], spec: RolloutSpec, num_slots: int, num_positions: int
) -> Iterator[None]:
    """Have these engines decode plainly, each in a thread, until the body is done."""
    over = threading.Event()

    def decode(engine: Engine) -> None:
        own = dataclasses.replace(spec, params=engine.place(spec.params))
        with _Fetches(engine, own, (num_slots, num_positions), None) as fetches:
            while not over.is_set():
                fetches.seconds(num_slots)

    with ThreadPoolExecutor(max(len(engines), 1)) as threads:
        ends = [threads.submit(decode, engine) for engine in engines]
        try:
            yield
        finally:
            over.set()
        for end in ends:
            end.result()


def _least(tries: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return the least seconds of each size without its first try, always positive.

    Another process makes tries longer, and long ones more often; nothing makes them shorter.
    """
    by_size: dict[int, list[float]] = {}
    for size, taken_s in tries:
        by_size.setdefault(size, []).append(taken_s)
    return {n: max(min(s[1:]), MIN_SECONDS) for n, s in by_size.items()}


class _Forced(Budget):
    """Decides for `num_nodes`, at a budget's expense: its decisions are made, and not taken.

    As many nodes as slots are plain decoding. Trees are filled up: a round costs by its nodes.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget, self.num_nodes = budget, 0

    def skips(self, live: LiveSlots, num_slots: int, num_positions: int) -> frozenset[str]:
        self._budget.skips(live, num_slots, num_positions)
        return frozenset()

    def limits(self, live: LiveSlots, num_slots: int) -> np.ndarray:
        self._budget.limits(live, num_slots)
        return np.full(len(live), 2**30 if self.num_nodes > num_slots else 0, np.int32)

    def choose(
        self, live: LiveSlots, drafts: Drafts, sizes: Sizes, num_slots: int, num_positions: int
    ) -> DraftDecision:
        self._budget.choose(live, drafts, sizes, num_slots, num_positions)
        places_N = np.arange(drafts.max_nodes)
        lacking_AN = places_N >= drafts.count_A[:, None]  # a chain after the last draft token
        drafts.tokens_AN[lacking_AN] = 0
        drafts.parents_AN[:] = np.where(lacking_AN, places_N - 1, drafts.parents_AN)
        drafts.prob_AN[lacking_AN] = 0.0
        drafts.count_A[:] = drafts.max_nodes
        taken_A = best(drafts, np.ones(len(live)), num_slots, self.num_nodes)
        return DraftDecision(self.num_nodes, taken_A)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        self._budget.observe(live, drafts, acceptance)


class _NoText(Drafter):
    """Drafts nothing, where all drafters are on the device."""

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        return empty_drafts(len(live), max_nodes)


GROUP = 8  # requests with one prompt
CHANGED = 0.1  # of a text's tokens are others in each response: drafters find a part of it


def _texts(num_slots: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return one text of few letters with changes in each row, and once more with others."""
    rng, letters = np.random.default_rng(0), min(16, vocab_size)
    shape = 2, num_slots, num_tokens
    texts_2BL = np.tile(rng.integers(0, letters, num_tokens), (*shape[:2], 1))
    changed_2BL = rng.random(shape) < CHANGED
    texts_2BL[changed_2BL] = rng.integers(0, letters, int(changed_2BL.sum()))
    return texts_2BL.astype(np.int32)


class _Fetches:
    """Fetches of one bucket by the engine's own path, for B busy slots. A context manager.

    A run's configuration has the drafters and the budget (None: no drafts). Requests have made-up
    texts, whatever the policy draws, and start again before they come to the end of their rows.
    """

    def __init__(
        self,
        engine: Engine,
        spec: RolloutSpec,
        size: tuple[int, int],
        speculation: SpeculationConfig | None,
        live_part: int = LIVE_PART,
    ) -> None:
        (B, S), config = size, engine.config
        self._size, self._spec, self._clock = size, spec, engine.clock
        self._fetch_tokens = max(config.rounds_per_fetch, config.max_nodes) + 1
        # another one: the engine's rows may be in use, and its clock is read for fetches alone
        self._engine = dataclasses.replace(engine, clock=float)
        self._engine.first_slots = {B}
        self._end = min(S, engine.longest_tokens or S)
        self._start = max(1, min(S // live_part, self._end - 2 * self._fetch_tokens))
        self._texts_2BL = _texts(B, self._end + 1, engine.model.vocab_size)
        prompts = [tuple(self._texts_2BL[0, b, : self._start].tolist()) for b in range(0, B, GROUP)]
        limit = max(1, self._end - self._start)
        self._requests = [
            Request(b, prompts[b // GROUP], b // GROUP, b % GROUP, limit) for b in range(B)
        ]
        self._forced = _Forced(FixedBudget())
        self._lags = True  # drafters have not read all of the texts
        self._open = contextlib.ExitStack()
        self._drafts: DrafterFactory = no_drafts
        if speculation is not None:
            self._drafts = self._factory(speculation)

    def _factory(self, config: SpeculationConfig) -> DrafterFactory:
        """Return drafters (on the host) and budget of a run in its second epoch."""
        sources = tuple(s for s in config.sources if s not in DEVICE_SOURCES)
        if not sources or not config.enabled:
            return lambda context: (_NoText(), self._forced)
        name = "goodput" if config.budget == BANDIT else config.budget  # arms are few: as a table
        config = dataclasses.replace(config, sources=sources, budget=name)
        prompts = {f"{r.group_id}": r.prompt_ids for r in self._requests}
        old_BL = self._texts_2BL[1, :, self._start :]
        last = {r.request_id: old_BL[r.request_id] for r in self._requests}
        cache = RolloutCache()
        for key, prompt in prompts.items():
            members = [r for r in self._requests if key == f"{r.group_id}"]
            old = [CachedResponse(r.sample_index, last[r.request_id], 0.0, None) for r in members]
            cache.replace(key, CachedGroup(np.asarray(prompt, np.int32), tuple(old)))
        speculation = self._open.enter_context(Speculation(config, cache))
        B, S = self._size
        sizes = (B, *self._engine.config.node_sizes(B))
        speculation.times = RoundTimes({(B, M, S): 1.0 for M in sizes})
        names = list(prompts), list(prompts.values()), last
        factory = speculation.drafter_factory(*names, group_size=GROUP)

        def drafting(context: DrafterContext) -> Drafting:
            drafter, budget = factory(context)
            self._forced = _Forced(budget or FixedBudget())
            return drafter, self._forced

        return drafting

    def __enter__(self) -> _Fetches:
        (B, S), own, sampling = self._size, self._engine, self._spec.sampling
        ends = len({*own.model.eos_token_ids, *sampling.stop_ids})
        spec = dataclasses.replace(
            self._spec,
            sampling=dataclasses.replace(sampling, stop_ids=(), stop=(), by_task=()),
            stop_token_ids=tuple(range(-1 - ends, -1)),  # as many, none is drawn
            drafts=self._drafts,
        )
        self._open.enter_context(own.mesh_context())
        self._open.callback(own.free)
        self._open.enter_context(own.rollout(spec, max_requests=B, max_tokens=self._end))
        own.rows.reserve(np.zeros(B, np.int32), S)
        self._begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def _begin(self) -> None:
        """Put all requests into rows, at their start, with all keys and values."""
        own, rows = self._engine, self._engine.rows
        own.remove([r.request_id for r in self._requests])
        rows.enter([PartialRequest(r) for r in self._requests], range(len(self._requests)))
        for b in range(len(self._requests)):
            rows.hold(b, self._start)
        rows.changed()
        self._lags = True

    def seconds(self, num_nodes: int) -> float:
        """Time a fetch by its rounds: with draft tokens, plain ones, or a pass of `CHUNKS`."""
        table, B = self._engine.rows.table, self._size[0]
        left_B = np.where(table.busy_B, table.limit_B - table.emitted_B, 0)
        if num_nodes == CHUNKS or left_B.min() < 2 * self._fetch_tokens:
            self._begin()
        if num_nodes > B and self._lags:
            self._fetch(num_nodes)
        self._lags = num_nodes <= B
        start_s = self._clock()
        rounds = self._pass() if num_nodes == CHUNKS else self._fetch(num_nodes)
        taken_s = (self._clock() - start_s) / rounds
        if num_nodes == CHUNKS:
            jax.block_until_ready(self._engine.rows.cache)
        return taken_s

    def _fetch(self, num_nodes: int) -> int:
        """Return the rounds of a fetch; the texts replace its tokens."""
        own, table = self._engine, self._engine.rows.table
        self._forced.num_nodes = num_nodes
        if not table.busy_B.any():  # all ended, in rows of few positions
            self._begin()
        own.step()
        [record] = own.stats.timeline
        own.stats.timeline.clear()
        for b in np.nonzero(table.busy_B)[0].tolist():
            n = int(table.total_tokens_B[b])
            table.tokens_BL[b, self._start : n] = self._texts_2BL[0, b, self._start : n]
        return record.num_rounds

    def _pass(self) -> int:
        engine, B = self._engine, self._size[0]
        T = engine.drawing_chunks(B)[-1]
        chunks_TX = engine.no_chunks(T)
        chunks_TX[:, :2] = np.stack([np.arange(T) % B, np.full(T, self._start)], axis=1)
        slots, cache = engine.rows.slots(engine.put(self._spec.key)), engine.rows.cache
        inputs_2X = np.full((2, chunks_TX[:, 2:].size), NOT_GIVEN, np.int32)
        tables = engine.argument(chunks_TX), engine.argument(inputs_2X)
        options = engine.prompt_options(self._spec.sampling.scheme)
        results, entries = chunks_alone(self._spec.params, cache, slots, *tables, **options)
        engine.rows.write_chunks(entries, chunks_TX)
        unpack_draws(results)
        return 1

    def draft_seconds(self, made_by: DeviceDrafterSource) -> dict[int, float]:
        """Return the least seconds of the drafts of all rows, by depth: one, and the deepest."""
        self._begin()
        drafter = made_by.drafter_for(self._engine.drafter_context(self._spec))
        live = self._engine.rows.table.live()
        max_tokens = self._engine.config.max_nodes - 1
        tries = []
        for depth in sorted({1, drafter.depth}) * (TRIES + 1):
            drafter.depth = depth
            start_s = self._clock()
            drafter.propose(live, np.full(len(live), max_tokens, np.int32), max_tokens)
            tries.append((depth, self._clock() - start_s))
        return _least(tries)


def _valid_for(
    engine: Engine,
    buckets: list[tuple[int, int, int]],
    reach: Reach,
    num_workers: int,
    speculation: SpeculationConfig,
) -> dict[str, Any]:
    """Return the device, policy shape, buckets, drafts and workers that a table is valid for."""
    device, drafts = jax.devices()[0], speculation if reach.speculative else None
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "workers": num_workers,
        "model": repr(engine.model),
        "dtype": str(engine.dtype),
        "rounds_per_fetch": engine.config.rounds_per_fetch,
        "max_nodes": engine.config.max_nodes,
        "chunks": [engine.config.prefill_rows, engine.chunk_tokens, reach.reuse],
        "drafts": [drafts.budget, *drafts.sources] if drafts else [],
        "drafters": {name: d.made_for for name, d in reach.drafters.items()},
        "buckets": [list(bucket) for bucket in buckets],
    }
