"""The union of the trees of several drafters, with the likeliest draft tokens first.

A draft token of two drafters counts once, with the higher probability and the source of that draft.
The best tokens of the union are thus worth at least as much as the best tokens of any drafter.
K = drafters, A = live requests, N = draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from reprise.spec.drafter import (
    Acceptance,
    Drafter,
    Drafts,
    LiveSlots,
    RoundsDrafter,
    by_source,
    no_drafts,
)

WORTH_ASKING = 0.03  # accepted draft tokens per request and round; with fewer, a drafter is skipped
RETRY_ROUNDS = 16  # interval in rounds at which all drafters are called
DECAY = 0.95  # per round, of the counts of each drafter


class DrafterUnion(Drafter):
    """A drafter that merges all `drafters`, and calls those with rare acceptance less often.

    `skipped` is a subset of `names`.
    """

    def __init__(self, drafters: Sequence[Drafter], names: Sequence[str] = ()) -> None:
        assert drafters, "a union of nothing"
        self.names = tuple(names)
        self._drafters = tuple(drafters)
        self.arrives_later = any(drafter.arrives_later for drafter in drafters)
        self._num_requests = np.zeros(len(self._drafters))
        self._accepted = np.zeros(len(self._drafters))
        self._round = 0
        self._last: dict[int, int] = {}  # drafter of the last round → its source

    @property
    def can_lag(self) -> bool:
        return all(drafter.can_lag for drafter in self._drafters)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self._round += 1
        worth_K = self._accepted >= WORTH_ASKING * self._num_requests
        if self._round % RETRY_ROUNDS == 0 or not worth_K.any():
            worth_K[:] = True
        if self.skipped:
            wanted_K = np.array([name not in self.skipped for name in self.names])
            worth_K = worth_K & wanted_K if (worth_K & wanted_K).any() else wanted_K
        self._last = {}
        drafts = list[Drafts]()
        for k in np.nonzero(worth_K)[0].tolist():
            own = self._drafters[k].propose(live, max_nodes_A, max_nodes)
            self._last[k] = int(own.sources_AN.max(initial=0))
            drafts.append(own)
        if not drafts:
            return no_drafts(len(live), max_nodes)
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
        """Return the drafter of this name, or None."""
        return dict(zip(self.names, self._drafters, strict=False)).get(name)

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        accepted = by_source(drafts.sources_AN, acceptance.accepted_AN)
        for k, source in self._last.items():
            self._num_requests[k] = DECAY * self._num_requests[k] + len(drafts.count_A)
            self._accepted[k] = DECAY * self._accepted[k] + accepted[source]
        for k in self._last:
            self._drafters[k].observe(drafts, acceptance)

    def committed(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.committed(live)

    def catch_up(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.catch_up(live)

    def finished(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.finished(live)

    def left(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.left(live)


def merge(drafts: Sequence[Drafts], max_nodes_A: np.ndarray) -> Drafts:
    """Return the union of the trees of each request, cut to its `max_nodes_A` likeliest tokens."""
    A, N = drafts[0].tokens_AN.shape
    max_A = np.minimum(max_nodes_A, N).astype(np.int32)
    merged, *others = drafts
    for other in others:
        merged = _merge(merged, other, max_A, no_drafts(A, N))
    return merged


@numba.njit(cache=True, nogil=True)
def _merge(one, two, max_A, out):  # type: ignore[no-untyped-def]
    """Merge two trees per request, sorted by descending probability, into `out`; return it."""
    place_2N = np.empty((2, one.tokens_AN.shape[1]), np.int32)  # place of each node in the union
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
    """Add a draft token, unless the union has it with a higher probability; return the size."""
    token = tree.tokens_AN[a, i]
    parent = tree.parents_AN[a, i]
    if parent >= 0:
        parent = place_N[parent]
    at = parent + 1
    while at < size and (out.tokens_AN[a, at] != token or out.parents_AN[a, at] != parent):
        at += 1
    place_N[i] = at
    if at < size:
        return size
    out.tokens_AN[a, at] = token
    out.parents_AN[a, at] = parent
    out.prob_AN[a, at] = tree.prob_AN[a, i]
    out.sources_AN[a, at] = tree.sources_AN[a, i]
    return size + 1
