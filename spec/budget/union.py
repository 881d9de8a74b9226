"""Several drafters as one: the union of their trees, or one of them for each copy of a request.

A draft token that two drafters share counts once, with the higher probability and its source. So
the best of the union is worth at least the best of any one.

Copies of a request on several workers share their noise, and so their tokens: verified tokens of
one copy are a draft that the others accept whole, so the first verified block of any copy counts
for all (in SpecActor, section 4.2, the first copy to end counts). K = drafters, A = live requests,
N = draft tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numba
import numpy as np

from spec.drafter import (
    Acceptance,
    Drafter,
    Drafts,
    LiveSlots,
    RoundsDrafter,
    Source,
    by_source,
    no_drafts,
)

WORTH_ASKING = 0.03  # accepted draft tokens a request and round; with fewer a drafter has to wait
RETRY_ROUNDS = 16  # until all drafters are called again
DECAY = 0.95  # of the counts of each drafter, a round


class DrafterUnion(Drafter):
    """Asks all `drafters`, rarely accepted ones less often; `skipped` has some of `names`."""

    def __init__(self, drafters: Sequence[Drafter], names: Sequence[str] = ()) -> None:
        assert drafters, "a union of nothing"
        self.names = tuple(names)
        self._drafters = tuple(drafters)
        self.arrives_later = any(drafter.arrives_later for drafter in drafters)
        self._num_requests = np.zeros(len(self._drafters))
        self._accepted = np.zeros(len(self._drafters))
        self._round = 0
        self._last: dict[int, int] = {}  # the drafters of the last round, and their sources

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self._round += 1
        worth_K = self._accepted >= WORTH_ASKING * self._num_requests
        if self._round % RETRY_ROUNDS == 0 or not worth_K.any():
            worth_K[:] = True
        if self.skipped:
            wanted_K = np.array([name not in self.skipped for name in self.names])
            worth_K = worth_K & wanted_K if (worth_K & wanted_K).any() else wanted_K
        chosen = np.nonzero(worth_K)[0].tolist()
        if not chosen:
            self._last = {}
            return no_drafts(len(live), max_nodes)
        drafts = [self._drafters[k].propose(live, max_nodes_A, max_nodes) for k in chosen]
        pairs = zip(chosen, drafts, strict=True)
        self._last = {k: int(d.sources_AN.max(initial=0)) for k, d in pairs}
        return drafts[0] if len(drafts) == 1 else merge(drafts, max_nodes_A)

    def in_rounds(self) -> RoundsDrafter | None:
        names = self.names or [""] * len(self._drafters)
        active = [k for k, name in enumerate(names) if name not in self.skipped]
        if len(active) != 1:
            return None
        drafter = self._drafters[active[0]].in_rounds()
        if drafter is not None:
            self._last = {active[0]: int(drafter.source)}
        return drafter

    def named(self, name: str) -> Drafter | None:
        """Return the drafter of that name, if there is one."""
        return dict(zip(self.names, self._drafters, strict=False)).get(name)

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        accepted = by_source(drafts, acceptance.accepted_AN)
        for k, source in self._last.items():
            self._num_requests[k] = DECAY * self._num_requests[k] + len(drafts.count_A)
            self._accepted[k] = DECAY * self._accepted[k] + accepted[source]
        for k in self._last:
            self._drafters[k].observe(drafts, acceptance)

    def committed(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.committed(live)

    def finished(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.finished(live)

    def left(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.left(live)


def merge(drafts: Sequence[Drafts], max_nodes_A: np.ndarray) -> Drafts:
    """Return the union of each request's trees, cut to its `max_nodes_A` likeliest draft tokens."""
    A, N = drafts[0].tokens_AN.shape
    max_A = np.minimum(max_nodes_A, N).astype(np.int32)
    merged, *others = drafts
    for other in others:
        merged = _merge(merged, other, max_A, no_drafts(A, N))
    return merged


@numba.njit(cache=True, nogil=True)
def _merge(one, two, max_A, out):  # type: ignore[no-untyped-def]
    """Write the union of two trees, whose draft tokens descend in probability, and return it."""
    place_2N = np.empty((2, one.tokens_AN.shape[1]), np.int32)  # of their nodes in the union
    for a in range(len(max_A)):
        i = j = size = 0
        while size < max_A[a] and (i < one.count_A[a] or j < two.count_A[a]):
            if j >= two.count_A[a] or (
                i < one.count_A[a] and one.prob_AN[a, i] >= two.prob_AN[a, j]
            ):
                size = _take(one, a, i, place_2N[0], out, size)
                i += 1
            else:
                size = _take(two, a, j, place_2N[1], out, size)
                j += 1
        out.count_A[a] = size
    return out


