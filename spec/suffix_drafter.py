"""Live requests that follow trees of a suffix forest: what history, group and own text share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spec.drafter import Drafts, LiveSlots, Source, no_drafts
from spec.suffix import Followers, ProposalRule, SuffixForest

NO_TREE = -1


class RequestFollowers:
    """One follower per live request in one forest; drafts from where they stand."""

    def __init__(self, forest: SuffixForest, rule: ProposalRule, source: Source) -> None:
        self.forest, self._rule, self._source = forest, rule, source
        self._followers = Followers.of([NO_TREE] * 64)
        self._index: dict[int, int] = {}  # request id → follower
        self._free = list(range(64))

    def propose(
        self, live: LiveSlots, trees_A: np.ndarray, max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Guesses for each request out of its tree; none where the tree is `NO_TREE`."""
        drafts = no_drafts(len(live), max_nodes)
        which_A = self._which(live, trees_A)
        self.forest.follow(
            self._followers, live.tokens_BL, live.rows_A, live.total_tokens_A, which_A
        )
        self.forest.propose(self._followers, self._rule, max_nodes_A, drafts, which_A)
        drafts.sources_AN[:] = self._source
        return drafts

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            f = self._index.pop(request_id, None)
            if f is not None:
                self._followers.restart(f, NO_TREE)
                self._free.append(f)

    def _which(self, live: LiveSlots, trees_A: np.ndarray) -> np.ndarray:
        ids = live.request_ids_A.tolist()
        which_A = np.fromiter((self._index.get(r, -1) for r in ids), np.int64, len(ids))
        for a in np.nonzero(which_A < 0)[0].tolist():
            if not self._free:
                self._grow()
            which_A[a] = self._index[ids[a]] = self._free.pop()
        stale_A = self._followers.trees_F[which_A] != trees_A
        for a in np.nonzero(stale_A)[0].tolist():
            self._followers.restart(int(which_A[a]), int(trees_A[a]))
        return which_A

    def _grow(self) -> None:
        old = self._followers
        size = len(old.trees_F)
        new = Followers.of([NO_TREE] * (2 * size))
        new.trees_F[:size], new.state_FX[:size] = old.trees_F, old.state_FX
        self._followers = new
        self._free = list(range(size, 2 * size))


def with_prompt_tail(prompt: np.ndarray, response: np.ndarray, num_tokens: int) -> np.ndarray:
    """A response after the last `num_tokens` of its prompt: so its first tokens have a context."""
    return np.concatenate([prompt[max(0, len(prompt) - num_tokens) :], response])
