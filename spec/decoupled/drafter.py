"""The drafter of a verifying worker, which uses blocks of drafting workers and computes no drafts.

In each round: take received blocks → follow them to the current request tokens → send these tokens
to the drafting workers, with the drafts under verification. A round waits only if most requests
lack a block that is due, and for at most `deadline_s`. A = live requests, F = requests with a
block, N = draft tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numba
import numpy as np

from reprise.spec.config import SamplingConfig
from reprise.spec.decoupled.messages import Block, Commit, DraftLink, DraftPlan
from reprise.spec.drafter import (
    Acceptance,
    Drafter,
    Drafts,
    LiveSlots,
    RequestIndex,
    Source,
    no_drafts,
    with_room,
)

FIRST_NODES = 64  # initial room per block, in draft tokens
# Columns of a block: the length that it follows, its round, its number of draft tokens.
BASE, ROUND, NODES = range(3)


class ReceivedBlocks:
    """The newest block of each request; the draft is its subtree below the committed tokens."""

    def __init__(self) -> None:
        self._index = RequestIndex()
        self._block_F3 = np.empty((0, 3), np.int64)
        # tokens, parents and probabilities of draft tokens
        dtypes = np.int32, np.int32, np.float32
        self._nodes_FN = [np.empty((0, FIRST_NODES), dtype) for dtype in dtypes]
        self.stale = 0  # blocks without a draft, since the request took another path

    def put(self, blocks: Iterable[Block], live: LiveSlots) -> None:
        """Store these blocks of live requests, unless newer blocks are stored."""
        blocks = list(blocks)
        if not blocks:
            return
        which = dict(zip(live.request_ids_A.tolist(), self._rows(live).tolist(), strict=True))
        for block in blocks:
            f = which.get(block.request_id)
            n = len(block.tokens_N)
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
        self, live: LiveSlots, window_A: np.ndarray, max_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Return a draft per request, at most `window_A` deep and with at most `max_A` tokens."""
        drafts = no_drafts(len(live), max_nodes)
        drafts.sources_AN[:] = Source.MODEL
        which_A = self._rows(live)  # first, since this may grow the arrays
        self.stale += _follow(
            live.tokens_BL,
            live.rows_A,
            live.total_tokens_A,
            which_A,
            self._block_F3,
            *self._nodes_FN,
            window_A,
            np.minimum(max_A, max_nodes),
            drafts,
        )
        return drafts

    def rounds(self, live: LiveSlots) -> np.ndarray:
        """Return the round of the newest block of each request; −1 without a block."""
        which_A = self._rows(live)  # first, since this may grow the arrays
        return self._block_F3[which_A, ROUND]

    def forget(self, request_ids: Iterable[int]) -> None:
        for f in self._index.forget(request_ids):
            self._block_F3[f] = 0, -1, 0

    def _rows(self, live: LiveSlots) -> np.ndarray:
        which_A = self._index.of(live)
        old = len(self._block_F3)
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
    max_A,
    out,
):
    """Write the drafts that follow from blocks; return the number of discarded blocks."""
    stale = 0
    place_N = np.empty(tokens_FN.shape[1], np.int32)  # index in the draft of each block token
    depth_N = np.empty(tokens_FN.shape[1], np.int32)
    for a in range(len(rows_A)):
        f = which_A[a]
        text = tokens_BL[rows_A[a]]
        nodes = block_F3[f, NODES]
        node = -1
        lost = nodes == 0 or block_F3[f, BASE] > total_A[a]
        for t in range(block_F3[f, BASE], total_A[a]):
            if lost:
                break
            child = node + 1
            while child < nodes and (
                parents_FN[f, child] != node or tokens_FN[f, child] != text[t]
            ):
                child += 1
            node = child
            lost = child == nodes
        if lost:
            stale += nodes > 0
            block_F3[f, NODES] = 0
            continue
        above = np.float32(1.0) if node < 0 else max(prob_FN[f, node], np.float32(1e-12))
        size = 0
        for n in range(node + 1, nodes):
            parent = parents_FN[f, n]
            place_N[n] = -1
            if parent != node and (parent < node or place_N[parent] < 0):
                continue
            depth_N[n] = 1 if parent == node else depth_N[parent] + 1
            if depth_N[n] > window_A[a] or size >= max_A[a]:
                continue
            at = -1 if parent == node else place_N[parent]
            same = at + 1  # a wrong block may have siblings with equal tokens
            while same < size and (
                out.parents_AN[a, same] != at or out.tokens_AN[a, same] != tokens_FN[f, n]
            ):
                same += 1
            place_N[n] = same
            if same < size:
                continue
            out.tokens_AN[a, size] = tokens_FN[f, n]
            out.parents_AN[a, size] = at
            out.prob_AN[a, size] = min(prob_FN[f, n] / above, np.float32(1.0))
            size += 1
        out.count_A[a] = size
    return stale


MISSING_SHARE = 0.5  # a round waits if at least this share of requests lacks a draft


