"""Received blocks, and the drafts that follow from the requests' present tokens.

From a block's base the committed tokens are followed down its tree. If they leave the tree the
block is useless; otherwise the subtree below is the request's draft. A = live requests, F =
requests with a block, N = draft tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
import numpy as np

from spec.decoupled.messages import Block
from spec.drafter import Drafts, LiveSlots, Source, no_drafts
from spec.per_request import RequestIndex, with_room

FIRST_NODES = 64  # draft tokens that there is room for at first
# Columns of a request's block: the length that it follows, its round, its draft tokens.
BASE, ROUND, NODES = range(3)


class ReceivedBlocks:
    """The newest block of each request."""

    def __init__(self) -> None:
        self._index = RequestIndex()
        self._block_F3 = np.empty((0, 3), np.int64)
        # tokens, parents and probabilities of the draft tokens
        dtypes = np.int32, np.int32, np.float32
        self._nodes_FN = [np.empty((0, FIRST_NODES), dtype) for dtype in dtypes]
        self.stale = 0  # blocks without any draft: requests had gone another way

    def put(self, blocks: Iterable[Block], live: LiveSlots) -> None:
        """Keep these blocks of live requests, each instead of an older one."""
        blocks = list(blocks)
        if not blocks:
            return
        which = dict(zip(live.request_ids_A.tolist(), self._rows(live).tolist(), strict=True))
        for block in blocks:
            f, n = which.get(block.request_id), len(block.tokens_N)
            if f is None or block.round < self._block_F3[f, ROUND]:
                continue
            if n > (width := self._nodes_FN[0].shape[1]):
                room = (0, 0), (0, max(n, 2 * width) - width)
                self._nodes_FN = [np.pad(x_FN, room) for x_FN in self._nodes_FN]
            self._block_F3[f] = block.base_tokens, block.round, n
            arrays = block.tokens_N, block.parents_N, block.prob_N
            for x_FN, new_N in zip(self._nodes_FN, arrays, strict=True):
                x_FN[f, :n] = new_N

    def drafts(
        self, live: LiveSlots, window_A: np.ndarray, most_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Return each request's draft: at most `window_A` deep, and `most_A` draft tokens."""
        drafts = no_drafts(len(live), max_nodes)
        drafts.sources_AN[:] = Source.MODEL
        which_A = self._rows(live)  # first: it may make room
        texts = live.tokens_BL, live.rows_A, live.total_tokens_A
        limits = window_A, np.minimum(most_A, max_nodes)
        self.stale += _follow(*texts, which_A, self._block_F3, *self._nodes_FN, *limits, drafts)
        return drafts

    def rounds(self, live: LiveSlots) -> np.ndarray:
        """Return the round of each request's newest block; −1 without a block."""
        which_A = self._rows(live)  # first: it may make room
        return self._block_F3[which_A, ROUND]

    def forget(self, request_ids: Iterable[int]) -> None:
        for f in self._index.forget(request_ids):
            self._block_F3[f] = 0, -1, 0

    def _rows(self, live: LiveSlots) -> np.ndarray:
        which_A, old = self._index.of(live), len(self._block_F3)
        if self._index.size > old:
            self._block_F3 = with_room(self._block_F3, self._index.size, 0)
            self._block_F3[old:, ROUND] = -1
            size = len(self._block_F3)
            self._nodes_FN = [with_room(x_FN, size, 0) for x_FN in self._nodes_FN]
        return which_A


@numba.njit(cache=True, nogil=True)
def _follow(  # type: ignore[no-untyped-def]
    tokens_BL,
    rows_A,
    total_A,
    which_A,
    block_F3,
    tokens_FN,
    parents_FN,
    prob_FN,
    window_A,
    most_A,
    out,
):
    """Write the drafts that follow from blocks; return how many blocks were given up."""
    stale = 0
    place_N = np.empty(tokens_FN.shape[1], np.int32)  # of its draft tokens in the draft
    depth_N = np.empty(tokens_FN.shape[1], np.int32)
    for a in range(len(rows_A)):
        f = which_A[a]
        text, nodes = tokens_BL[rows_A[a]], block_F3[f, NODES]
        node, lost = -1, nodes == 0 or block_F3[f, BASE] > total_A[a]
        for t in range(block_F3[f, BASE], total_A[a]):
            if lost:
                break
            child = node + 1
            while child < nodes and (
                parents_FN[f, child] != node or tokens_FN[f, child] != text[t]
            ):
                child += 1
            node, lost = child, child == nodes
        if lost:
            stale += nodes > 0
            block_F3[f, NODES] = 0
            continue
        above = np.float32(1.0) if node < 0 else max(prob_FN[f, node], np.float32(1e-12))
        size = 0
        for n in range(node + 1, nodes):
            parent, place_N[n] = parents_FN[f, n], -1
            if parent != node and (parent < node or place_N[parent] < 0):
                continue
            depth_N[n] = 1 if parent == node else depth_N[parent] + 1
            if depth_N[n] > window_A[a] or size >= most_A[a]:
                continue
            at = -1 if parent == node else place_N[parent]
            same = at + 1  # a block that is wrong may have siblings with one token
            while same < size and (
                out.parents_AN[a, same] != at or out.tokens_AN[a, same] != tokens_FN[f, n]
            ):
                same += 1
            place_N[n] = same
            if same < size:
                continue
            out.tokens_AN[a, size], out.parents_AN[a, size] = tokens_FN[f, n], at
            out.prob_AN[a, size] = min(prob_FN[f, n] / above, np.float32(1.0))
            size += 1
        out.count_A[a] = size
    return stale
