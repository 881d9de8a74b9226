"""The messages between programs, and the checks of what comes.

    run's program → worker    Hello, Offered, Weights, DrafterWeights, Compile, Measure, Begin,
                              Give, Poll, Abort, Ping, Gradient
    worker → run's program    Welcome, Has, Done, Measured, Report, Pong, Gradients, Failed: one
                              answer to each
    worker → history worker   see rl/remote/history_service.py

A worker is asked and answers; it never speaks first. `Poll` waits until there is something to tell:
rl/remote/run_messages.py has what is said while a run is under way.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.config import ModelConfig
from rl.drafting.config import Method
from rl.engine.config import EngineConfig
from rl.remote import drafter_messages, records, run_messages
from rl.remote.drafter_messages import (
    NO_DRAFTERS,
    Drafters,
    DrafterWeights,
    Gradient,
    Gradients,
    Tuner,
)
from rl.remote.records import expect
from rl.remote.run_messages import Abort, Give, Poll, Report
from rl.remote.wire import Codec
from rl.speculation.config import SpeculationConfig
from rl.trajectory import HostKv, Request
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.eagle.data_buffer import RequestSample
from spec.reuse.prefix_rule import PrefixRule
from spec.reuse.rollout_cache import CachedGroup, CachedResponse, Scores


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
    drafters: Drafters = NO_DRAFTERS


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
    """The bounds of the rollouts to come (`rl.warm_up.rollout_programs.Reach`).

    `nodes` are the sizes of rounds by slots; None: all. `alone` has the rounds in which one drafter
    on the device drafts for nobody else, by its name and slots: nodes, and draft tokens of a tree.
    `batch` are the rows and tokens of micro-batches that the worker may learn from; None: none.
    """

    sampling: SamplingConfig
    max_requests: int
    max_prompt_tokens: int
    speculative: bool
    reuse: bool
    nodes: Mapping[int, tuple[int, ...]] | None
    alone: Mapping[str, Mapping[int, tuple[tuple[int, int], ...]]] = dataclasses.field(
        default_factory=dict
    )
    batch: tuple[int, int] | None = None


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
    """The arguments of `rl.speculation.sources.Speculation.drafter_factory`, and the history: as
    groups, and as an index whose shards are to be fetched from history workers. Copies of requests
    are drafted for by `methods`, if there are any.
    """

    keys: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    last: Mapping[int, np.ndarray]
    first_group: int
    group_size: int
    history: Mapping[str, CachedGroup]
    shards: bytes = b""  # pickled references
    methods: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The text of the policy's tokens: `models.token_text.TokenBytes`."""

    bytes_N: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A rollout but for its requests: `rl.engine.rollout_spec.RolloutSpec`, and the bounds of one
    worker. `name` is the same for all workers, which draft together by it. The hidden states of
    the requests in `caught` are wanted. `apart`: drafts of a draft model come from other programs.
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
    caught: RequestSample | None = None
    begun: bool = False
    apart: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Begin:
    """Begin a run of the engine, which is numbered: answers to an older one are not heard.

    `tuner` is the state of the worker's bandit, where one decides.
    """

    run: int
    job: Job
    tuner: Tuner | None = None


@dataclasses.dataclass(frozen=True)
class Ping:
    """Asks for a sign of life."""


@dataclasses.dataclass(frozen=True)
class Pong:
    """A sign of life, and remarks for the user since the last one."""

    clock_s: float
    remarks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Done:
    """It was done."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """It was not done; or the run has raised."""

    kind: str
    message: str


ASKED = (
    *(Hello, Weights, Offered, Compile, Measure, Begin, Give, Poll, Abort, Ping),
    *(DrafterWeights, Gradient),
)
ANSWERS = (Welcome, Has, Done, Measured, Report, Pong, Gradients, Failed)
_ARRAYS = (
    records.ARRAYS
    | drafter_messages.ARRAYS
    | {
        Scores: {
            n: records.OF_TOKENS[n] for n in ("logprobs", "emission_logprobs", "policy_versions")
        },
        CachedResponse: {"tokens": ("int32", 1)},
        CachedGroup: {"prompt_ids": ("int32", 1)},
        Text: {"bytes_N": ("uint8", 1), "starts": ("int64", 1)},
        Job: {"key": ("uint32", 1)},
    }
)


def _check_scores(record: CachedResponse) -> None:
    if record.scores is not None:
        sizes = {len(x) for x in vars(record.scores).values()}
        expect(sizes == {len(record.tokens)}, "a score of each token")


def _check_request(record: Request) -> None:
    expect(0 <= record.request_id < 2**62, "a request's number of 62 bits")
    expect(bool(record.prompt_ids) and min(record.prompt_ids) >= 0, "a prompt of token ids")


def _check_kv(record: HostKv) -> None:
    keys, values, features = (getattr(record.entries, n) for n in ("keys", "values", "features"))
    expect(len(keys) == len(values) > 0, "keys and values of each layer")
    expect(all(x.ndim == 3 for x in (*keys, *values, *features)), "arrays of three axes")
    K, S, h = values[0].shape
    same = all(x.shape == (K, h, S) for x in keys) and all(x.shape == (K, S, h) for x in values)
    expect(same, "layers that are alike")


def _check_text(record: Text) -> None:
    starts = record.starts
    whole = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(record.bytes_N)
    expect(whole and bool((np.diff(starts) >= 0).all()), "tokens that share the text's bytes")


def _check_drafting(record: Drafting) -> None:
    expect(len(record.keys) == len(record.prompts), "a key of each prompt")
    known = typing.get_args(Method)
    expect(set(record.methods) <= set(known), f"methods of drafting of {', '.join(known)}")
    for tokens in record.last.values():
        expect((tokens.dtype.name, tokens.ndim) == ("int32", 1), "responses of int32 tokens")


_CHECKS: dict[type, Callable[[Any], None]] = (
    records.CHECKS
    | drafter_messages.CHECKS
    | run_messages.CHECKS
    | {
        CachedResponse: _check_scores,
        Request: _check_request,
        HostKv: _check_kv,
        Text: _check_text,
        Drafting: _check_drafting,
    }
)
CODEC = Codec((*ASKED, *ANSWERS), _ARRAYS, _CHECKS)
