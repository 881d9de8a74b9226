"""The interface of drafters: plain arrays on the host, one entry per live request.

A rejected draft token costs time, never correctness: verification emits the tokens that plain
decoding would have emitted (spec/verification/verify.py). A = live requests, B = slots, L = tokens
of a request, N = draft tokens.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np

from reprise.spec.config import SamplingConfig

Arguments = tuple[tuple, dict[str, Any]]
Program = tuple[Any, Callable[[], Arguments]]  # a jitted step and a maker of its arguments

PADDING = -1  # a token id that no draw equals


class Source(enum.IntEnum):
    """The origin of a draft token."""

    OTHER = 0
    HISTORY = 1  # responses to the same prompt in the last epoch
    GROUP = 2  # sibling responses, still being generated
    OWN = 3  # the prompt and response of the request itself
    LAST = 4  # the response of the last epoch with the same sample index
    LEARNED = 5  # a learned drafter
    MODEL = 6  # a draft model
    CACHED = 7  # the cached response that the request starts from
    COPY = 8  # the same request on another worker, which is further along


NUM_SOURCES = len(Source)


@dataclasses.dataclass(frozen=True, eq=False)
class LiveSlots:
    """The live requests; `tokens_BL[rows_A[a], :total_tokens_A[a]]` is prompt and response of a.

    `tokens_BL` is a table of the engine: read it only during the call, and never write to it.
    `processing_A3` holds temperature, top-k and top-p per request; None means the settings of the
    rollout.
    """

    rows_A: np.ndarray
    request_ids_A: np.ndarray
    group_ids_A: np.ndarray
    prompt_tokens_A: np.ndarray
    total_tokens_A: np.ndarray
    remaining_tokens_A: np.ndarray
    tokens_BL: np.ndarray
    processing_A3: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows_A)

    def prompt(self, a: int) -> np.ndarray:
        return self.tokens_BL[self.rows_A[a], : self.prompt_tokens_A[a]]

    def response(self, a: int) -> np.ndarray:
        return self.tokens_BL[self.rows_A[a], self.prompt_tokens_A[a] : self.total_tokens_A[a]]

    def take(self, chosen_A: np.ndarray) -> LiveSlots:
        """Return the requests that a mask or an index array chooses."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        whole = ("tokens_BL",) if self.processing_A3 is not None else ("tokens_BL", "processing_A3")
        return LiveSlots(**{k: v if k in whole else v[chosen_A] for k, v in columns.items()})

    def processing(self, rollout: SamplingConfig) -> np.ndarray:
        """Return temperature, top-k and top-p of each request in this rollout; float32 [A, 3]."""
        if self.processing_A3 is not None:
            return self.processing_A3
        one = np.array([rollout.temperature, rollout.top_k, rollout.top_p], np.float32)
        return np.broadcast_to(one, (len(self), 3))


class Drafts(NamedTuple):
    """Trees of draft tokens for the live requests, without roots; the first `count_A` are valid.

    `parents_AN` is −1 for a child of the root, else the index of an earlier draft token. `prob_AN`
    is the estimated probability that a draft token and all its ancestors are accepted; it descends,
    so that the first n tokens of a request are the best tree of that size. `sources_AN` holds
    `Source` values.
    """

    tokens_AN: np.ndarray
    parents_AN: np.ndarray
    prob_AN: np.ndarray
    sources_AN: np.ndarray
    count_A: np.ndarray

    @property
    def max_nodes(self) -> int:
        return self.tokens_AN.shape[1]

    @property
    def cached_A(self) -> np.ndarray:
        """Return which drafts are cached responses; bool [A]."""
        return (self.count_A > 0) & (self.sources_AN[:, 0] == Source.CACHED)

    def take(self, chosen_A: np.ndarray) -> Drafts:
        """Return the drafts of the requests that a mask or an index array chooses."""
        return Drafts(*(x[chosen_A] for x in self))

    def put(self, chosen_A: np.ndarray, drafts: Drafts) -> None:
        """Replace the drafts of the chosen requests."""
        for whole, part in zip(self, drafts, strict=True):
            whole[chosen_A] = part


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """The draft tokens that were accepted; bool [A, N] as in the `Drafts`.

    `accepted_AN` marks the path that the next tokens of a request took, `observed_AN` the draft
    tokens with a known outcome. `verified` is True if a round verified the drafts, and False if
    plain decoding drew the tokens instead.
    """

    verified: bool
    accepted_AN: np.ndarray
    observed_AN: np.ndarray

    def take(self, chosen_A: np.ndarray) -> Acceptance:
        """Return the acceptance of the requests that a mask or an index array chooses."""
        return Acceptance(self.verified, self.accepted_AN[chosen_A], self.observed_AN[chosen_A])


