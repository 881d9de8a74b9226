"""The state of requests, groups and workers in a scheduler."""

from __future__ import annotations

import dataclasses
import enum

COPIES = 2**58  # copy k of a request has the request number plus k times this
MAX_COPIES = 7


def copy_of(request_id: int) -> tuple[int, int]:
    """Return the number of the original request and the index of the copy, 0 for the original."""
    number = request_id // COPIES
    return (request_id, 0) if number > MAX_COPIES else (request_id % COPIES, number)


class Status(enum.Enum):
    """The stage of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Kv(enum.Enum):
    """The source of the keys and values for the tokens of a request so far."""

    PREFILL = "prefill"  # compute keys and values
    POOL = "pool"  # copy from the pool on the host
    HELD = "held"  # keep: the previous chunk has just ended there


@dataclasses.dataclass(slots=True)  # never changed; a frozen dataclass takes longer to create
class RequestSpec:
    """A submitted request.

    `expected_tokens` is the response length if an oracle knows it; `past_tokens` are the lengths
    of the responses to the same prompt in the last epoch. A reused response can provide
    `prefix_tokens` immediately. An earlier step waits for an `urgent` request. A request that runs
    `ahead` starts before the weights of its step exist.
    """

    request_id: int
    group_id: int
    prompt_tokens: int
    max_new_tokens: int
    expected_tokens: int | None = None
    past_tokens: tuple[int, ...] = ()
    step: int = 0
    prefix_tokens: int = 0
    urgent: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.request_id}: expected at least one token of prompt and one new "
                f"one, got {self.prompt_tokens} and {self.max_new_tokens}"
            )


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """A request in progress; `chunk` counts its starts, to recognize late reports."""

    spec: RequestSpec
    generated_tokens: int = 0
    status: Status = Status.WAITING
    worker_id: int | None = None  # its current or last worker
    chunk: int = 0
    pooled: bool = False  # keys and values of all tokens so far are in the pool
    request_id: int = dataclasses.field(init=False)
    group_id: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.spec.request_id
        self.group_id = self.spec.group_id

    @property
    def remaining_tokens(self) -> int:
        return self.spec.max_new_tokens - self.generated_tokens

    @property
    def prefix_tokens(self) -> int:
        """Return the number of tokens that the next start may add immediately."""
        return 0 if self.generated_tokens else self.spec.prefix_tokens

    def next_tokens(self, chunk_tokens: int) -> int:
        """Return the maximum number of tokens of the next start."""
        return min(chunk_tokens + self.prefix_tokens, self.remaining_tokens)

    @property
    def total_tokens(self) -> int:
        return self.spec.prompt_tokens + self.generated_tokens


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """The requests of one prompt."""

    group_id: int
    max_new_tokens: int
    request_ids: list[int] = dataclasses.field(default_factory=list)
    num_unfinished: int = 0
    num_finished: int = 0
    longest_tokens: int = 0  # of responses so far
    served_tokens: int = 0  # generated so far

    @property
    def estimated_tokens(self) -> int:
        """Return L̂, the longest response, or the limit until one finishes (Seer, section 4.3)."""
        return self.longest_tokens if self.num_finished else self.max_new_tokens


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """A rollout instance, with its room and the reserved part."""

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
