"""The events that a scheduler is told of, and the actions that it answers with.

A scheduler is a state machine: `handle(event, now_s)` returns actions. It reads no clock and
starts nothing by itself, so that real workers and the simulator drive the same objects.
What is made once a chunk is a named tuple, which takes a third of the time of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from sched.request import Kv, RequestSpec

# --- events -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """Requests of one step to be answered, groups together.

    Where there are none, as one of several processes may have none of a step, `of_step` names it.
    """

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
    """A worker died with all keys and values that it held; those in the pool remain."""

    worker_id: int


class ChunkDone(NamedTuple):
    """A request has used up the tokens of its start without ending.

    `generated_tokens` counts all of its starts. The worker holds nothing of it any more.
    """

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int
    pooled: bool


class Finished(NamedTuple):
    """A request has ended, by an end token or at its limit."""

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The update of a training step is done, and its weights are available.

    It took `train_s`, where that was measured.
    """

    step: int
    train_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """Requests that were begun ahead of their step are wanted back, as far as they have come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """The acceptance of running requests' draft tokens, as far as it is known; by request."""

    acceptance: Mapping[int, float]


Event = Submitted | WorkerJoined | WorkerLost | ChunkDone | Finished | Trained | Recalled | Profiled
REPORTS, OF_NO_WORKER = (Finished, ChunkDone), (Submitted, Trained, Recalled, Profiled)

# --- actions ----------------------------------------------------------------------------


class Start(NamedTuple):
    """Run a request on a worker for at most `max_tokens` more tokens.

    `reserved_tokens` positions are reserved for it there; with 0 the worker decides when to
    admit it, and may preempt it.
    """

    request_id: int
    worker_id: int
    chunk: int
    max_tokens: int
    reserved_tokens: int
    kv: Kv


@dataclasses.dataclass(frozen=True, slots=True)
class Defer:
    """Resume a request in the next step, with the tokens that it has."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recall:
    """All that a worker runs leaves it at once, with the tokens that it has (`ChunkDone`)."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Return:
    """Give a request that was begun ahead back to whoever submitted it, as far as it has come."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Answer a request a second time, beside its own worker: `start` is that of the copy.

    The worker that runs the request hands a copy of what it has over.
    """

    request_id: int
    worker_id: int
    start: Start


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """A worker ends a request, or a copy of one, whose answer is there or not wanted there."""

    request_id: int
    worker_id: int


Action = Start | Defer | Recall | Return | Copy | Drop


@dataclasses.dataclass(frozen=True)
class SchedulerDecision:
    """An event, its time, and the actions that a scheduler answered with."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


class Scheduler(Protocol):
    """Decides which request runs on which worker, and when."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        """Return what to do after `event`; `now_s` never decreases."""
        ...

    @property
    def num_unfinished(self) -> int: ...
