"""The events that a scheduler receives, and the actions that it returns.

Objects created once per chunk are named tuples, which are faster to create than frozen dataclasses.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from reprise.sched.request import Kv, RequestSpec

# --- events -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """New requests of one step, each group together; `of_step` is the step of an empty event."""

    requests: tuple[RequestSpec, ...]
    of_step: int = 0

    @property
    def step(self) -> int:
        return self.requests[0].step if self.requests else self.of_step


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new worker, with room for `kv_tokens` positions and `max_requests` requests."""

    worker_id: int
    kv_tokens: int
    max_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died with all its keys and values; copies in the pool remain."""

    worker_id: int


class ChunkDone(NamedTuple):
    """A request left its worker unfinished, after all tokens of its start or a recall.

    `generated_tokens` counts the tokens of all starts.
    """

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int
    pooled: bool


class Finished(NamedTuple):
    """A request has finished, with an end token or at its limit."""

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The update of a step has finished, in `train_s` if measured; its weights are available."""

    step: int
    train_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """The submitter recalls all requests started ahead of their step, with their tokens so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """The known draft-token acceptance of running requests, by request."""

    acceptance: Mapping[int, float]


Event = Submitted | WorkerJoined | WorkerLost | ChunkDone | Finished | Trained | Recalled | Profiled
REPORTS = (Finished, ChunkDone)
OF_NO_WORKER = (Submitted, Trained, Recalled, Profiled)

# --- actions ----------------------------------------------------------------------------


class Start(NamedTuple):
    """Run a request on a worker for at most `max_tokens` more tokens.

    The worker reserves `reserved_tokens` positions; with 0, it admits and preempts the request.
    """

    request_id: int
    worker_id: int
    chunk: int
    max_tokens: int
    reserved_tokens: int
    kv: Kv


@dataclasses.dataclass(frozen=True, slots=True)
class Defer:
    """Resume a request in the next step, with its tokens so far."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recall:
    """Make a worker release all its requests now, with their tokens so far (`ChunkDone`)."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Return:
    """Return a request started ahead of its step to its submitter, with its tokens so far."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Run a request on a second worker too, from a copy of its state on `worker_id`."""

    request_id: int
    worker_id: int
    start: Start


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Make a worker stop a request or a copy that is answered or no longer needed there."""

    request_id: int
    worker_id: int


Action = Start | Defer | Recall | Return | Copy | Drop


class Scheduler(Protocol):
    """A state machine that assigns requests to workers over time."""

    @abc.abstractmethod
    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        """Return the actions in response to `event`; `now_s` never decreases."""
        ...

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Return the number of submitted requests that have not finished."""
        ...
