"""What a scheduler knows of a request, of its group, and of a worker."""

from __future__ import annotations

import dataclasses
import enum


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Kv(enum.Enum):
    """How a worker comes by the keys and values of what a request has so far."""

    PREFILL = "prefill"  # the prompt, and all tokens so far, are computed anew
    POOL = "pool"  # they are copied from the host's pool
    HELD = "held"  # it has them still: the chunk before has ended there this moment


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as it is submitted.

    `expected_tokens` is its length where an oracle knows it; `past_tokens` are the lengths of
    the last epoch's responses to its prompt. `step` is the training step that asks. It may
    begin with `prefix_tokens` at once, those of a response that may be reused among them.
    """

    request_id: int
    group_id: int
    prompt_tokens: int
    max_new_tokens: int
    expected_tokens: int | None = None
    past_tokens: tuple[int, ...] = ()
    step: int = 0
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: expected at least one token of prompt and one new "
                f"one, got {self.prompt_tokens} and {self.max_new_tokens}"
            )


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request on its way. `chunk` counts its starts, and tells a late report from a good one."""

    ask: RequestSpec
    generated_tokens: int = 0
    status: Status = Status.WAITING
    worker_id: int | None = None  # where it runs, or ran last
    chunk: int = 0
    pooled: bool = False  # keys and values of all tokens so far are in the pool

    @property
    def remaining_tokens(self) -> int:
        return self.ask.max_new_tokens - self.generated_tokens

    @property
    def prefix_tokens(self) -> int:
        """That its next start may begin with, beyond what it has."""
        return 0 if self.generated_tokens else self.ask.prefix_tokens

    @property
    def total_tokens(self) -> int:
        return self.ask.prompt_tokens + self.generated_tokens


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """Requests with one prompt."""

    group_id: int
    max_new_tokens: int
    num_unfinished: int = 0
    num_finished: int = 0
    longest_tokens: int = 0  # that a request of it has come to so far
    served_tokens: int = 0  # generated for it so far

    @property
    def estimated_tokens(self) -> int:
        """L̂ = the longest so far; the limit until a request has finished (Seer, section 4.3)."""
        return self.longest_tokens if self.num_finished else self.max_new_tokens


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """A rollout instance: what it can hold, and what is promised of that."""

    worker_id: int
    kv_tokens: int
    max_requests: int
    reserved_tokens: int = 0
    running: dict[int, int] = dataclasses.field(default_factory=dict)  # request → tokens reserved

    @property
    def free_tokens(self) -> int:
        return self.kv_tokens - self.reserved_tokens

    def fits(self, tokens: int) -> bool:
        return tokens <= self.free_tokens and len(self.running) < self.max_requests
