"""The messages between programs, and the checks of what comes.

    run's program → worker    Hello, Offered, Weights, Compile, Measure, Begin, Give, Poll, Abort,
                              Ping
    worker → run's program    Welcome, Has, Done, Measured, Report, Pong, Failed: one answer to each
    worker → draft server     DraftSync, answered with DraftNews

A worker is asked and answers; it never speaks first. `Poll` waits until there is something to tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from models.config import ModelConfig
from rl.engine.config import EngineConfig
from rl.engine.stats import CachedCounts, EngineStats, RoundRecord
from rl.remote.wire import Codec
from rl.speculation.config import SpeculationConfig
from rl.trajectory import HostKv, PartialRequest, Prefix, Request, Trajectory
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.reuse.prefix_rule import PrefixRule
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, Scores

MOST_TEXT = 2**26  # characters of an error, a table


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first words: who asks, and what the worker is to be.

    `identity` has what must be alike in both programs (`rl.cluster.join`). The worker ends itself
    when nobody has spoken to it for `deadline_s`.
    """

    identity: Mapping[str, str]
    policy: str
    number: int
    model: ModelConfig
    engine: EngineConfig
    dtype: str
    devices: int
    deadline_s: float
    speculation: SpeculationConfig
    tuner: TunerConfig
    seed: int


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The worker's own identity, where it runs, and what its clock says."""

    identity: Mapping[str, str]
    host: str
    pid: int
    clock_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The policy's arrays of one version, in the order of the model's tree."""

    version: int
    arrays: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Offered:
    """An offer of the newest weights (`rl.weights.offers`), and the payloads that it speaks of."""

    text: str
    payloads: Mapping[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Has:
    """The version that a worker has taken from an offer."""

    version: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Compile:
    """The bounds of the rollouts to come (`rl.warm_up.compile_buckets.Reach`).

    `nodes` are the sizes of rounds by slots; None: all.
    """

    sampling: SamplingConfig
    max_requests: int
    max_prompt_tokens: int
    speculative: bool
    reuse: bool
    nodes: Mapping[int, tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True)
class Measure:
    """Asks for the seconds of rounds and moves; `rounds` are those that are known already."""

    rounds: str | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The files that `rl.warm_up.measured_run` writes; empty where nothing was measured."""

    rounds: str
    moves: str