def no_drafts(num_requests: int, max_nodes: int) -> Drafts:
    """Return empty drafts with room for `max_nodes` draft tokens per request."""
    A = num_requests
    N = max_nodes
    drafts = Drafts(
        np.empty((A, N), np.int32),
        np.empty((A, N), np.int32),
        np.zeros((A, N), np.float32),
        np.zeros((A, N), np.uint8),
        np.zeros(A, np.int32),
    )
    drafts.tokens_AN.fill(PADDING)  # several times faster than `np.full`
    drafts.parents_AN.fill(-1)
    return drafts


def fill(
    drafts: Drafts,
    chosen_A: np.ndarray,
    tokens_AM: np.ndarray,
    parents_AM: np.ndarray,
    prob_AM: np.ndarray,
    count_A: np.ndarray,
) -> Drafts:
    """Write the first `count_A` draft tokens of trees into the drafts of requests `chosen_A`."""
    a, m = np.nonzero(np.arange(tokens_AM.shape[1]) < count_A[:, None])
    drafts.tokens_AN[chosen_A[a], m] = tokens_AM[a, m]
    drafts.parents_AN[chosen_A[a], m] = parents_AM[a, m]
    drafts.prob_AN[chosen_A[a], m] = prob_AM[a, m]
    drafts.count_A[chosen_A] = count_A
    return drafts


class RoundsInput(NamedTuple):
    """The drafter's inputs for rounds on the device; `drafting` is static, `cache` is donated."""

    drafting: Any
    cache: Any
    constants: Any
    table_RX: Any
    depth: int


class RoundsDrafter(Protocol):
    """A drafter that can draft on the device, in several rounds between two fetches."""

    depth: int
    source: Source

    @property
    def max_tokens(self) -> int:
        """The most draft tokens per request that the drafter can use."""
        ...

    def enter_rounds(self, live: LiveSlots, max_tokens: int) -> RoundsInput:
        """Complete the cache of all requests, which draft up to `max_tokens` per round."""
        ...

    def leave_rounds(self, live: LiveSlots, cache: Any, acceptance_X2: np.ndarray) -> None:
        """Take back the complete cache, and the acceptance of each request in each round."""
        ...

    def empty_rounds(self, num_slots: int) -> RoundsInput:
        """Return the input for idle rows only, to compile rounds with."""
        ...


