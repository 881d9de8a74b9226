"""Records of the rounds of a rollout, for metrics, plots and costs."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reprise.models.folder import read_plain, replace_file
from reprise.rl.records.worker_record import WorkerEvent, WorkerPart, of_json
from reprise.rl.runtime.run_files import TIMELINE_FILE
from reprise.sched.request import copy_of
from reprise.spec.drafter import Acceptance, Drafts, Source, by_source
from reprise.spec.round_times import RoundTimes

MAX_TIMELINE_BYTES = 2**28
PAUSE = 4.0  # times the usual seconds: above any normal round of a kind, below a pause
FEW = 4  # fewer fetches of a kind are too few for a median


@dataclasses.dataclass(frozen=True, eq=False)
class RoundRecord:
    """One fetch: its seconds on the engine clock, its bucket, and the tokens of A requests.

    Each time marks the end of a phase: prompts and moves (`ready_s`), drafting, packing and the
    first call, waiting for the device (`fetched_s`), and committing. If `num_nodes` equals
    `num_slots`, the fetch is plain decoding of max(`rounds_A`) rounds; `rounds_A` counts the rounds
    of each request. `cached_nodes` were tokens of cached responses. Besides the nodes,
    `prompt_tokens` were computed, and `cached_in_chunks` were decided on in a pass, with tokens
    that would take `plain_rounds` plain rounds of all rows. The fetch waited for compilation if
    `num_compiled` is not 0. `pricing_seconds` before `drafted_s` were spent on pricing cached
    tokens.
    """

    began_s: float
    ready_s: float
    drafted_s: float
    called_s: float
    fetched_s: float
    ended_s: float
    num_slots: int
    num_nodes: int
    num_positions: int
    request_ids_A: np.ndarray
    cached_tokens_A: np.ndarray
    rounds_A: np.ndarray
    emitted_A: np.ndarray
    cached_nodes: int = 0
    prompt_tokens: int = 0
    cached_in_chunks: int = 0
    plain_rounds: float = 0.0
    num_compiled: int = 0
    pricing_seconds: float = 0.0

    @property
    def drafted(self) -> bool:
        """Return whether the fetch verified draft tokens."""
        return self.num_nodes > self.num_slots

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, at least one."""
        return max(int(self.rounds_A.max(initial=0)), 1)

    def seconds_in(self, times: RoundTimes, num_nodes: int) -> float | None:
        """Return the measured seconds of a round of these rows with `num_nodes` nodes."""
        live_tokens = float(self.cached_tokens_A.mean()) if len(self.cached_tokens_A) else None
        return times(self.num_slots, num_nodes, self.num_positions, live_tokens)

    def moved(self, by_s: float) -> RoundRecord:
        """Return this record with all times moved `by_s` seconds later."""
        names = [f.name for f in dataclasses.fields(self) if f.name.endswith("_s")]
        return dataclasses.replace(self, **{name: getattr(self, name) + by_s for name in names})


def _per_source() -> np.ndarray:
    return np.zeros(len(Source), np.int64)


@dataclasses.dataclass
class CachedCounts:
    """Counts of the cached responses that requests started from, and of their tokens.

    `kept_tokens` of the `tokens` were kept, `whole` of the `responses` entirely.
    """

    responses: int = 0
    whole: int = 0
    tokens: int = 0
    kept_tokens: int = 0

    def __add__(self, more: CachedCounts) -> CachedCounts:
        pairs = ((getattr(self, f.name), getattr(more, f.name)) for f in dataclasses.fields(self))
        return CachedCounts(*(mine + other for mine, other in pairs))

    def add(self, num_tokens: int, kept_tokens: int) -> None:
        self.responses += 1
        self.whole += kept_tokens == num_tokens
        self.tokens += num_tokens
        self.kept_tokens += kept_tokens

    @property
    def decided_tokens(self) -> int:
        """Return the tokens decided on; a response has none after its first rejected token."""
        return self.kept_tokens + self.responses - self.whole


@dataclasses.dataclass(frozen=True)
class PoolCounts:
    """Keys and values of requests in transit between two workers, in the memory of the driver.

    `moved_bytes` were received from or sent to a worker; `dropped_tokens` were dropped in transit,
    with their `dropped_bytes`, and are recomputed.
    """

    moved_bytes: int = 0
    dropped_bytes: int = 0
    dropped_tokens: int = 0

    def __add__(self, more: PoolCounts) -> PoolCounts:
        return PoolCounts(
            self.moved_bytes + more.moved_bytes,
            self.dropped_bytes + more.dropped_bytes,
            self.dropped_tokens + more.dropped_tokens,
        )

    def since(self, before: PoolCounts) -> PoolCounts:
        """Return the counts since an earlier state `before`."""
        return PoolCounts(
            self.moved_bytes - before.moved_bytes,
            self.dropped_bytes - before.dropped_bytes,
            self.dropped_tokens - before.dropped_tokens,
        )


