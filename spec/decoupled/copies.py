"""Drafts for requests with copies on several workers, by a method per copy or from other copies.

Copies share their noise, and so their tokens: verified tokens of one copy are a draft that the
other copies accept completely. So the first verified block of any copy counts for all copies (in
SpecActor, section 4.2, the first copy to finish counts). A = live requests, N = draft tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from reprise.spec.drafter import (
    Acceptance,
    Drafter,
    Drafts,
    LiveSlots,
    RoundsDrafter,
    Source,
    no_drafts,
)

SURE = 0.999  # the probability of a token that another copy has verified
OfCopy = Callable[[int], tuple[int, int]]  # request id → (original id, copy number)


class Progress:
    """The longest responses of requests with copies in this process; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._response: dict[int, np.ndarray] = {}

    def watch(self, original: int) -> None:
        """Track the progress of this request from now on, since it has a copy."""
        with self._lock:
            self._response.setdefault(original, np.zeros(0, np.int32))

    def is_watched(self, original: int) -> bool:
        return original in self._response

    def ahead_of(self, original: int, response_T: np.ndarray) -> np.ndarray:
        """Record the response of a copy; return the further tokens of the longest response."""
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
    """A drafter that uses `usual` for originals, and method i − 1 or the last for copy i.

    A request that lags another copy drafts the tokens of the longest response instead.
    """

    arrives_later = True

    def __init__(
        self, usual: Drafter, methods: Sequence[Drafter], of_copy: OfCopy, progress: Progress
    ) -> None:
        self._drafters = (usual, *methods)
        self._of_copy = of_copy
        self._progress = progress
        self._last: list[tuple[np.ndarray, Drafter]] = []  # request indices, and their drafter

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

    @property
    def can_lag(self) -> bool:
        return False  # copies run on other workers

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
        """Return the drafters of these requests, with the indices of their requests."""
        last = len(self._drafters) - 1
        numbers = [self._of_copy(r)[1] for r in live.request_ids_A.tolist()]
        method_A = np.minimum(np.array(numbers, np.int64), last)
        used = np.unique(method_A).tolist()
        return [(self._drafters[m], np.flatnonzero(method_A == m)) for m in used]


def _put_chain(drafts: Drafts, a: int, tokens_T: np.ndarray) -> bool:
    """Store a chain of tokens as the draft of a request; return False for an empty chain."""
    n = min(len(tokens_T), drafts.max_nodes)
    drafts.tokens_AN[a, :n] = tokens_T[:n]
    drafts.parents_AN[a, :n] = np.arange(-1, n - 1)
    drafts.prob_AN[a, :n] = SURE ** np.arange(1, n + 1)
    drafts.sources_AN[a, :n] = Source.COPY
    drafts.count_A[a] = n
    return n > 0
