"""Seer's grouped drafts, from sibling tokens as they are generated (Seer, section 4.4).

A server stores the tokens of all requests by group. The drafter of each engine fetches and indexes
the new tokens of its groups, and drafts from the index. A thread sends, fetches and indexes while
the next round runs. A = live requests, F = rows of requests, U = requests that send tokens,
T = sent tokens.
"""

from __future__ import annotations

import collections
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from reprise.spec.drafter import Drafter, Drafts, LiveSlots, RequestIndex, Source, with_room
from reprise.spec.retrieval.suffix_drafter import RequestFollowers, new_tokens
from reprise.spec.retrieval.suffix_forest import ProposalRule, SuffixForest

RULE = ProposalRule(longest=16, shortest=1, max_children=3, prior=0.3, min_prob=0.05, path_tokens=0)


# new tokens of a request: group, request, number of earlier tokens, new tokens
Piece = tuple[int, int, int, np.ndarray]


class DraftServer:
    """The tokens of all groups, each stored until `group_size` requests have ended (0: forever).

    `num_drafters` counts the drafters that use this object.
    """

    def __init__(self, group_size: int = 0) -> None:
        self.num_drafters = 0
        self._lock = threading.Lock()
        self._group_size = group_size
        self._texts: dict[int, dict[int, array[int]]] = {}  # of each group, by request
        self._ended: collections.defaultdict[int, set[int]] = collections.defaultdict(set)
        self._over: set[int] = set()

    def update(self, pieces: Iterable[Piece]) -> None:
        """Append new request tokens; raise ValueError if tokens before them are missing."""
        with self._lock:
            for group, request, previous, tokens_T in pieces:
                if group in self._over:
                    continue
                texts = self._texts.setdefault(group, {})
                text = texts.setdefault(request, array("i"))
                if previous > len(text):
                    raise ValueError(
                        f"request {request} of group {group} has {len(text)} tokens here: "
                        f"got an update that starts after {previous}; send what is missing"
                    )
                text.frombytes(tokens_T[len(text) - previous :].tobytes())

    def end(self, group_ids: Iterable[int], request_ids: Iterable[int]) -> None:
        """Record requests that have ended for good; a request may be reported repeatedly."""
        with self._lock:
            for group, request in zip(group_ids, request_ids, strict=True):
                if not self._group_size or group in self._over:
                    continue
                self._ended[group].add(request)
                if len(self._ended[group]) >= self._group_size:
                    self._over.add(group)
                    del self._ended[group]
                    self._texts.pop(group, None)

    def fetch(self, seen: Mapping[int, Mapping[int, int]]) -> tuple[list[Piece], list[int]]:
        """Return the pieces beyond the token counts in `seen`, and the groups that have ended."""
        pieces = []
        with self._lock:
            over = list(self._over.intersection(seen))
            for group, known in seen.items():
                for request, text in self._texts.get(group, {}).items():
                    previous = known.get(request, 0)
                    if len(text) > previous:
                        tokens_T = np.array(text[previous:], np.int32)
                        pieces.append((group, request, previous, tokens_T))
        return pieces, over

    def seen(self) -> dict[int, dict[int, int]]:
        """Return the token count of each request by group, for `fetch` on another server."""
        with self._lock:
            return {
                group: {request: len(text) for request, text in texts.items()}
                for group, texts in self._texts.items()
            }

    def forget(self, group_ids: Iterable[int]) -> None:
        """Forget groups that have ended."""
        with self._lock:
            for group in group_ids:
                self._over.add(group)
                self._ended.pop(group, None)
                self._texts.pop(group, None)


