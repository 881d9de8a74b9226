"""The drafter of a verifying worker: it uses blocks of drafting workers, and computes none.

In each round: take received blocks → follow them to the requests' present tokens → send these
tokens to the drafting workers, with the drafts that are verified now. A round never waits, except
for `patience_s` if most requests lack a block that is due. A = live requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec.config import SamplingConfig
from spec.decoupled.messages import Commit, DraftLink, DraftPlan
from spec.decoupled.received import ReceivedBlocks
from spec.drafter import Acceptance, Drafter, Drafts, LiveSlots, Source

LACKING_SHARE = 0.5  # share of requests without a draft above which a round waits


class RequestPlans(Protocol):
    """Plans the drafts of each request, by its observed acceptance."""

    patience_s: float

    def plan(self, request_id: int, batch: int) -> DraftPlan:
        """Return the plan of a request on a worker with a batch of this many."""

    def observed(self, live: LiveSlots, accepted_A: np.ndarray, seen_A: np.ndarray) -> None:
        """Observe how many draft tokens were accepted, and how many were decided."""
        return

    def forget(self, request_ids: Sequence[int]) -> None:
        return


class OnePlan(RequestPlans):
    """One plan for all requests."""

    def __init__(self, plan: DraftPlan, patience_s: float = 0.0) -> None:
        self._plan, self.patience_s = plan, patience_s

    def plan(self, request_id: int, batch: int) -> DraftPlan:
        return self._plan


class DecoupledDrafter(Drafter):
    """Drafts of one draft model, by drafting workers at the other ends of `links`.

    A request is drafted for by one of them. If the `generation` of a link changes, its requests are
    sent again from their first token.
    """

    arrives_later = True

    def __init__(
        self, links: Sequence[DraftLink], plans: RequestPlans, sampling: SamplingConfig
    ) -> None:
        assert links, "one drafting worker or more"
        self._links, self._plans, self._sampling = tuple(links), plans, sampling
        self.received = ReceivedBlocks()
        # of each request: generation of its link, number of tokens sent, number of commits
        self._sent = dict[int, tuple[int, int, int]]()
        self._last: LiveSlots | None = None  # of the last drafts

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        plans = [self._plans.plan(r, len(live)) for r in live.request_ids_A.tolist()]
        window_A = np.array([plan.window for plan in plans], np.int64)
        most_A = np.minimum(max_nodes_A, np.array([plan.max_nodes for plan in plans], np.int32))
        given = live, window_A, most_A, max_nodes
        self._take(live)
        drafts = self.received.drafts(*given)
        if self._plans.patience_s and self._worth_waiting(live, drafts):
            for link in self._links:
                link.wait(self._plans.patience_s / len(self._links))
            self._take(live)
            drafts = self.received.drafts(*given)
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
        # along a path: the accepted ones and the one that was not
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
        lacking_A = (drafts.count_A == 0) & (np.array(sent) > self.received.rounds(live))
        return lacking_A.sum() >= LACKING_SHARE * len(live)

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
    """Return the likeliest path of a request's draft from its root."""
    path, at = list[int](), -1
    if drafts is not None:
        for n in range(int(drafts.count_A[a])):
            if drafts.parents_AN[a, n] == at:
                path.append(int(drafts.tokens_AN[a, n]))
                at = n
    return np.array(path, np.int32)
