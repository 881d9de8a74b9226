"""Records that messages of several kinds hold: responses, and the counts of a rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rl.engine.stats import CachedCounts, EngineStats, RoundRecord
from rl.remote.wire import ArraySpec
from rl.trajectory import Prefix, Trajectory

OF_TOKENS: dict[str, ArraySpec] = {
    "response_ids": ("int32", 1),
    "logprobs": ("float32", 1),
    "emission_logprobs": ("float32", 1),
    "policy_versions": ("int32", 1),
    "origins": ("uint8", 1),
}
_SECONDS = ("began_s", "ready_s", "drafted_s", "called_s", "fetched_s", "ended_s")
_COUNTS = ("num_slots", "num_nodes", "num_positions", "cached_nodes", "prompt_tokens")
_COLUMNS = ("request_ids_A", "cached_tokens_A", "rounds_A", "emitted_A")


@dataclasses.dataclass(frozen=True, eq=False)
class Stats:
    """`rl.engine.stats.EngineStats` in few arrays; rounds and requests are rows."""

    fetches: int
    tokens: int
    prefilled_tokens: int
    preemptions: int
    cached: CachedCounts
    drafted_by_source: np.ndarray
    accepted_by_source: np.ndarray
    rounds: np.ndarray
    seconds: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    of_requests: np.ndarray


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected {what}")


def check_tokens(record: Trajectory | Prefix) -> None:
    n = len(record.response_ids)
    alike = all(len(getattr(record, name)) == n for name in OF_TOKENS)
    expect(n > 0 and alike, f"as many of {', '.join(OF_TOKENS)} as response tokens, at least one")
    if isinstance(record, Prefix):
        expect(0 <= record.reused_tokens <= n, f"reused tokens of at most {n}")


def _check_stats(record: Stats) -> None:
    n, offsets = len(record.seconds), record.offsets
    expect(record.rounds.shape[1:] == (4,), "rounds by slots, nodes and positions, counted")
    expect(record.seconds.shape == (n, len(_SECONDS)), "the seconds of a round")
    expect(record.counts.shape == (n, len(_COUNTS)), "the counts of a round")
    ordered = len(offsets) == n + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    expect(ordered, "the requests of each round")
    expect(record.of_requests.shape == (len(_COLUMNS), offsets[-1]), "a column of each request")


ARRAYS: dict[type, dict[str, ArraySpec]] = {
    Trajectory: OF_TOKENS | {"prompt_ids": ("int32", 1)},
    Prefix: OF_TOKENS,
    Stats: {
        "drafted_by_source": ("int64", 1),
        "accepted_by_source": ("int64", 1),
        "rounds": ("int64", 2),
        "seconds": ("float64", 2),
        "counts": ("int64", 2),
        "offsets": ("int64", 1),
        "of_requests": ("int64", 2),
    },
}
CHECKS: dict[type, Callable[[Any], None]] = {
    Trajectory: check_tokens,
    Prefix: check_tokens,
    Stats: _check_stats,
}


def of_stats(stats: EngineStats) -> Stats:
    """Return counts as a message."""
    rows, n = stats.timeline, len(stats.timeline)
    offsets = np.cumsum([0, *(len(r.request_ids_A) for r in rows)])
    columns = [
        np.concatenate([np.zeros(0, np.int64), *(getattr(r, c) for r in rows)]) for c in _COLUMNS
    ]
    return Stats(
        *(stats.fetches, stats.tokens, stats.prefilled_tokens, stats.preemptions, stats.cached),
        stats.drafted_by_source,
        stats.accepted_by_source,
        np.array([[*at, count] for at, count in stats.rounds.items()], np.int64).reshape(-1, 4),
        np.array([[getattr(r, c) for c in _SECONDS] for r in rows], np.float64).reshape(n, -1)
        if n
        else np.zeros((0, len(_SECONDS))),
        np.array([[getattr(r, c) for c in _COUNTS] for r in rows], np.int64).reshape(n, -1)
        if n
        else np.zeros((0, len(_COUNTS)), np.int64),
        offsets.astype(np.int64),
        np.stack(columns).astype(np.int64),
    )


def enter_stats(stats: EngineStats, told: Stats, *, later_s: float = 0.0) -> None:
    """Set `stats` to what was told; the worker's clock is `later_s` behind this program's."""
    for name in ("fetches", "tokens", "prefilled_tokens", "preemptions", "cached"):
        setattr(stats, name, getattr(told, name))
    stats.drafted_by_source, stats.accepted_by_source = (
        told.drafted_by_source,
        told.accepted_by_source,
    )
    stats.rounds.clear()
    stats.rounds.update({(b, m, s): count for b, m, s, count in told.rounds.tolist()})
    stats.timeline[:] = [
        _round(told, i, first, end, later_s)
        for i, (first, end) in enumerate(zip(told.offsets, told.offsets[1:], strict=False))
    ]


def _round(told: Stats, i: int, first: int, end: int, later_s: float) -> RoundRecord:
    seconds = dict(zip(_SECONDS, (told.seconds[i] + later_s).tolist(), strict=True))
    counts = dict(zip(_COUNTS, told.counts[i].tolist(), strict=True))
    columns = dict(zip(_COLUMNS, told.of_requests[:, first:end], strict=True))
    return RoundRecord(**seconds, **counts, **columns)
