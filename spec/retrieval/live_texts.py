"""Drafts from live requests' own texts, and from siblings as they are generated.

Grouped drafts (Seer, section 4.4): a server keeps the tokens of each group's requests; the drafter
of each engine fetches new tokens of its groups and drafts from an index of them. A thread sends,
fetches and indexes while the next round runs. A = live requests, F = rows of requests, U = those
that send something, T = their tokens.
"""

from __future__ import annotations

import collections
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numba
import numpy as np

from spec.drafter import Drafter, Drafts, LiveSlots, RequestIndex, Source, no_drafts, with_room
from spec.retrieval import suffix_kernels as kernels
from spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest

NO_TREE = -1


class RequestFollowers:
    """One follower for each live request in one forest, and drafts from their matches."""

    def __init__(self, forest: SuffixForest, rule: ProposalRule, source: Source) -> None:
        self._forest, self._rule, self._source = forest, rule, source
        self._followers = Followers.of([])
        self._index = RequestIndex()

    def propose(
        self, live: LiveSlots, trees_A: np.ndarray, max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from its tree, if it is not `NO_TREE`."""
        drafts = no_drafts(len(live), max_nodes)
        which_A = self._which(live, trees_A)
        texts = live.tokens_BL, live.rows_A, live.total_tokens_A
        self._forest.follow(self._followers, *texts, which_A, self._rule.longest)
        self._forest.propose(self._followers, self._rule, max_nodes_A, drafts, which_A)
        drafts.sources_AN[:] = self._source
        return drafts

    def propose_by_group(
        self, live: LiveSlots, trees: Mapping[int, int], max_nodes_A: np.ndarray, max_nodes: int
    ) -> Drafts:
        """Draft for each request from its group's tree, if it has one."""
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
    """Join the last `num_tokens` of a prompt and a response, whose first tokens need a context."""
    return np.concatenate([prompt[max(0, len(prompt) - num_tokens) :], response])


def new_tokens(live: LiveSlots, known_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens from the known_A-th on, joined over requests, and the offset of each."""
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
# Columns of the state of a request. KNOWN: tokens in its sequence.
TREE, SEQUENCE, KNOWN = range(3)


class NgramDrafter(Drafter):
    """Drafts from a tree of each live request's own text."""

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


RULE = ProposalRule(longest=16, shortest=1, max_children=3, prior=0.3, min_prob=0.05, path_tokens=0)


# new tokens of a request: its group, itself, the number of tokens before them, and the tokens
Piece = tuple[int, int, int, np.ndarray]


class DraftServer:
    """The tokens of all groups, each until `group_size` requests have ended (0: for ever)."""

    def __init__(self, group_size: int = 0) -> None:
        self._lock, self._group_size = threading.Lock(), group_size
        self._texts: dict[int, dict[int, array[int]]] = {}  # of each group, by request
        self._ended: collections.defaultdict[int, set[int]] = collections.defaultdict(set)
        self._over: set[int] = set()

    def update(self, pieces: Iterable[Piece]) -> None:
        """Append requests' tokens, known ones or not; ValueError if earlier ones are missing."""
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
        """Record requests that have ended for good; each may come more than once."""
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
        """Return new pieces of the groups of `seen`, by known tokens, and ended groups."""
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
        """Return how many tokens of each request are here, by group, for another's `fetch`."""
        with self._lock:
            return {
                group: {request: len(text) for request, text in texts.items()}
                for group, texts in self._texts.items()
            }

    def forget(self, group_ids: Iterable[int]) -> None:
        """Forget groups that are over."""
        with self._lock:
            for group in group_ids:
                self._over.add(group)
                self._ended.pop(group, None)
                self._texts.pop(group, None)


class GroupDrafter(Drafter):
    """Sends its worker's tokens to a server, and drafts from an index of all siblings' tokens.

    Tokens are sent once a request has `update_tokens` new ones, or leaves. A draft knows all rounds
    of this worker but the last one, which the thread indexes while the device verifies, so that one
    worker's drafts repeat. Drafters of several workers share a `server`; None makes one.
    """

    def __init__(
        self, rule: ProposalRule = RULE, update_tokens: int = 4, server: DraftServer | None = None
    ) -> None:
        self._server, self._update_tokens = server or DraftServer(), update_tokens
        self._tail = rule.longest
        self._forest = SuffixForest(rule.context_tokens)
        self._followers = RequestFollowers(self._forest, rule, Source.GROUP)
        self._trees: dict[int, int] = {}  # by group
        self._sequences: dict[int, dict[int, int]] = {}  # of each group, by request
        self._seen: dict[int, dict[int, int]] = {}  # indexed tokens, for `DraftServer.fetch`
        self._index = RequestIndex()
        self._sent_F = np.empty(0, np.int64)  # tokens on their way to the server
        self._messages: list[Callable[[], None]] = []  # since the thread was last given some
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="group")
        self._work: Future[None] | None = None

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self.wait()
        return self._followers.propose_by_group(live, self._trees, max_nodes_A, max_nodes)

    def committed(self, live: LiveSlots) -> None:
        self._messages.append(partial(self._register, live.group_ids_A.tolist()))
        self._send(live, self._update_tokens)
        self._hand_over()

    def finished(self, live: LiveSlots) -> None:
        self._send(live, 1)
        ended = live.group_ids_A.tolist(), live.request_ids_A.tolist()
        self._messages.append(partial(self._server.end, *ended))
        self._forget(live)

    def left(self, live: LiveSlots) -> None:
        self._send(live, 1)
        self._forget(live)

    def wait(self) -> None:
        """Return once the thread has indexed everything; raise its exception."""
        if self._work is not None:
            self._work.result()

    def _send(self, live: LiveSlots, at_least: int) -> None:
        """Send tokens of requests with `at_least` new ones, from the prompt's tail on."""
        first_A = np.maximum(live.prompt_tokens_A - self._tail, 0)
        which_A = self._index.of(live)
        self._sent_F = with_room(self._sent_F, self._index.size, 0)
        sent_A, length_A = self._sent_F[which_A], live.total_tokens_A - first_A
        chosen_U = np.nonzero(length_A - sent_A >= at_least)[0]
        if not len(chosen_U):
            return
        tokens_T, ends = new_tokens(live.take(chosen_U), (first_A + sent_A)[chosen_U])
        names = live.group_ids_A[chosen_U], live.request_ids_A[chosen_U], sent_A[chosen_U]
        rows = zip(*(x.tolist() for x in (*names, ends[:-1], ends[1:])), strict=True)
        pieces = [(group, r, n, tokens_T[start:end]) for group, r, n, start, end in rows]
        self._messages.append(partial(self._server.update, pieces))
        self._sent_F[which_A[chosen_U]] = length_A[chosen_U]

    def _forget(self, live: LiveSlots) -> None:
        ids = live.request_ids_A.tolist()
        self._followers.forget(ids)
        self._sent_F[self._index.forget(ids)] = 0
        if not len(self._index):
            self._hand_over()  # there may be no further round

    def _hand_over(self) -> None:
        """Have the thread send the gathered messages, and index siblings' new tokens."""
        if self._messages:
            self.wait()
            messages, self._messages = self._messages, []
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
            self._sequences[group], self._seen[group] = {}, {}

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