class GroupDrafter(Drafter):
    """A drafter that sends worker tokens to a server, and drafts from an index of all siblings.

    The tokens of a request are sent once `update_tokens` are new, or when the request leaves. A
    draft uses all rounds of this worker except the last, which the thread indexes while the device
    verifies, so that the drafts of a single worker are reproducible. Drafters of several workers
    share a `server`; None creates a server.
    """

    def __init__(
        self, rule: ProposalRule = RULE, update_tokens: int = 4, server: DraftServer | None = None
    ) -> None:
        self._server = server or DraftServer()
        self._update_tokens = update_tokens
        self._server.num_drafters += 1
        self._tail = rule.longest
        self._forest = SuffixForest(rule.context_tokens)
        self._followers = RequestFollowers(self._forest, rule, Source.GROUP)
        self._trees: dict[int, int] = {}  # by group
        self._sequences: dict[int, dict[int, int]] = {}  # of each group, by request
        self._seen: dict[int, dict[int, int]] = {}  # indexed token counts, for `DraftServer.fetch`
        self._index = RequestIndex()  # of the requests that still send tokens
        self._sent_F = np.empty(0, np.int64)  # token counts sent or queued for the server
        self._messages: list[Callable[[], None]] = []  # gathered since the last hand-over
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="group")
        self._work: Future[None] | None = None

    @property
    def can_lag(self) -> bool:
        return self._server.num_drafters == 1  # no other worker needs the tokens of this worker

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self.wait()
        return self._followers.propose_by_group(live, self._trees, max_nodes_A, max_nodes)

    def committed(self, live: LiveSlots) -> None:
        self._tell(live)
        self._hand_over()

    def catch_up(self, live: LiveSlots) -> None:
        self._tell(live)
        self.wait()
        messages = self._messages
        self._messages = []
        self._exchange(messages)  # on this thread: `propose` would wait anyway

    def _tell(self, live: LiveSlots) -> None:
        """Gather messages with new tokens and with groups to follow."""
        self._messages.append(partial(self._register, live.group_ids_A.tolist()))
        self._send(live, self._update_tokens)

    def finished(self, live: LiveSlots) -> None:
        self._send(live, 1)
        self._messages.append(
            partial(self._server.end, live.group_ids_A.tolist(), live.request_ids_A.tolist())
        )
        self._forget(live)

    def left(self, live: LiveSlots) -> None:
        self._send(live, 1)
        self._forget(live)

    def wait(self) -> None:
        """Wait until the thread has indexed everything, and re-raise its exception."""
        if self._work is not None:
            self._work.result()

    def _send(self, live: LiveSlots, at_least: int) -> None:
        """Send new tokens, from the prompt tail on, of requests with `at_least` new tokens."""
        first_A = np.maximum(live.prompt_tokens_A - self._tail, 0)
        which_A = self._index.of(live)
        self._sent_F = with_room(self._sent_F, self._index.size, 0)
        sent_A = self._sent_F[which_A]
        length_A = live.total_tokens_A - first_A
        chosen_U = np.nonzero(length_A - sent_A >= at_least)[0]
        if not len(chosen_U):
            return
        known_U = (first_A + sent_A)[chosen_U]
        total_U = live.total_tokens_A[chosen_U].astype(np.int64)
        tokens_T, ends_U = new_tokens(live.tokens_BL, live.rows_A[chosen_U], known_U, total_U)
        groups = live.group_ids_A[chosen_U].tolist()
        requests = live.request_ids_A[chosen_U].tolist()
        counts = sent_A[chosen_U].tolist()
        pieces = list[Piece]()
        start = 0
        for group, request, n, end in zip(groups, requests, counts, ends_U.tolist(), strict=True):
            pieces.append((group, request, n, tokens_T[start:end]))
            start = end
        self._messages.append(partial(self._server.update, pieces))
        self._sent_F[which_A[chosen_U]] = length_A[chosen_U]

    def _forget(self, live: LiveSlots) -> None:
        ids = live.request_ids_A.tolist()
        self._followers.forget(ids)
        self._sent_F[self._index.forget(ids)] = 0
        if not len(self._index):
            self._hand_over()  # there may be no further round

    def _hand_over(self) -> None:
        """Submit a task that sends the gathered messages and indexes new sibling tokens."""
        if self._messages:
            self.wait()
            messages = self._messages
            self._messages = []
            self._work = self._thread.submit(self._exchange, messages)

    # -- in the thread -----------------------------------------------------------------

    def _exchange(self, messages: Iterable[Callable[[], None]]) -> None:
        for send in messages:
            send()
        pieces, over = self._server.fetch(self._seen)
        self._add(pieces)
        for group in over:
            self._forest.uproot(self._trees.pop(group))
            del self._sequences[group], self._seen[group]

    def _register(self, group_ids: Iterable[int]) -> None:
        """Follow these groups from now on."""
        for group in set(group_ids) - self._seen.keys():
            self._trees[group] = self._forest.plant()
            self._sequences[group] = {}
            self._seen[group] = {}

    def _add(self, pieces: Sequence[Piece]) -> None:
        """Add fetched pieces to the index; each request has a separate sequence."""
        if not pieces:
            return
        sequences = []
        for group, request, previous, tokens_T in pieces:
            known = self._sequences[group]
            if request not in known:
                known[request] = self._forest.add(self._trees[group])
            sequences.append(known[request])
            self._seen[group][request] = previous + len(tokens_T)
        texts = [tokens_T for *_, tokens_T in pieces]
        offsets = np.cumsum([0, *map(len, texts)])
        self._forest.append_batch(sequences, np.concatenate(texts), offsets)
