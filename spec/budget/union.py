"""Several drafters as one: the union of their trees, the likeliest draft tokens first.

A draft token that two drafters share counts once, with the higher of their probabilities, and
belongs to the one that gave it. So the best of the union is never worth less than the
best of any one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from spec.acceptance import Acceptance
from spec.drafter import Drafter, Drafts, LiveSlots, Source, no_drafts

WORTH_ASKING = (
    0.03  # right draft tokens a request and round; a source that brings fewer has to wait
)
ASKED_AGAIN = 16  # rounds
MEMORY = 0.95  # of what sources brought, a round


class DrafterUnion:
    """The drafter that asks all of `drafters`, those that bring next to nothing more rarely.

    `names` are what `skipped` calls them by: those named there are not asked.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        names: Sequence[str] = (),
    ) -> None:
        assert drafters, "a union of nothing"
        self.names, self.skipped = tuple(names), frozenset[str]()
        self._drafters = tuple(drafters)
        self._asked = np.zeros(len(self._drafters))
        self._accepted = np.zeros(len(self._drafters))
        self._round = 0
        self._last: dict[int, int] = {}  # the drafters of the last round, and their sources

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self._round += 1
        worth_K = self._accepted >= WORTH_ASKING * self._asked
        if self._round % ASKED_AGAIN == 0 or not worth_K.any():
            worth_K[:] = True
        if self.skipped:
            asked_K = np.array([name not in self.skipped for name in self.names])
            worth_K = worth_K & asked_K if (worth_K & asked_K).any() else asked_K
        chosen = np.nonzero(worth_K)[0].tolist()
        if not chosen:
            return no_drafts(len(live), max_nodes)
        drafts = [self._drafters[k].propose(live, max_nodes_A, max_nodes) for k in chosen]
        pairs = zip(chosen, drafts, strict=True)
        self._last = {k: int(d.sources_AN.max(initial=0)) for k, d in pairs}
        return drafts[0] if len(drafts) == 1 else merge(drafts, max_nodes_A)

    def named(self, name: str) -> Drafter | None:
        """The drafter of that name, if there is one."""
        return dict(zip(self.names, self._drafters, strict=False)).get(name)

    def judged(self, drafts: Drafts, acceptance: Acceptance) -> None:
        """What became of the last round's draft tokens."""
        right = np.bincount(drafts.sources_AN[acceptance.accepted_AN], minlength=len(Source))
        for k, source in self._last.items():
            self._asked[k] = MEMORY * self._asked[k] + len(drafts.count_A)
            self._accepted[k] = MEMORY * self._accepted[k] + right[source]

    def finished(self, live: LiveSlots) -> None:
        for drafter in self._drafters:
            drafter.finished(live)


def merge(drafts: Sequence[Drafts], max_nodes_A: np.ndarray) -> Drafts:
    """The union of each request's trees, cut to its `max_nodes_A` likeliest draft tokens."""
    A, N = drafts[0].tokens_AN.shape
    out = no_drafts(A, N)
    _merge(
        np.stack([d.tokens_AN for d in drafts]),
        np.stack([d.parents_AN for d in drafts]),
        np.stack([d.prob_AN for d in drafts]),
        np.stack([d.sources_AN for d in drafts]),
        np.stack([d.count_A for d in drafts]),
        np.minimum(max_nodes_A, N).astype(np.int32),
        out.tokens_AN,
        out.parents_AN,
        out.prob_AN,
        out.sources_AN,
        out.count_A,
    )
    return out


@numba.njit(cache=True, nogil=True)
def _merge(  # type: ignore[no-untyped-def]
    tokens_KAN,
    parents_KAN,
    prob_KAN,
    sources_KAN,
    count_KA,
    most_A,
    out_tokens_AN,
    out_parents_AN,
    out_prob_AN,
    out_sources_AN,
    out_count_A,
):
    K, A, N = tokens_KAN.shape
    M = K * N  # nodes of a union at most
    token, parent = np.empty(M, np.int32), np.empty(M, np.int32)
    prob, source = np.empty(M, np.float32), np.empty(M, np.uint8)
    child, sibling = np.empty(M + 1, np.int32), np.empty(M, np.int32)  # child[0]: of the root
    here = np.empty(N, np.int32)  # where a source's nodes are in the union
    place = np.empty(M, np.int32)  # where the union's nodes are in the result
    for a in range(A):
        size = 0
        child[0] = -1
        for k in range(K):
            for i in range(count_KA[k, a]):
                above = -1
                if parents_KAN[k, a, i] >= 0:
                    above = here[parents_KAN[k, a, i]]
                node = child[above + 1]
                while node >= 0 and token[node] != tokens_KAN[k, a, i]:
                    node = sibling[node]
                if node < 0:
                    node, size = size, size + 1
                    token[node], parent[node] = tokens_KAN[k, a, i], above
                    prob[node], source[node] = -1.0, 0
                    sibling[node], child[above + 1], child[node + 1] = child[above + 1], node, -1
                if prob_KAN[k, a, i] > prob[node]:
                    prob[node], source[node] = prob_KAN[k, a, i], sources_KAN[k, a, i]
                here[i] = node
        # parents are worth at least as much as their children, and come first among equals
        chosen = min(most_A[a], size)
        for n in range(size):
            place[n] = -1
        for n in range(chosen):
            best = -1
            for node in range(size):
                if place[node] < 0 and (best < 0 or prob[node] > prob[best]):
                    best = node
            place[best] = n
            out_tokens_AN[a, n], out_prob_AN[a, n] = token[best], prob[best]
            out_parents_AN[a, n] = -1 if parent[best] < 0 else place[parent[best]]
            out_sources_AN[a, n] = source[best]
        out_count_A[a] = chosen