@numba.njit(cache=True, nogil=True)
def _take(tree, a, i, place_N, out, size):  # type: ignore[no-untyped-def]
    """Add a draft token to the union, unless it has it with a higher probability: its new size."""
    token, parent = tree.tokens_AN[a, i], tree.parents_AN[a, i]
    if parent >= 0:
        parent = place_N[parent]
    at = parent + 1
    while at < size and (out.tokens_AN[a, at] != token or out.parents_AN[a, at] != parent):
        at += 1
    place_N[i] = at
    if at < size:
        return size
    out.tokens_AN[a, at], out.parents_AN[a, at] = token, parent
    out.prob_AN[a, at], out.sources_AN[a, at] = tree.prob_AN[a, i], tree.sources_AN[a, i]
    return size + 1


SURE = 0.999  # the probability of a token that another copy has verified
OfCopy = Callable[[int], tuple[int, int]]  # request id → (its original's id, copy number)


class Progress:
    """The longest responses of requests with copies in this process; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._response: dict[int, np.ndarray] = {}

    def watch(self, original: int) -> None:
        """Keep this request's progress from now on, as it has a copy."""
        with self._lock:
            self._response.setdefault(original, np.zeros(0, np.int32))

    def is_watched(self, original: int) -> bool:
        return original in self._response

    def ahead_of(self, original: int, response_T: np.ndarray) -> np.ndarray:
        """Record a copy's response; return the longest one's tokens after it."""
        with self._lock:
            best_T = self._response.get(original)
            if best_T is None:
                return response_T[:0]
            if len(response_T) >= len(best_T):
                self._response[original] = response_T.copy()
            return best_T[len(response_T) :]

    def forget(self, original: int) -> None:
        with self._lock:
            self._response.pop(original, None)


class CopiesDrafter(Drafter):
    """Drafts by `usual`, for copy i by method i − 1 or the last; one drafts a longer one's."""

    arrives_later = True

    def __init__(
        self, usual: Drafter, methods: Sequence[Drafter], of_copy: OfCopy, progress: Progress
    ) -> None:
        self._drafters = (usual, *methods)
        self._of_copy, self._progress = of_copy, progress
        self._last: list[tuple[np.ndarray, Drafter]] = []  # places, and their drafter

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = no_drafts(len(live), max_nodes)
        behind_A = np.zeros(len(live), bool)
        for a, request_id in enumerate(live.request_ids_A.tolist()):
            original, number = self._of_copy(request_id)
            if number:
                self._progress.watch(original)
            if self._progress.is_watched(original):
                ahead_T = self._progress.ahead_of(original, live.response(a))
                behind_A[a] = _put_chain(drafts, a, ahead_T[: max_nodes_A[a]])
        self._last = []
        for drafter, places in self._by_method(live):
            some = places[~behind_A[places]]
            if len(some):
                drafter.skipped = self.skipped if drafter is self._drafters[0] else frozenset()
                drafts.put(some, drafter.propose(live.take(some), max_nodes_A[some], max_nodes))
                self._last.append((some, drafter))
        return drafts

    def in_rounds(self) -> RoundsDrafter | None:
        return None

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        for some, drafter in self._last:
            drafter.observe(drafts.take(some), acceptance.take(some))

    def committed(self, live: LiveSlots) -> None:
        for drafter, some in self._by_method(live):
            drafter.committed(live.take(some))

    def finished(self, live: LiveSlots) -> None:
        for drafter, some in self._by_method(live):
            drafter.finished(live.take(some))
        for request_id in live.request_ids_A.tolist():
            self._progress.forget(self._of_copy(request_id)[0])

    def left(self, live: LiveSlots) -> None:
        for drafter, some in self._by_method(live):
            drafter.left(live.take(some))

    def _by_method(self, live: LiveSlots) -> list[tuple[Drafter, np.ndarray]]:
        """Return the drafters of these requests, each with its places among them."""
        last = len(self._drafters) - 1
        numbers = [self._of_copy(r)[1] for r in live.request_ids_A.tolist()]
        method_A = np.minimum(np.array(numbers, np.int64), last)
        used = np.unique(method_A).tolist()
        return [(self._drafters[m], np.flatnonzero(method_A == m)) for m in used]


def _put_chain(drafts: Drafts, a: int, tokens_T: np.ndarray) -> bool:
    """Make a chain of tokens a request's draft; return False if there are none."""
    n = min(len(tokens_T), drafts.max_nodes)
    drafts.tokens_AN[a, :n] = tokens_T[:n]
    drafts.parents_AN[a, :n] = np.arange(-1, n - 1)
    drafts.prob_AN[a, :n] = SURE ** np.arange(1, n + 1)
    drafts.sources_AN[a, :n] = Source.COPY
    drafts.count_A[a] = n
    return n > 0