class Drafter(Protocol):
    """A source of drafts; the engine calls `propose` at most once per round.

    `propose` gets only requests that may have draft tokens, without requests that continue a cached
    response. `skipped` names the drafters that a union leaves out of the next round. With
    `arrives_later` other workers make the drafts, and the engine retries right after a round
    without drafts. If the drafter `can_lag`, the engine skips `committed` in plain rounds and calls
    `catch_up` before the next `propose`.
    """

    skipped: frozenset[str] = frozenset()
    arrives_later: bool = False

    @property
    def can_lag(self) -> bool:
        """Return whether `committed` serves only the drafts of this worker."""
        return not self.arrives_later

    @abc.abstractmethod
    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Draft up to `max_nodes_A` (1 or more) tokens for each request, at most `max_nodes`.

        A parent comes before its children, and siblings have different tokens; otherwise the round
        raises ValueError.
        """
        ...

    def in_rounds(self) -> RoundsDrafter | None:
        """Return the only drafter of the next rounds if it can draft on the device, else None."""
        return None

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        """Receive the acceptance of the last drafts, for the requests passed to `propose`."""
        return

    def committed(self, live: LiveSlots) -> None:
        """Receive the current request tokens while the device computes; see `can_lag` above."""
        return

    def catch_up(self, live: LiveSlots) -> None:
        """Receive the current tokens of the requests before `propose`, after plain rounds."""
        self.committed(live)

    def finished(self, live: LiveSlots) -> None:
        """Forget these requests, which have finished."""
        return

    def left(self, live: LiveSlots) -> None:
        """Forget these requests, which may continue later, here or on another worker."""
        self.finished(live)


# the prior of acceptance rates: the number of draft tokens that it counts as, and its rate
PRIOR_DRAFTS = 8
PRIOR_PROB = 0.7


def round_acceptance(
    drafts: Drafts, taken_A: np.ndarray, tokens_AN: np.ndarray, emitted_A: np.ndarray
) -> Acceptance:
    """Compare drafts with a round that verified the first `taken_A` draft tokens of each request.

    The last token of the round is never a draft token.
    """
    tokens = drafts.tokens_AN
    accepted_AN = _accepted(tokens, drafts.parents_AN, taken_A, tokens_AN, emitted_A - 1)
    return Acceptance(True, accepted_AN, np.arange(tokens.shape[1]) < taken_A[:, None])


def plain_acceptance(drafts: Drafts, tokens_AN: np.ndarray, emitted_A: np.ndarray) -> Acceptance:
    """Compare drafts with the first `emitted_A` of `tokens_AN`, drawn by plain rounds instead."""
    depth_AN = _depths(drafts.parents_AN, drafts.count_A)
    accepted_AN = _accepted(*drafts[:2], drafts.count_A, tokens_AN, emitted_A)
    return Acceptance(False, accepted_AN, (depth_AN > 0) & (depth_AN <= emitted_A[:, None]))


def longest_paths(drafts: Drafts, observed_AN: np.ndarray) -> np.ndarray:
    """Return the depth of the longest observed path per request, the most that can be accepted."""
    depth_AN = _depths(drafts.parents_AN, drafts.count_A)
    return np.where(observed_AN, depth_AN, 0).max(axis=1, initial=0)


@numba.njit(cache=True, nogil=True)
def by_source(sources_AN, marked_AN):  # type: ignore[no-untyped-def]
    """Return the number of marked draft tokens from each `Source`; int64 [sources]."""
    count = np.zeros(NUM_SOURCES, np.int64)
    for a in range(len(sources_AN)):
        for n in range(sources_AN.shape[1]):
            if marked_AN[a, n]:
                count[sources_AN[a, n]] += 1
    return count


def sums(drafts: Drafts, acceptance: Acceptance) -> tuple[np.ndarray, np.ndarray]:
    """Return the (accepted, expected) numbers of observed draft tokens per request; float64 [A]."""
    return _sums(drafts.prob_AN, acceptance.accepted_AN, acceptance.observed_AN)


@numba.njit(cache=True, nogil=True)
def _sums(prob_AN, accepted_AN, observed_AN):  # type: ignore[no-untyped-def]
    accepted_A = np.zeros(len(prob_AN))
    expected_A = np.zeros(len(prob_AN))
    for a in range(len(prob_AN)):
        for n in range(prob_AN.shape[1]):
            accepted_A[a] += accepted_AN[a, n]
            if observed_AN[a, n]:
                expected_A[a] += prob_AN[a, n]
    return accepted_A, expected_A


@numba.njit(cache=True, nogil=True)
def _accepted(draft_AN, parents_AN, verified_A, tokens_AN, known_A):  # type: ignore[no-untyped-def]
    accepted_AN = np.zeros(draft_AN.shape, np.bool_)
    for a in range(len(verified_A)):
        node = -1
        for j in range(known_A[a]):
            for i in range(node + 1, verified_A[a]):
                if parents_AN[a, i] == node and draft_AN[a, i] == tokens_AN[a, j]:
                    accepted_AN[a, i] = True
                    node = i
                    break
    return accepted_AN


@numba.njit(cache=True, nogil=True)
def _depths(parents_AN, count_A):  # type: ignore[no-untyped-def]
    """Return the depth of each draft token, 1 for children of the root and 0 for padding."""
    depth_AN = np.zeros(parents_AN.shape, np.int32)
    for a in range(len(count_A)):
        for i in range(count_A[a]):
            above = parents_AN[a, i]
            depth_AN[a, i] = 1 if above < 0 else depth_AN[a, above] + 1
    return depth_AN


class RequestIndex:
    """A row number below `size` for each request; numbers of forgotten requests are reused."""

    def __init__(self) -> None:
        self.size = 0
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self._last_ids_A = np.empty(0, np.int64)
        self._last_rows_A = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, live: LiveSlots) -> np.ndarray:
        """Return the number of each live request, int64 [A]; new requests get a free number."""
        ids_A = live.request_ids_A
        if ids_A is not self._last_ids_A:
            if not np.array_equal(ids_A, self._last_ids_A):
                numbers = self._numbers
                for request_id in ids_A.tolist():
                    if request_id not in numbers:
                        if not self._free:
                            self._free.append(self.size)
                            self.size += 1
                        numbers[request_id] = self._free.pop()
                rows = map(numbers.__getitem__, ids_A.tolist())
                self._last_rows_A = np.fromiter(rows, np.int64, len(ids_A))
            self._last_ids_A = ids_A
        return self._last_rows_A

    def forget(self, request_ids: Iterable[int]) -> list[int]:
        """Forget finished requests; return the numbers that they had."""
        had = list[int]()
        for request_id in request_ids:
            if request_id in self._numbers:
                had.append(self._numbers.pop(request_id))
        self._free += had
        if had:
            self._last_ids_A = np.empty(0, np.int64)
        return had


def with_room(rows_F: np.ndarray, size: int, fill: float) -> np.ndarray:
    """Return `rows_F` if it has `size` rows, else a longer copy with new rows set to `fill`."""
    if len(rows_F) >= size:
        return rows_F
    longer = np.full((max(size, 2 * len(rows_F)), *rows_F.shape[1:]), fill, rows_F.dtype)
    longer[: len(rows_F)] = rows_F
    return longer


class PerRequest:
    """A value per request id; new requests start at `start`."""

    def __init__(self, index: RequestIndex, start: float) -> None:
        self._index = index
        self._start = start
        self._values_F = np.empty(0, np.float64)

    def get(self, live: LiveSlots) -> np.ndarray:
        which_A = self._index.of(live)
        self._values_F = with_room(self._values_F, self._index.size, self._start)
        return self._values_F[which_A]

    def set(self, live: LiveSlots, values_A: np.ndarray) -> None:
        which_A = self._index.of(live)
        self._values_F = with_room(self._values_F, self._index.size, self._start)
        self._values_F[which_A] = values_A