@dataclasses.dataclass
class EngineStats:
    """Counts of one rollout; `rounds[(slots, nodes, positions)]` gives its cost on other hardware.

    The arrays of verified and of accepted draft tokens have one entry per `spec.drafter.Source`.
    """

    fetches: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    preemptions: int = 0
    cached: CachedCounts = dataclasses.field(default_factory=CachedCounts)
    begun: CachedCounts = dataclasses.field(default_factory=CachedCounts)  # of early tokens
    drafted_by_source: np.ndarray = dataclasses.field(default_factory=_per_source)
    accepted_by_source: np.ndarray = dataclasses.field(default_factory=_per_source)
    rounds: collections.Counter[tuple[int, int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )
    timeline: list[RoundRecord] = dataclasses.field(default_factory=list)
    parts: list[WorkerPart] = dataclasses.field(default_factory=list)  # of several workers
    events: list[WorkerEvent] = dataclasses.field(default_factory=list)
    pool: PoolCounts = PoolCounts()

    def count(self, drafts: Drafts, acceptance: Acceptance) -> None:
        """Add the draft tokens that a round verified."""
        self.drafted_by_source += by_source(drafts.sources_AN, acceptance.observed_AN)
        self.accepted_by_source += by_source(drafts.sources_AN, acceptance.accepted_AN)

    @property
    def drafted_nodes(self) -> int:
        return int(self.drafted_by_source.sum())

    @property
    def accepted_tokens(self) -> int:
        return int(self.accepted_by_source.sum())


def joined(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the total counts of several rollouts, with their rounds in order of start time."""
    total = parts[0]
    for more in parts[1:]:
        total = EngineStats(
            *(getattr(total, f.name) + getattr(more, f.name) for f in dataclasses.fields(total))
        )
    if len(parts) > 1:  # rounds of workers overlap
        total.timeline.sort(key=lambda r: r.began_s)
    return total


def speculation_metrics(stats: EngineStats, times: RoundTimes | None = None) -> dict[str, float]:
    """Return the acceptance of draft tokens in a rollout, in total and by source; {} without any.

    With the measured `times` of a run, the metrics also have the seconds that drafts saved and the
    seconds of rounds that `undisturbed` leaves out. `tokens_per_round` is per request; `host_share`
    is the share of the host in the seconds of rounds with draft tokens.
    """
    drafted = stats.drafted_nodes
    accepted = stats.accepted_tokens
    metrics = dict[str, float]()
    clean = undisturbed(stats.timeline, times)
    if times is not None:
        of_cached = int(stats.accepted_by_source[Source.CACHED])
        metrics["spec/accepted_tokens"] = float(accepted - of_cached)
        metrics["spec/seconds_saved"] = seconds_saved(without_reuse(clean), times)
        metrics["spec/disturbed_seconds"] = _seconds(stats.timeline) - _seconds(clean)
    rounds = [r for r in stats.timeline if r.num_nodes > r.num_slots]
    if not rounds:
        return metrics
    clean = [r for r in clean if r.num_nodes > r.num_slots]
    requests = sum([int(r.rounds_A.sum()) for r in rounds])
    emitted = sum([int(r.emitted_A.sum()) for r in rounds])
    metrics |= {
        "spec/accept_rate": accepted / max(drafted, 1),
        "spec/tokens_per_round": emitted / requests,
        "spec/drafted_per_round": drafted / requests,
        "spec/speculated_fraction": accepted / max(stats.tokens, 1),
        "spec/wasted_nodes": float(drafted - accepted),
        "spec/draft_seconds": sum([r.drafted_s - r.ready_s for r in clean]),
        "spec/verify_seconds": sum([r.fetched_s - r.called_s for r in clean]),
        "spec/host_share": host_share(clean),
    }
    for source in Source:
        if verified := int(stats.drafted_by_source[source]):
            name = source.name.lower()
            accepted = int(stats.accepted_by_source[source])
            metrics[f"spec/{name}/accept_rate"] = accepted / verified
            metrics[f"spec/{name}/speculated_fraction"] = accepted / max(stats.tokens, 1)
    return metrics


def undisturbed(
    rounds: Sequence[RoundRecord], times: RoundTimes | None = None
) -> list[RoundRecord]:
    """Return the rounds that waited neither for compilation nor for a paused machine.

    A fetch of n rounds in s seconds had a pause if

        s > `PAUSE` · max(median of s, n · median of s / n)

    with medians over the fetches of its kind. For fewer than `FEW` such fetches, if `times` has the
    seconds t of their rounds: s > `PAUSE` · n · t · pace, where pace is the median ratio of seconds
    to table seconds over kinds with enough fetches.
    """
    clean = [r for r in rounds if not r.num_compiled]
    alike = dict[tuple[int | bool, ...], list[RoundRecord]]()
    for r in clean:
        kind = bool(r.prompt_tokens), bool(r.cached_nodes), bool(r.cached_in_chunks)
        alike.setdefault((r.num_slots, r.num_nodes, r.num_positions, *kind), []).append(r)
    seconds = {}  # of each kind: the fetches, their numbers of rounds, and a round in the table
    paces = []
    for key, some in alike.items():
        fetch_s = np.array([r.ended_s - r.ready_s for r in some])
        num_rounds = np.array([max(int(r.rounds_A.max(initial=0)), 1) for r in some])
        table_s = times(*key[:3]) if times and not any(key[3:]) else None
        seconds[key] = fetch_s, num_rounds, table_s
        if table_s and len(some) >= FEW:
            paces.append(np.median(fetch_s / num_rounds) / table_s)
    paused = set[int]()
    for key, some in alike.items():
        fetch_s, num_rounds, table_s = seconds[key]
        usual_s = np.median(fetch_s)
        usual_round_s = np.median(fetch_s / num_rounds)
        if len(some) < FEW:
            usual_s = 0.0
            usual_round_s = table_s * np.median(paces) if paces and table_s else math.inf
        is_pause = fetch_s > PAUSE * np.maximum(usual_s, num_rounds * usual_round_s)
        paused |= {id(some[i]) for i in np.nonzero(is_pause)[0].tolist()}
    return [r for r in clean if id(r) not in paused]


def _seconds(rounds: Sequence[RoundRecord]) -> float:
    return sum([r.ended_s - r.began_s for r in rounds])


def without_reuse(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Return the rounds that verified no tokens of cached responses."""
    return [r for r in rounds if not r.cached_nodes and not r.cached_in_chunks]


def seconds_saved(rounds: Sequence[RoundRecord], times: RoundTimes) -> float:
    """Return an estimate of the seconds that drafts saved against plain decoding.

    A round that emits e tokens to A requests counts as e / A plain rounds of measured seconds,
    minus its seconds on device and host. If the round also computed prompts, as plain decoding
    would, its device time is the measured time without prompts. Drafting before plain rounds is a
    loss.
    """
    saved_s = 0.0
    for r in rounds:
        if r.num_nodes == r.num_slots:
            saved_s -= r.drafted_s - r.ready_s - r.pricing_seconds
            continue
        plain_s = r.seconds_in(times, r.num_slots)
        assert plain_s is not None, f"no measured plain round of {r.num_slots} slots"
        device_s = r.fetched_s - r.called_s
        if r.prompt_tokens:  # a budget that needs no table has measured plain rounds only
            device_s = r.seconds_in(times, r.num_nodes) or device_s
        tokens = float(r.emitted_A[r.rounds_A > 0].mean())
        host_s = r.called_s - r.ready_s + r.ended_s - r.fetched_s - r.pricing_seconds
        saved_s += tokens * plain_s - host_s - device_s
    return saved_s


def tail_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds from when nine tenths of the requests are finished until all are."""
    ends = {i: r.ended_s for r in rounds for i in r.request_ids_A.tolist()}
    ends_s = sorted(ends.values())
    return ends_s[-1] - ends_s[-math.ceil(0.1 * len(ends_s)) - 1] if len(ends_s) > 1 else 0.0


def cached_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds of rounds, weighted by the share of cached tokens in each round."""
    return sum(
        (r.ended_s - r.ready_s)
        * (r.cached_nodes + r.cached_in_chunks)
        / (r.num_nodes + r.prompt_tokens + r.cached_in_chunks)
        for r in undisturbed(rounds)
    )


def host_share(rounds: Sequence[RoundRecord]) -> float:
    """Return the fraction of time after admission that the device waited for the host."""
    return host_seconds(rounds) / max(sum([r.ended_s - r.ready_s for r in rounds]), 1e-9)


def host_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Return the seconds of drafting, packing, calling and committing."""
    return sum([r.called_s - r.ready_s + r.ended_s - r.fetched_s for r in rounds])


def save_timeline(folder: Path, step: int, rounds: Sequence[RoundRecord]) -> None:
    """Write the rounds of a step to the run folder, in place of the previous step.

    Rounds of a copy count as rounds of its request.
    """
    rows = [
        {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(r).items()}
        for r in rounds
    ]
    for row in rows:
        row["request_ids_A"] = [copy_of(request_id)[0] for request_id in row["request_ids_A"]]
    replace_file(folder / TIMELINE_FILE, json.dumps({"step": step, "rounds": rows}))


def load_timeline(folder: Path) -> tuple[int, list[RoundRecord]]:
    """Return (step, rounds) as last saved, or (0, []) without a file.

    Raises ValueError for a file that `save_timeline` did not write.
    """
    path = folder / TIMELINE_FILE
    if not os.path.lexists(path):
        return 0, []
    text = read_plain(path, MAX_TIMELINE_BYTES)
    try:
        record = json.loads(text)
        step: int = of_json(record["step"], int)
        rounds: list[RoundRecord] = [of_json(row, RoundRecord) for row in record["rounds"]]
        for r in rounds:
            if len({len(x) for k, x in vars(r).items() if k.endswith("_A")}) != 1:
                raise ValueError("a round of different numbers of requests")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a timeline that a run wrote ({error}): delete it"
        ) from error
    return step, rounds
