"""Messages between workers, their driver, and the owner of the session."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from reprise.rl.engine.engine import ChunkEnd
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import PartialRequest, Trajectory
from reprise.rl.records.worker_record import Kind
from reprise.rl.runtime.waits import Hang, ProgramLost
from reprise.sched.request import copy_of


@dataclasses.dataclass(frozen=True)
class WorkerLimits:
    """Limits of each worker; `has_steps_apart` runs requests only in the rollout of their step."""

    kv_tokens: int
    max_requests: int
    max_tokens: int
    has_steps_apart: bool = False


# --- commands: driver → worker ----------------------------------------------------------


class Prepare(NamedTuple):
    """The rollout of a step, sent before its first request; steps before `oldest` are dropped."""

    step: int
    spec: Any
    oldest: int


class Begin(NamedTuple):
    step: int
    partial: PartialRequest


class Extend(NamedTuple):
    """Continue a request in its row, after a chunk has ended."""

    request_id: int
    max_tokens: int


class Take(NamedTuple):
    """Return a request with its keys and values, after a chunk has ended (`Left`)."""

    request_id: int
    ticket: int


class Fork(NamedTuple):
    """Return a copy of a request, which keeps running on this worker (`Left`)."""

    request_id: int
    ticket: int


class Remove(NamedTuple):
    """Stop a request without a response."""

    request_id: int


class Release(NamedTuple):
    """Return all requests with their tokens, without keys and values (`Released`)."""


Command = Prepare | Begin | Extend | Take | Fork | Remove | Release

# --- events: worker → driver ------------------------------------------------------------


class Left(NamedTuple):
    """The state of a taken or forked request; None if the request does not run on this worker."""

    ticket: int
    partial: PartialRequest | None


class Released(NamedTuple):
    partials: list[PartialRequest]


Event = Trajectory | ChunkEnd | Left | Released


class Report(NamedTuple):
    """The events of a call, the step of the open rollout, and the rollout statistics so far."""

    step: int | None
    events: Sequence[Event]
    stats: EngineStats
    is_idle: bool


# --- results: driver → owner ------------------------------------------------------------


class WorkerError(RuntimeError):
    """A worker raised an exception or hangs; the message names the requests that it was running."""

    def __init__(self, worker_id: int, request_ids: Sequence[int], error: BaseException) -> None:
        originals = dict.fromkeys(copy_of(r)[0] for r in request_ids)
        shown = ", ".join(map(str, originals)) or "none"
        super().__init__(
            f"worker {worker_id} failed on requests {shown}: {type(error).__name__}: {error}"
        )
        self.worker_id = worker_id
        self.__cause__ = error

    @property
    def kind(self) -> Kind:
        """Return how the worker was lost."""
        if isinstance(self.__cause__, ProgramLost):
            return "hung" if self.__cause__.silent else "killed"
        return "hung" if isinstance(self.__cause__, Hang) else "raised"


@dataclasses.dataclass(frozen=True)
class Deferred:
    """An unfinished request that was deferred to the next step."""

    request_id: int


@dataclasses.dataclass(frozen=True, eq=False)
class Returned:
    """An unfinished request that was started ahead of its step and has left its worker."""

    partial: PartialRequest


Result = Trajectory | Deferred | Returned | BaseException
