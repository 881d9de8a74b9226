"""The seconds of a round by bucket, for budgets, measured in whole fetches of an engine.

The table of a run is in its folder, so that a resumed run decides as before; delete the file to
measure again. Tables from a quiet machine are also kept with the compiled programs, for other runs
with the same device, policy shape, settings, versions and code.
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

from reprise.models import sums_in_order_on_accelerators
from reprise.models.decoder import transformer
from reprise.models.text import digests
from reprise.rl.cluster.processes import ALONE, Processes
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.stats import host_seconds
from reprise.rl.records.trajectory import Request
from reprise.rl.runtime.user_files import is_user_name, split_user_name
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.device_drafters import NO_DRAFTERS, DeviceDrafters
from reprise.rl.warm_up import kept_rounds
from reprise.rl.warm_up.measured_run import read_rounds, rounds_of_first, write_rounds
from reprise.rl.warm_up.rollout_programs import Reach, round_buckets
from reprise.rl.warm_up.timed_fetches import MIN_SECONDS, TRIES, TimedFetches, least
from reprise.spec.config import SamplingConfig
from reprise.spec.reuse.chunk_price import Pass
from reprise.spec.round_times import SHORT_PART, RoundTimes, monotone
from reprise.spec.verification.sampling import step_key

FETCHES = 4  # of a rollout that times the host
TEXT_DRAFTS = SpeculationConfig(sources=("history", "group", "own"))
BUSY = 0.5  # relative spread of tries; tables from a machine that is this busy are not kept


def load_or_measure(
    path: Path | None,
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    reach: Reach,
    *,
    speculation: SpeculationConfig = TEXT_DRAFTS,
    beside: Sequence[Engine] = (),
    processes: Processes = ALONE,
    shared_folder: Path | None = None,
    say: Callable[[str], object] = warnings.warn,
) -> RoundTimes:
    """Return the table in `path` if made for this device and these shapes, else measure a table.

    The table of an earlier run in `shared_folder` replaces a measurement; a new table is also
    written there. Call this after the warm-up, in all `processes` of a mesh, which all return the
    table of process 0. Other workers decode during the measurement. Raises ValueError for a damaged
    file in `path`; a damaged file in `shared_folder` is reported to `say`.
    """
    buckets = list(round_buckets(engine, sampling, reach))
    valid_for = _valid_for(engine, sampling, buckets, reach, 1 + len(beside), speculation)
    table = _table_in(path, valid_for, processes, shared_folder, say)
    if table is not None:
        return table
    times, spread = measure(
        engine,
        params,
        sampling,
        buckets,
        speculation=speculation,
        drafters=reach.drafters,
        beside=beside,
        draws=reach.reuse,
        processes=processes,
    )
    if processes.is_first:
        _write(path, times, valid_for, shared_folder if spread < BUSY else None, say)
    return times


def _table_in(
    path: Path | None,
    valid_for: dict[str, Any],
    processes: Processes,
    shared_folder: Path | None = None,
    say: Callable[[str], object] = warnings.warn,
) -> RoundTimes | None:
    """Return the table that process 0 finds in its file or in `shared_folder`, or None."""
    own = None
    if processes.is_first:
        own = None if path is None else read_rounds(path, valid_for)
        if own is None and shared_folder is not None:
            own = kept_rounds.read(shared_folder, valid_for, say)
            if own is not None and path is not None:
                write_rounds(path, own, valid_for)
    return rounds_of_first(own, processes)


def _write(
    path: Path | None,
    times: RoundTimes,
    valid_for: dict[str, Any],
    shared_folder: Path | None,
    say: Callable[[str], object],
) -> None:
    if path is not None:
        write_rounds(path, times, valid_for)
    if shared_folder is not None:
        kept_rounds.write(shared_folder, times, valid_for, say)


def measure(
    engine: Engine,
    params: transformer.Params,
    sampling: SamplingConfig,
    buckets: list[tuple[int, int, int]],
    *,
    speculation: SpeculationConfig = TEXT_DRAFTS,
    drafters: DeviceDrafters = NO_DRAFTERS,
    beside: Sequence[Engine] = (),
    draws: bool = False,
    processes: Processes = ALONE,
) -> tuple[RoundTimes, float]:
    """Return the minimum seconds of a round of each (slots, nodes, positions), and their spread.

    The seconds are from whole fetches: admission, drafters and budget as in `speculation`, the
    device, committing. All slots are busy, with half of the positions live, then an eighth. A fetch
    has several plain rounds, as in the engine. Drafts of `drafters` on the device are timed
    separately, at one token and at full depth; with `draws`, also passes that draw in chunks and
    the host in a fetch, at the slots that rollouts start with. Kinds of fetches alternate, so that
    a slow machine slows all kinds equally. More nodes never take less time. The spread is the
    median over kinds of (max − min) / median of the tries.
    """
    spec = RolloutSpec(params, sampling, step_key(0, 0))
    nodes_of: dict[tuple[int, int], list[int]] = {}
    for B, M, S in buckets:
        nodes_of.setdefault((B, S), []).append(M)
    seconds: dict[tuple[int, int, int], float] = {}
    short_seconds: dict[tuple[int, int, int], float] = {}
    draft_seconds: dict[str, dict[tuple[int, int, int], float]] = {}
    chunk_seconds: dict[tuple[int, int, int], float] = {}
    beside_seconds: dict[tuple[int, int, int], float] = {}
    fetch_seconds: dict[tuple[int, int, int], float] = {}
    spreads = list[float]()
    for (B, S), sizes in nodes_of.items():
        passes = _passes(engine, B) if draws and B in engine.first_slots else []
        kinds: list[int | Pass] = [*sizes, *passes]
        config = speculation if max(sizes) > B else None
        with _decoding(beside, spec, B, S):
            with TimedFetches(engine, spec, (B, S), config) as fetches:
                tries = [(kind, fetches.seconds(kind)) for kind in kinds * (TRIES + 1)]
                drafts = {name: fetches.draft_seconds(d) for name, d in drafters.items()}
            with TimedFetches(engine, spec, (B, S), config, SHORT_PART) as fetches:
                short = least([(M, fetches.seconds(M)) for M in sizes * (TRIES + 1)])
        found = least(tries)
        spreads += [_spread([t for kind, t in tries if kind == M][1:]) for M in sizes]
        for one in passes:
            table = beside_seconds if one.is_beside else chunk_seconds
            table[B, one.num_chunks * engine.drawing_tokens, S] = found[one]
        seconds |= {(B, M, S): found[M] for M in sizes}
        short_seconds |= {(B, M, S): taken_s for M, taken_s in short.items()}
        for name, results in drafts.items():
            times = {(B, depth, S): taken_s for depth, taken_s in results.items()}
            draft_seconds.setdefault(name, {}).update(times)
    with engine.mesh_context():
        for B in {B for B, *_ in chunk_seconds}:
            S = engine.num_positions
            fetch_seconds[B, 1, S] = _fetch_seconds(engine, spec, B, S)
    own = RoundTimes(
        monotone(seconds),
        draft_seconds,
        chunk_seconds,
        short_seconds=monotone(short_seconds),
        beside_seconds=beside_seconds,
        fetch_seconds=fetch_seconds,
    )
    return rounds_of_first(own, processes) or own, statistics.median(spreads or [0.0])


def _spread(tries: Sequence[float]) -> float:
    return (max(tries) - min(tries)) / max(statistics.median(tries), MIN_SECONDS)


@contextlib.contextmanager
def _decoding(
    engines: Sequence[Engine], spec: RolloutSpec, num_slots: int, num_positions: int
) -> Iterator[None]:
    """Have these engines decode plainly, each in a thread, until the body exits."""
    over = threading.Event()

    def decode(engine: Engine) -> None:
        own = dataclasses.replace(spec, params=engine.place(spec.params))
        with TimedFetches(engine, own, (num_slots, num_positions), None) as fetches:
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


def _passes(engine: Engine, num_slots: int) -> list[Pass]:
    """Return the passes of chunks that draw, separately and with a round."""
    alone = [Pass(T, is_beside=False) for T in engine.drawing_chunks(num_slots)]
    return [*alone, *(Pass(T, is_beside=True) for T in engine.beside_chunks)]


def _fetch_seconds(engine: Engine, spec: RolloutSpec, num_slots: int, num_positions: int) -> float:
    """Return the minimum host seconds of a fetch, in a plain rollout in all slots."""
    max_tokens = min(num_positions, engine.longest_tokens or num_positions)
    limit = max(1, min(FETCHES * engine.config.rounds_per_fetch, max_tokens - 1))
    requests = [Request(b, (0,), b, 0, max_new_tokens=limit) for b in range(num_slots)]
    sampling = dataclasses.replace(spec.sampling, stop=())
    own = dataclasses.replace(engine, lockstep=None)
    own.run(dataclasses.replace(spec, sampling=sampling), requests)
    own.free()
    seconds = (r.ready_s - r.began_s + host_seconds([r]) for r in own.stats.timeline)
    return max(min(seconds), MIN_SECONDS)


def _user_digests(drafts: SpeculationConfig) -> dict[str, str]:
    """Return a digest of the file of each drafter and budget of a user, by name."""
    names = filter(is_user_name, (drafts.budget, *drafts.sources))
    return {name: digests.digest_file(split_user_name(name)[0]) for name in names}


def _valid_for(
    engine: Engine,
    sampling: SamplingConfig,
    buckets: list[tuple[int, int, int]],
    reach: Reach,
    num_workers: int,
    speculation: SpeculationConfig,
) -> dict[str, Any]:
    """Return the device, policy shape, buckets, drafts and workers that a table is valid for."""
    device = jax.devices()[0]
    drafts = speculation if reach.speculative else None
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "workers": num_workers,
        "model": repr(engine.model),
        "dtype": str(engine.dtype),
        "draw": [sampling.scheme, engine.may_cut],
        "feature_layers": repr(engine.feature_layers),
        "cache": [engine.config.page_tokens, sorted(engine.first_slots)],
        "mesh": None if engine.mesh is None else repr(engine.mesh.shape),
        "same_bits": sums_in_order_on_accelerators(),
        "rounds_per_fetch": engine.config.rounds_per_fetch,
        "max_nodes": engine.config.max_nodes,
        "chunks": [engine.config.prefill_rows, engine.chunk_tokens, reach.reuse],
        "drawing": engine.drawing_tokens,
        "drafts": [drafts.budget, *drafts.sources] if drafts else [],
        "user_files": _user_digests(drafts) if drafts else {},
        "drafters": {name: d.made_for for name, d in reach.drafters.items()},
        "buckets": [list(bucket) for bucket in buckets],
    }
