"""Drafts for live requests, from a suffix forest or from the text of each request."""

from __future__ import annotations

import itertools
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
        self.index = RequestIndex()  # numbers the followers

    def propose(
        self, live: LiveSlots, trees_A: np.ndarray, max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from its tree, unless the tree is `NO_TREE`."""
        drafts = no_drafts(len(live), max_nodes)
        which_A = self.index.of(live)
        size = self.index.size
        old = self._followers
        if len(old.trees_F) < size:
            trees_F = with_room(old.trees_F, size, NO_TREE)
            self._followers = Followers(trees_F, with_room(old.state_FX, size, kernels.NONE))
        stale_A = self._followers.trees_F[which_A] != trees_A
        if stale_A.any():
            self._followers.restart(which_A[stale_A], trees_A[stale_A])
        texts = live.tokens_BL, live.rows_A, live.total_tokens_A
        self._forest.draft(self._followers, self._rule, texts, max_nodes_A, drafts, which_A)
        drafts.sources_AN[:] = self._source
        return drafts

    def propose_by_group(
        self, live: LiveSlots, trees: Mapping[int, int], max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from the tree of its group, if the group has a tree."""
        groups = live.group_ids_A.tolist()
        found = map(trees.get, groups, itertools.repeat(NO_TREE))
        trees_A = np.fromiter(found, np.int64, len(groups))
        return self.propose(live, trees_A, max_nodes_A, max_nodes)

    def forget(self, request_ids: Iterable[int]) -> list[int]:
        """Forget requests that have ended; return the numbers that they had in `index`."""
        had = self.index.forget(request_ids)
        numbers = np.array(had, np.int64)
        # requests that never had a draft have no follower
        self._followers.restart(numbers[numbers < len(self._followers.trees_F)], NO_TREE)
        return had


def with_prompt_tail(prompt: np.ndarray, response: np.ndarray, num_tokens: int) -> np.ndarray:
    """Prepend the last `num_tokens` prompt tokens, as context for the start of the response."""
    return np.concatenate([prompt[max(0, len(prompt) - num_tokens) :], response])


@numba.njit(cache=True, nogil=True)
def new_tokens(tokens_BL, rows_U, known_U, total_U):  # type: ignore[no-untyped-def]
    """Return tokens `known_U` to `total_U` of rows, joined, int32 [T], and the end of each [U]."""
    ends_U = np.cumsum(total_U - known_U)
    tokens_T = np.empty(ends_U[-1] if len(ends_U) else 0, np.int32)
    for u in range(len(rows_U)):
        start = ends_U[u] - (total_U[u] - known_U[u])
        for i in range(total_U[u] - known_U[u]):
            tokens_T[start + i] = tokens_BL[rows_U[u], known_U[u] + i]
    return tokens_T, ends_U


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
        self._index = self._followers.index
        self._texts_F3 = np.empty((0, 3), np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        which_A = self._index.of(live)
        self._texts_F3 = with_room(self._texts_F3, self._index.size, NO_TREE)
        for f in which_A[self._texts_F3[which_A, TREE] == NO_TREE].tolist():
            tree = self._forest.plant()
            self._texts_F3[f] = tree, self._forest.add(tree), 0
        text_A3 = self._texts_F3[which_A]
        known_A = text_A3[:, KNOWN].copy()
        total_A = live.total_tokens_A.astype(np.int64)
        tokens_T, ends_A = new_tokens(live.tokens_BL, live.rows_A, known_A, total_A)
        self._forest.append_batch(text_A3[:, SEQUENCE], tokens_T, np.append(0, ends_A))
        self._texts_F3[which_A, KNOWN] = live.total_tokens_A
        return self._followers.propose(live, text_A3[:, TREE], max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        for f in self._followers.forget(live.request_ids_A.tolist()):
            if self._texts_F3[f, TREE] != NO_TREE:
                self._forest.uproot(int(self._texts_F3[f, TREE]))
                self._texts_F3[f] = NO_TREE
