"""Seer's grouped drafts: siblings' tokens as they are generated (Seer, section 4.4).

A server keeps each group's tokens as a log of updates; a client beside an engine fetches new
updates of the groups that it has registered, and drafts from an index of its own. Messages are
plain data, so that the server could move to another process and serve many workers; here both
are in one process. A = live requests, F = rows of requests.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from spec.drafter import Drafter, Drafts, LiveSlots, Source
from spec.per_request import RequestIndex, with_room
from spec.retrieval.suffix_drafter import NO_TREE, RequestFollowers
from spec.retrieval.suffix_forest import ProposalRule, SuffixForest

RULE = ProposalRule(longest=16, shortest=1, max_children=3, prior=0.3, min_prob=0.05, path_tokens=0)
NEVER_S = float("inf")


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """New tokens of one request, which follow `previous_tokens` others."""

    group_id: int
    request_id: int
    previous_tokens: int
    tokens: np.ndarray


class DraftServer:
    """The tokens of all groups as logs of updates; threads of several workers may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[int, list[Update]] = {}
        self._lengths: dict[tuple[int, int], int] = {}

    def update(self, update: Update) -> None:
        """Append a request's new tokens.

        Known tokens are left out, so that a message may come twice. Raises ValueError if
        tokens before it are missing.
        """
        name = update.group_id, update.request_id
        with self._lock:
            known = self._lengths.get(name, 0)
            if update.previous_tokens > known:
                raise ValueError(
                    f"request {update.request_id} of group {update.group_id} has {known} tokens "
                    f"here: got an update that starts after {update.previous_tokens}; send what "
                    "is missing"
                )
            new = update.tokens[known - update.previous_tokens :]
            if len(new):
                log = self._logs.setdefault(update.group_id, [])
                log.append(Update(update.group_id, update.request_id, known, new))
                self._lengths[name] = known + len(new)

    def fetch(self, seen: Mapping[int, int]) -> dict[int, list[Update]]:
        """Return each group's updates after the first `seen[group]`, if there are any."""
        with self._lock:
            new = {group: self._logs.get(group, [])[count:] for group, count in seen.items()}
        return {group: updates for group, updates in new.items() if updates}

    def drop(self, group_id: int) -> None:
        """Forget a group."""
        with self._lock:
            for update in self._logs.pop(group_id, ()):
                self._lengths.pop((group_id, update.request_id), None)


class DraftClient:
    """The index of the registered groups, and drafts from it."""

    def __init__(self, rule: ProposalRule = RULE) -> None:
        self._forest = SuffixForest(rule.context_tokens)
        self._followers = RequestFollowers(self._forest, rule, Source.GROUP)
        self._trees: dict[int, int] = {}
        self._until_s: dict[int, float] = {}
        self._sequences: dict[tuple[int, int], int] = {}
        self.seen: dict[int, int] = {}  # updates applied, by group, for `fetch`

    def register_group(self, group_id: int, ttl_s: float = NEVER_S, now_s: float = 0.0) -> None:
        """Follow a group until `ttl_s` from now, or extend the time of a group that is followed."""
        self._until_s[group_id] = now_s + ttl_s
        if group_id not in self._trees:
            self._trees[group_id], self.seen[group_id] = self._forest.plant(), 0

    def expire(self, now_s: float) -> list[int]:
        """Forget the groups whose time is over, and return them."""
        over = [group for group, until_s in self._until_s.items() if until_s <= now_s]
        for group in over:
            self._forest.uproot(self._trees.pop(group))
            del self._until_s[group], self.seen[group]
        self._sequences = {n: s for n, s in self._sequences.items() if n[0] in self._trees}
        return over

    def apply(self, fetched: Mapping[int, Sequence[Update]]) -> None:
        """Add fetched updates to the index; each request's tokens go to its own sequence."""
        sequences, pieces = [], []
        for group, updates in fetched.items():
            for update in updates:
                name = group, update.request_id
                if name not in self._sequences:
                    self._sequences[name] = self._forest.add(self._trees[group])
                sequences.append(self._sequences[name])
                pieces.append(update.tokens)
            self.seen[group] += len(updates)
        if sequences:
            offsets = np.cumsum([0, *map(len, pieces)])
            self._forest.append_batch(sequences, np.concatenate(pieces), offsets)

    def batch_speculate(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        """Draft for all live requests at once."""
        groups = live.group_ids_A.tolist()
        trees_A = np.fromiter((self._trees.get(g, NO_TREE) for g in groups), np.int64, len(groups))
        return self._followers.propose(live, trees_A, max_nodes_A, max_nodes)

    def forget_requests(self, request_ids: Sequence[int]) -> None:
        """Stop drafting for these requests; their tokens stay in the index."""
        self._followers.forget(request_ids)


class GroupDrafter(Drafter):
    """Sends the live requests' tokens to a server, `update_tokens` at a time, and drafts.

    `server` is shared by the drafters of several workers; None makes a server.
    """

    def __init__(
        self, rule: ProposalRule = RULE, update_tokens: int = 4, server: DraftServer | None = None
    ) -> None:
        self._server, self._client = server or DraftServer(), DraftClient(rule)
        self._update_tokens, self._tail = update_tokens, rule.longest
        self._index = RequestIndex()
        self._sent_F = np.empty(0, np.int64)  # tokens sent to the server

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self._send(live, self._update_tokens)
        for group in set(live.group_ids_A.tolist()) - self._client.seen.keys():
            self._client.register_group(group)
        self._client.apply(self._server.fetch(self._client.seen))
        return self._client.batch_speculate(live, max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        self._send(live, 1)
        ids = live.request_ids_A.tolist()
        self._client.forget_requests(ids)
        self._sent_F[self._index.forget(ids)] = 0

    def _send(self, live: LiveSlots, at_least: int) -> None:
        """Send tokens of requests with `at_least` new ones, beginning with the prompt's tail."""
        tails_A = np.minimum(live.prompt_tokens_A, self._tail)
        lengths_A = live.total_tokens_A - live.prompt_tokens_A + tails_A
        which_A = self._index.of(live)
        self._sent_F = with_room(self._sent_F, self._index.size, 0)
        sent_A = self._sent_F[which_A]
        for a in np.nonzero(lengths_A - sent_A >= at_least)[0].tolist():
            end, known, length = int(live.total_tokens_A[a]), int(sent_A[a]), int(lengths_A[a])
            tokens = live.tokens_BL[live.rows_A[a], end - length + known : end].copy()
            request_id = int(live.request_ids_A[a])
            self._server.update(Update(int(live.group_ids_A[a]), request_id, known, tokens))
            self._sent_F[which_A[a]] = length
