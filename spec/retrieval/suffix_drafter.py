"""Drafts for live requests, from a suffix forest or from the text of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numba
import numpy as np

from reprise.spec.drafter import (
    Drafter,
    Drafts,
    LiveSlots,
    RequestIndex,
    Source,
    no_drafts,
    with_room,
)
from reprise.spec.retrieval import suffix_kernels as kernels
from reprise.spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest

NO_TREE = -1


class RequestFollowers:
    """One follower per live request in a forest, and drafts from the matches of followers."""

    def __init__(self, forest: SuffixForest, rule: ProposalRule, source: Source) -> None:
        self._forest = forest
        self._rule = rule
        self._source = source
        self._followers = Followers.of([])
        self._index = RequestIndex()

    def propose(
        self, live: LiveSlots, trees_A: np.ndarray, max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from its tree, unless the tree is `NO_TREE`."""
        drafts = no_drafts(len(live), max_nodes)
        which_A = self._which(live, trees_A)
        texts = live.tokens_BL, live.rows_A, live.total_tokens_A
        self._forest.draft(self._followers, self._rule, texts, max_nodes_A, drafts, which_A)
        drafts.sources_AN[:] = self._source
        return drafts

    def propose_by_group(
        self, live: LiveSlots, trees: Mapping[int, int], max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from the tree of its group, if the group has a tree."""
        trees_A = np.array([trees.get(g, NO_TREE) for g in live.group_ids_A.tolist()], np.int64)
        return self.propose(live, trees_A, max_nodes_A, max_nodes)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Forget requests that have ended."""
        for f in self._index.forget(request_ids):
            self._followers.restart(f, NO_TREE)

    def _which(self, live: LiveSlots, trees_A: np.ndarray) -> np.ndarray:
        which_A = self._index.of(live)
        old = self._followers
        if len(old.trees_F) < self._index.size:
            trees_F = with_room(old.trees_F, self._index.size, NO_TREE)
            self._followers = Followers(
                trees_F, with_room(old.state_FX, self._index.size, kernels.NONE)
            )
        stale_A = self._followers.trees_F[which_A] != trees_A
        for a in np.nonzero(stale_A)[0].tolist():
            self._followers.restart(int(which_A[a]), int(trees_A[a]))
        return which_A


def with_prompt_tail(prompt: np.ndarray, response: np.ndarray, num_tokens: int) -> np.ndarray:
    """Prepend the last `num_tokens` prompt tokens, as context for the start of the response."""
    return np.concatenate([prompt[max(0, len(prompt) - num_tokens) :], response])


def new_tokens(live: LiveSlots, known_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens from index `known_A` on, joined over requests, and their offsets."""
    offsets = np.concatenate([[0], np.cumsum(live.total_tokens_A - known_A)])
    known_A = np.ascontiguousarray(known_A, np.int64)
    return _gather(live.tokens_BL, live.rows_A, known_A, offsets), offsets


@numba.njit(cache=True, nogil=True)
def _gather(tokens_BL, rows_A, known_A, offsets):  # type: ignore[no-untyped-def]
    out_T = np.empty(offsets[-1], np.int32)
    for a in range(len(rows_A)):
        for i in range(offsets[a + 1] - offsets[a]):
            out_T[offsets[a] + i] = tokens_BL[rows_A[a], known_A[a] + i]
    return out_T


NGRAM_RULE = ProposalRule(
    longest=8, shortest=2, max_children=2, prior=0.5, min_prob=0.1, path_tokens=0
)
# Columns of the state of a request. KNOWN: number of tokens in its sequence.
TREE, SEQUENCE, KNOWN = range(3)


class NgramDrafter(Drafter):
    """A drafter that indexes the text of each live request in a separate tree."""

    def __init__(self, rule: ProposalRule = NGRAM_RULE) -> None:
        self._forest = SuffixForest(rule.context_tokens)
        self._followers = RequestFollowers(self._forest, rule, Source.OWN)
        self._index = RequestIndex()
        self._texts_F3 = np.empty((0, 3), np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        which_A = self._index.of(live)
        self._texts_F3 = with_room(self._texts_F3, self._index.size, NO_TREE)
        for f in which_A[self._texts_F3[which_A, TREE] == NO_TREE].tolist():
            tree = self._forest.plant()
            self._texts_F3[f] = tree, self._forest.add(tree), 0
        text_A3 = self._texts_F3[which_A]
        tokens_T, offsets = new_tokens(live, text_A3[:, KNOWN])
        self._forest.append_batch(text_A3[:, SEQUENCE], tokens_T, offsets)
        self._texts_F3[which_A, KNOWN] = live.total_tokens_A
        return self._followers.propose(live, text_A3[:, TREE], max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        ids = live.request_ids_A.tolist()
        self._followers.forget(ids)
        for f in self._index.forget(ids):
            if self._texts_F3[f, TREE] != NO_TREE:
                self._forest.uproot(int(self._texts_F3[f, TREE]))
                self._texts_F3[f] = NO_TREE
