"""The contract of drafters: plain arrays on the host, one entry per live request.

A draft token that is rejected costs time, never correctness: the verification kernel
emits what plain decoding would have emitted (spec/verify.py). A = live requests,
B = slots, L = tokens of a request, N = draft tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from spec.config import SamplingConfig

Arguments = tuple[tuple, dict[str, Any]]
Program = tuple[Any, Callable[[], Arguments]]  # a jitted step and a maker of its arguments

PADDING = -1  # of tokens; no draw equals it


class Source(enum.IntEnum):
    """The origin of a draft token."""

    OTHER = 0
    HISTORY = 1  # the prompt's responses of the last epoch
    GROUP = 2  # siblings that are being generated
    OWN = 3  # the request's own prompt and response
    LAST = 4  # the response of last epoch by the same sample index
    LEARNED = 5  # a learned drafter
    MODEL = 6  # a draft model
    CACHED = 7  # the cached response that the request starts from
    COPY = 8  # the same request on another worker, which is further


@dataclasses.dataclass(frozen=True, eq=False)
class LiveSlots:
    """The live requests; `tokens_BL[rows_A[a], :total_tokens_A[a]]` is prompt and response of a.

    `tokens_BL` is the engine's own table: read it during the call only, and never write to it.
    `processing_A3` holds temperature, top-k and top-p of each; None: those of the rollout.
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
        """Return temperature, top-k and top-p of each, in this rollout; float32 [A, 3]."""
        if self.processing_A3 is not None:
            return self.processing_A3
        one = np.array([rollout.temperature, rollout.top_k, rollout.top_p], np.float32)
        return np.broadcast_to(one, (len(self), 3))


class Drafts(NamedTuple):
    """A tree of draft tokens for each live request, without its root; `count_A` of each are valid.

    `parents_AN` is −1 for a child of the root, else the index of an earlier draft token.
    `prob_AN` is the estimated probability that the draft token and all its ancestors are
    accepted. Draft tokens come in descending order of it, so that a request's first n are a tree,
    and the best of that size. `sources_AN` holds `Source` values. A named tuple, so that compiled
    functions take it whole.
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
        """Return whose draft is their cached response; bool [A]."""
        return (self.count_A > 0) & (self.sources_AN[:, 0] == Source.CACHED)

    def take(self, chosen_A: np.ndarray) -> Drafts:
        """Return the drafts of the requests that a mask or an index array chooses."""
        return Drafts(*(x[chosen_A] for x in self))

    def put(self, chosen_A: np.ndarray, found: Drafts) -> None:
        """Write the drafts of some requests in place of what they had."""
        for whole, part in zip(self, found, strict=True):
            whole[chosen_A] = part


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Which draft tokens were accepted; bool [A, N] as in their `Drafts`.

    `accepted_AN` is the path that a request's next tokens took, `observed_AN` the draft tokens for
    which that is known. `verified`: a round verified them; otherwise plain decoding went past.
    """

    verified: bool
    accepted_AN: np.ndarray
    observed_AN: np.ndarray

    def take(self, chosen_A: np.ndarray) -> Acceptance:
        """Return that of the requests that a mask or an index array chooses."""
        return Acceptance(self.verified, self.accepted_AN[chosen_A], self.observed_AN[chosen_A])


def no_drafts(num_requests: int, max_nodes: int) -> Drafts:
    """Return empty drafts with room for `max_nodes` draft tokens a request."""
    A, N = num_requests, max_nodes
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
    asked_A: np.ndarray,
    tokens_AM: np.ndarray,
    parents_AM: np.ndarray,
    prob_AM: np.ndarray,
    count_A: np.ndarray,
) -> Drafts:
    """Write the first `count_A` draft tokens of trees to the drafts of those who asked for them."""
    a, m = np.nonzero(np.arange(tokens_AM.shape[1]) < count_A[:, None])
    drafts.tokens_AN[asked_A[a], m] = tokens_AM[a, m]
    drafts.parents_AN[asked_A[a], m] = parents_AM[a, m]
    drafts.prob_AN[asked_A[a], m] = prob_AM[a, m]
    drafts.count_A[asked_A] = count_A
    return drafts


class RoundsInput(NamedTuple):
    """The part of a drafter in rounds that draft on the device, spec/draft_cache/rounds.py.

    `drafting` is static; `cache` is consumed; draft tokens go `depth` deep.
    """

    drafting: Any
    cache: Any
    constants: Any
    table_RX: Any
    depth: int


class RoundsDrafter(Protocol):
    """A drafter that can draft inside rounds on the device, several between two fetches."""

    depth: int
    source: Source

    @property
    def most_tokens(self) -> int:
        """The most draft tokens of a request that it has a use for."""
        ...

    @property
    def num_positions(self) -> int:
        """The positions of its cache, which rounds need of the policy's too; 0: it has none yet."""
        ...

    def enter_rounds(self, live: LiveSlots, most_tokens: int, num_positions: int) -> RoundsInput:
        """Make the cache complete for all requests, each to have up to `most_tokens` a round."""
        ...

    def leave_rounds(self, live: LiveSlots, cache: Any, acceptance_X2: np.ndarray) -> None:
        """Take the cache back: it has the entries of what the requests have now.

        The acceptance is that of each request in each round: draft tokens that were accepted, and
        those for which that is known.
        """
        ...

    def empty_rounds(self, num_slots: int, num_positions: int) -> RoundsInput:
        """Return the same for rows at rest, to compile rounds with."""
        ...


class Drafter(Protocol):
    """Proposes drafts; the engine calls `propose` at most once a round.

    It asks for those requests alone that may have draft tokens: not for those with a cached
    response that goes on. `skipped` names the drafters that a union of several is not to ask in the
    next round. With `arrives_later` other workers make its drafts, and no round goes without it.
    """

    skipped: frozenset[str] = frozenset()
    arrives_later: bool = False

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Draft up to `max_nodes_A` (1 or more) tokens for each request, at most `max_nodes`.

        A parent comes before its children, and siblings differ in their tokens: the round fails
        with ValueError otherwise.
        """
        ...

    def in_rounds(self) -> RoundsDrafter | None:
        """Return who drafts the next rounds if it can be done on the device, and nobody else is."""
        return None

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        """Learn what was accepted of the last drafts: the requests are those of `propose`.

        Not called for rounds in which nothing was proposed.
        """
        return

    def committed(self, live: LiveSlots) -> None:
        """Learn what these requests have now: called in every round, whoever drafted in it.

        The device computes meanwhile, with what was drafted before.
        """
        return

    def finished(self, live: LiveSlots) -> None:
        """Forget these requests, which have ended."""
        return

    def left(self, live: LiveSlots) -> None:
        """Forget these requests, which may go on later, here or on another worker."""
        self.finished(live)
