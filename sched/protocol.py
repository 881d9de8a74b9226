"""The events that a scheduler receives, and the actions that it returns.

Objects created once a chunk are named tuples, faster to create than frozen dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from reprise.sched.request import Kv, RequestSpec

# --- events -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """New requests of one step, groups together; `of_step` is the step if there are none."""

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
    """A worker died with all its keys and values; the pool's remain."""

    worker_id: int


class ChunkDone(NamedTuple):
    """A request has used up the tokens of its start without ending, and left its worker.

    `generated_tokens` counts all of its starts.
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
    """The update of a training step is done, in `train_s` if measured; its weights are ready."""

    step: int
    train_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """All requests started ahead of their step are to be returned with their tokens so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profiled:
    """The known acceptance of running requests' draft tokens, by request."""

    acceptance: Mapping[int, float]


Event = Submitted | WorkerJoined | WorkerLost | ChunkDone | Finished | Trained | Recalled | Profiled
REPORTS, OF_NO_WORKER = (Finished, ChunkDone), (Submitted, Trained, Recalled, Profiled)

# --- actions ----------------------------------------------------------------------------


class Start(NamedTuple):
    """Run a request on a worker for at most `max_tokens` more tokens.

    `reserved_tokens` positions are reserved for it there; with 0 the worker admits and preempts it.
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
    """A worker releases all its requests at once, with their tokens so far (`ChunkDone`)."""

    worker_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Return:
    """Return a request started ahead of its step to its submitter, with its tokens so far."""

    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Answer a request on a second worker, too, which gets a copy of its state from `worker_id`."""

    request_id: int
    worker_id: int
    start: Start


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """A worker ends a request or a copy that is answered or no longer needed there."""

    request_id: int
    worker_id: int


Action = Start | Defer | Recall | Return | Copy | Drop


class Scheduler(Protocol):
    """Assigns requests to workers over time."""

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        """Return the actions after `event`; `now_s` never decreases."""
        ...

    @property
    def num_unfinished(self) -> int: ...
