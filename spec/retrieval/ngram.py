"""Drafts from a request's own prompt and response, in which the last tokens occurred before."""

from __future__ import annotations

import numpy as np

from spec.drafter import Drafter, Drafts, LiveSlots, Source
from spec.per_request import RequestIndex, with_room
from spec.retrieval.suffix_drafter import NO_TREE, RequestFollowers, new_tokens
from spec.retrieval.suffix_forest import ProposalRule, SuffixForest

RULE = ProposalRule(longest=8, shortest=2, max_children=2, prior=0.5, min_prob=0.1, path_tokens=0)
# Columns of the state of a request. KNOWN: tokens in its sequence.
TREE, SEQUENCE, KNOWN = range(3)


class NgramDrafter(Drafter):
    """Drafts from a tree of each live request's own text."""

    def __init__(self, rule: ProposalRule = RULE) -> None:
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