@dataclasses.dataclass(frozen=True, eq=False)
class Drafting:
    """The arguments of `rl.speculation.sources.Speculation.drafter_factory`, and the history."""

    keys: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    last: Mapping[int, np.ndarray]
    first_group: int
    group_size: int
    history: Mapping[str, CachedGroup]


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The text of the policy's tokens: `models.token_text.TokenBytes`."""

    bytes_N: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A rollout but for its requests: `rl.engine.rollout_spec.RolloutSpec`, and the bounds of one
    worker. `name` is the same for all workers, which draft together by it.
    """

    name: str
    weights: int
    sampling: SamplingConfig
    key: np.ndarray
    stop_token_ids: tuple[int, ...]
    policy_version: int
    most_requests: int
    longest_tokens: int
    kv_tokens: int
    drafting: Drafting | None
    rule: PrefixRule | None
    words: Text | None


@dataclasses.dataclass(frozen=True, eq=False)
class Begin:
    """Begin a run of the engine, which is numbered: answers to an older one are not heard."""

    run: int
    job: Job


@dataclasses.dataclass(frozen=True, eq=False)
class Give:
    """Requests to start; tokens that others may go on for here (0: they leave); `closed`: no more
    requests will come.
    """

    run: int
    starts: tuple[PartialRequest, ...]
    grants: Mapping[int, int]
    closed: bool


@dataclasses.dataclass(frozen=True)
class Poll:
    """Asks for what has happened; answered when something has, or after `wait_s`."""

    run: int
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Abort:
    """End a run without its results."""

    run: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """Asks for a sign of life."""


@dataclasses.dataclass(frozen=True)
class Pong:
    """A sign of life, and remarks for the user since the last one."""

    clock_s: float
    remarks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ChunkEnded:
    """A request has used up its tokens here: may it have more?"""

    request_id: int
    response_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Parked:
    """A request leaves, with what it has."""

    request_id: int
    prefix: Prefix | None
    kv: HostKv | None


@dataclasses.dataclass(frozen=True, eq=False)
class Answered:
    """A response has ended."""

    trajectory: Trajectory


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


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """All that has happened in a run since the last report, in order; with `stats` it has ended."""

    run: int
    events: tuple[ChunkEnded | Parked | Answered, ...]
    rounds: int
    tokens: int
    stats: Stats | None


@dataclasses.dataclass(frozen=True)
class Done:
    """It was done."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """It was not done; or the run has raised."""

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """New tokens of a request, behind `previous` ones (`spec.retrieval.group`)."""

    group_id: int
    request_id: int
    previous: int
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class DraftSync:
    """The tokens of a worker's requests since it last asked, and counts of all that it knows."""

    job: str
    group_size: int
    pieces: tuple[Piece, ...]
    ended: tuple[tuple[int, int], ...]
    seen: Mapping[int, Mapping[int, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class DraftNews:
    """The tokens of others in these groups, and the groups that are over."""

    pieces: tuple[Piece, ...]
    over: tuple[int, ...]


ASKED = (Hello, Weights, Offered, Compile, Measure, Begin, Give, Poll, Abort, Ping, DraftSync)
ANSWERS = (Welcome, Has, Done, Measured, Report, Pong, Failed, DraftNews)
_OF_TOKENS = {
    "response_ids": ("int32", 1),
    "logprobs": ("float32", 1),
    "emission_logprobs": ("float32", 1),
    "policy_versions": ("int32", 1),
    "origins": ("uint8", 1),
}
_ARRAYS = {
    Trajectory: _OF_TOKENS | {"prompt_ids": ("int32", 1)},
    Prefix: _OF_TOKENS,
    Scores: {n: _OF_TOKENS[n] for n in ("logprobs", "emission_logprobs", "policy_versions")},
    CachedResponse: {"tokens": ("int32", 1)},
    CachedGroup: {"prompt_ids": ("int32", 1)},
    Text: {"bytes_N": ("uint8", 1), "starts": ("int64", 1)},
    Job: {"key": ("uint32", 1)},
    Piece: {"tokens": ("int32", 1)},
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


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected {what}")


def _check_tokens(record: Trajectory | Prefix) -> None:
    n = len(record.response_ids)
    alike = all(len(getattr(record, name)) == n for name in _OF_TOKENS)
    _expect(n > 0 and alike, f"as many of {', '.join(_OF_TOKENS)} as response tokens, at least one")
    if isinstance(record, Prefix):
        _expect(0 <= record.reused_tokens <= n, f"reused tokens of at most {n}")


def _check_scores(record: CachedResponse) -> None:
    if record.scores is not None:
        sizes = {len(x) for x in vars(record.scores).values()}
        _expect(sizes == {len(record.tokens)}, "a score of each token")


def _check_request(record: Request) -> None:
    _expect(0 <= record.request_id < 2**62, "a request's number of 62 bits")
    _expect(bool(record.prompt_ids) and min(record.prompt_ids) >= 0, "a prompt of token ids")


def _check_kv(record: HostKv) -> None:
    keys, values, features = (getattr(record.entries, n) for n in ("keys", "values", "features"))
    _expect(len(keys) == len(values) > 0, "keys and values of each layer")
    _expect(all(x.ndim == 3 for x in (*keys, *values, *features)), "arrays of three axes")
    K, S, h = values[0].shape
    same = all(x.shape == (K, h, S) for x in keys) and all(x.shape == (K, S, h) for x in values)
    _expect(same, "layers that are alike")


def _check_text(record: Text) -> None:
    starts = record.starts
    whole = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(record.bytes_N)
    _expect(whole and bool((np.diff(starts) >= 0).all()), "tokens that share the text's bytes")


def _check_drafting(record: Drafting) -> None:
    _expect(len(record.keys) == len(record.prompts), "a key of each prompt")
    for tokens in record.last.values():
        _expect((tokens.dtype.name, tokens.ndim) == ("int32", 1), "responses of int32 tokens")


def _check_give(record: Give) -> None:
    _expect(all(tokens >= 0 for tokens in record.grants.values()), "tokens of 0 or more")


def _check_stats(record: Stats) -> None:
    n, offsets = len(record.seconds), record.offsets
    _expect(record.rounds.shape[1:] == (4,), "rounds by slots, nodes and positions, counted")
    _expect(record.seconds.shape == (n, len(_SECONDS)), "the seconds of a round")
    _expect(record.counts.shape == (n, len(_COUNTS)), "the counts of a round")
    ordered = len(offsets) == n + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    _expect(ordered, "the requests of each round")
    _expect(record.of_requests.shape == (len(_COLUMNS), offsets[-1]), "a column of each request")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Trajectory: _check_tokens,
    Prefix: _check_tokens,
    CachedResponse: _check_scores,
    Request: _check_request,
    HostKv: _check_kv,
    Text: _check_text,
    Drafting: _check_drafting,
    Give: _check_give,
    Stats: _check_stats,
}
CODEC = Codec((*ASKED, *ANSWERS), _ARRAYS, _CHECKS)

_SECONDS = ("began_s", "ready_s", "drafted_s", "called_s", "fetched_s", "ended_s")
_COUNTS = ("num_slots", "num_nodes", "num_positions", "cached_nodes", "prompt_tokens")
_COLUMNS = ("request_ids_A", "cached_tokens_A", "rounds_A", "emitted_A")


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


def pieces_of(pieces: Sequence[Piece]) -> list[tuple[int, int, int, np.ndarray]]:
    """Return pieces as `spec.retrieval.group` has them."""
    return [(p.group_id, p.request_id, p.previous, p.tokens) for p in pieces]
