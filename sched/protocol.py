"""What a scheduler is told, and what it answers.

A scheduler is a state machine: `handle(event, now_s)` returns actions. It reads no clock and
starts nothing by itself, so that real workers and the simulator drive the same objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from sched.request import Kv, RequestSpec

# --- events -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """Requests to be answered, groups together."""

    asks: tuple[RequestSpec, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker that holds nothing yet, with room for so many positions and requests."""

    worker_id: int
    kv_tokens: int
    max_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died with all that it held; what the pool holds is left."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkDone:
    """A request has had the tokens that its start allowed, and has not ended.

    `generated_tokens` are all that it has so far. The worker holds nothing of it any more.
    """

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int
    pooled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended: by an end token, or at its limit."""

    request_id: int
    worker_id: int
    chunk: int
    generated_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The update of a training step is done: its weights can be had."""

    step: int


Event = Submitted | WorkerJoined | WorkerLost | ChunkDone | Finished | Trained

# --- actions ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Run a request on a worker for at most `max_tokens`, from where it is.

    `reserved_tokens` positions are promised to it there; 0 leaves it to the worker when it
    is admitted, and whether it is pre-empted.
    """

    request_id: int
    worker_id: int
    chunk: int
    max_tokens: int
    reserved_tokens: int
    kv: Kv


@dataclasses.dataclass(frozen=True, slots=True)
class Defer:
    """A request goes on in the next step, with what it has."""

    request_id: int


Action = Start | Defer


class Scheduler(Protocol):
    """Who runs where and when."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        """What is to be done after `event`; time never goes backwards."""
        ...

    @property
    def num_unfinished(self) -> int: ...
