"""Drafts from a request's own prompt and response: what followed the last tokens before?"""

from __future__ import annotations

import numpy as np

from spec.drafter import Drafts, LiveSlots, Source
from spec.suffix import ProposalRule, SuffixForest
from spec.suffix_drafter import RequestFollowers

RULE = ProposalRule(longest=8, shortest=2, max_children=2, prior=0.5, min_chance=0.1)


class NgramDrafter:
    """A tree per live request, which holds its own text."""

    def __init__(self, rule: ProposalRule = RULE) -> None:
        self._forest = SuffixForest(rule.longest)
        self._followers = RequestFollowers(self._forest, rule, Source.OWN)
        self._trees: dict[int, tuple[int, int, int]] = {}  # request → tree, sequence, tokens in it

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        trees_A = np.empty(len(live), np.int64)
        sequences, pieces = [], []
        totals = live.total_tokens_A.tolist()
        for a, request_id in enumerate(live.request_ids_A.tolist()):
            tree, sequence, known = self._trees.get(request_id) or self._enter()
            trees_A[a] = tree
            if totals[a] > known:
                sequences.append(sequence)
                pieces.append(live.tokens_BL[live.rows_A[a], known : totals[a]])
            self._trees[request_id] = tree, sequence, totals[a]
        if sequences:
            offsets = np.cumsum([0, *map(len, pieces)])
            self._forest.append_batch(sequences, np.concatenate(pieces), offsets)
        return self._followers.propose(live, trees_A, max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        ids = live.request_ids_A.tolist()
        self._followers.forget(ids)
        for request_id in ids:
            if request_id in self._trees:
                self._forest.uproot(self._trees.pop(request_id)[0])

    def _enter(self) -> tuple[int, int, int]:
        tree = self._forest.plant()
        return tree, self._forest.add(tree), 0