class RequestPlans(Protocol):
    """Plans for the drafts of each request, by observed acceptance."""

    deadline_s: float

    def plan(self, request_id: int, batch: int) -> DraftPlan:
        """Return the plan of a request on a worker with `batch` live requests."""

    def observed(self, live: LiveSlots, accepted_A: np.ndarray, seen_A: np.ndarray) -> None:
        """Learn how many draft tokens were accepted, and how many were decided."""
        return

    def forget(self, request_ids: Sequence[int]) -> None:
        return


class OnePlan(RequestPlans):
    """One plan for all requests."""

    def __init__(self, plan: DraftPlan, deadline_s: float = 0.0) -> None:
        self._plan = plan
        self.deadline_s = deadline_s

    def plan(self, request_id: int, batch: int) -> DraftPlan:
        return self._plan


class DecoupledDrafter(Drafter):
    """Drafts of one draft model, from the drafting workers that `links` connect to."""

    arrives_later = True

    def __init__(
        self, links: Sequence[DraftLink], plans: RequestPlans, sampling: SamplingConfig
    ) -> None:
        self._links = tuple(links)
        self._plans = plans
        self._sampling = sampling
        self.received = ReceivedBlocks()
        # per request: generation of its link, number of tokens sent, number of commits
        self._sent = dict[int, tuple[int, int, int]]()
        self._last: LiveSlots | None = None  # requests of the last drafts

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        plans = [self._plans.plan(r, len(live)) for r in live.request_ids_A.tolist()]
        window_A = np.array([plan.window for plan in plans], np.int64)
        max_A = np.minimum(max_nodes_A, np.array([plan.max_nodes for plan in plans], np.int32))
        self._take(live)
        drafts = self.received.drafts(live, window_A, max_A, max_nodes)
        if self._plans.deadline_s and self._worth_waiting(live, drafts):
            for link in self._links:
                link.wait(self._plans.deadline_s / len(self._links))
            self._take(live)
            drafts = self.received.drafts(live, window_A, max_A, max_nodes)
        self._send(live, drafts)
        self._last = live
        return drafts

    def committed(self, live: LiveSlots) -> None:
        """Send the tokens of rounds without a proposal too."""
        self._send(live, None)

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        assert self._last is not None, "it has proposed"
        mine_AN = drafts.sources_AN == Source.MODEL
        accepted_A = (acceptance.accepted_AN & mine_AN).sum(axis=1)
        seen_A = (acceptance.observed_AN & mine_AN).sum(axis=1)
        # along a path: the accepted tokens and the first rejected token
        seen_A = np.minimum(seen_A, accepted_A + 1)
        self._plans.observed(self._last, accepted_A, seen_A)

    def finished(self, live: LiveSlots) -> None:
        ids = live.request_ids_A.tolist()
        closed = [r for r in ids if self._sent.pop(r, None) is not None]
        self.received.forget(ids)
        self._plans.forget(ids)
        for k, link in enumerate(self._links):
            if mine := [r for r in closed if r % len(self._links) == k]:
                link.send((), mine)

    def _worth_waiting(self, live: LiveSlots, drafts: Drafts) -> bool:
        """Return True if most requests lack both a draft and a block of their last commit."""
        sent = [self._sent.get(r, (-1, 0, -1))[2] for r in live.request_ids_A.tolist()]
        missing_A = (drafts.count_A == 0) & (np.array(sent) > self.received.rounds(live))
        return missing_A.sum() >= MISSING_SHARE * len(live)

    def _take(self, live: LiveSlots) -> None:
        for link in self._links:
            self.received.put(link.take(), live)

    def _send(self, live: LiveSlots, drafts: Drafts | None) -> None:
        """Send the new tokens of each request to its drafting worker."""
        news: list[list[Commit]] = [[] for _ in self._links]
        processing_A3 = live.processing(self._sampling)
        totals = live.total_tokens_A.tolist()
        for a, (r, total) in enumerate(zip(live.request_ids_A.tolist(), totals, strict=True)):
            k = r % len(self._links)
            generation = self._links[k].generation
            before, first, num_sent = self._sent.get(r, (generation, 0, 0))
            if before != generation:
                first = 0
            if first >= total:
                continue
            commit = Commit(
                request_id=r,
                round=num_sent + 1,
                first=first,
                tokens=live.tokens_BL[live.rows_A[a], first:total].copy(),
                prompt_tokens=int(live.prompt_tokens_A[a]),
                remaining_tokens=int(live.remaining_tokens_A[a]),
                chain=_chain(drafts, a),
                plan=self._plans.plan(r, len(live)),
                processing=tuple(processing_A3[a].tolist()),
            )
            news[k].append(commit)
            self._sent[r] = generation, total, num_sent + 1
        for link, commits in zip(self._links, news, strict=True):
            if commits:
                link.send(commits, ())


def _chain(drafts: Drafts | None, a: int) -> np.ndarray:
    """Return the likeliest path from the root of the draft of a request."""
    path = list[int]()
    at = -1
    if drafts is not None:
        for n in range(int(drafts.count_A[a])):
            if drafts.parents_AN[a, n] == at:
                path.append(int(drafts.tokens_AN[a, n]))
                at = n
    return np.array(path, np.int32)
