"""Drafts from the responses of the last epoch, to the same prompt or by the same sample.

`HistoryDrafter` is HistoSpec (RhymeRL, section 5). `build_index` indexes the prompts of the next
step in a thread while training runs (its kernels release the interpreter lock). The weight of a
branch is the sum of the rewards of its responses.

`GrowingHistory` is the index of an endless rollout, and adds responses as they finish.

`LastResponseDrafter` continues the last response of the same request. If noise repeats (`coupled`),
or a prefix was cut (`lenient`), the old response remains a good draft after a token that differs:
at the same position if a token was replaced, or shifted if tokens were inserted or omitted.
A = live requests, F = known requests, L = tokens of a response.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np

from reprise.spec.drafter import PADDING, Drafter, Drafts, LiveSlots, Source, no_drafts
from reprise.spec.retrieval.suffix_drafter import RequestFollowers, with_prompt_tail
from reprise.spec.retrieval.suffix_forest import ProposalRule, SuffixForest
from reprise.spec.reuse.rollout_cache import CachedGroup, RolloutCache

# Section 5.4: a prefix of 7 tokens, shortened down to 3 until it is found, and one branch. The
# context grows along the branch by up to 32 draft tokens, the longest window.
PAPER_RULE = ProposalRule(longest=7, shortest=3, by_weight=True, max_children=1)
# Trees grow by probability. The last 16 tokens estimate it as well as the whole branch, because
# longer contexts have smaller counts (benchmarks/results/drafts_contexts.json).
RULE = ProposalRule(
    longest=16,
    shortest=1,
    by_weight=True,
    max_children=2,
    prior=0.3,
    min_prob=0.05,
    path_tokens=0,
)


@dataclasses.dataclass(frozen=True, eq=False)
class HistoryIndex:
    """The forest and tree of each prompt, by key; prompts without history are missing."""

    trees: Mapping[str, tuple[SuffixForest, int]]

    @property
    def num_tokens(self) -> int:
        return sum(forest.num_tokens for forest in {forest for forest, _ in self.trees.values()})

    def by_forest(self, keys: Mapping[int, str]) -> list[tuple[SuffixForest, Mapping[int, int]]]:
        """Return each forest and its trees by group; `keys` maps groups to prompt keys."""
        trees = [(g, *self.trees[key]) for g, key in keys.items() if key in self.trees]
        forests = {forest for _, forest, _ in trees}
        return [(one, {g: t for g, f, t in trees if f is one}) for one in forests]


def build_index(
    cache: RolloutCache | Mapping[str, CachedGroup],
    prompts: Mapping[str, np.ndarray],
    rule: ProposalRule = RULE,
) -> HistoryIndex:
    """Index the cached responses, each after the last `rule.longest` tokens of its prompt."""
    forest = SuffixForest(rule.context_tokens)
    trees = {}
    for key, prompt in prompts.items():
        group = cache.get(key)
        if group is None:
            continue
        tree = forest.plant()
        trees[key] = forest, tree
        for r in group.responses:
            forest.add(tree, with_prompt_tail(prompt, r.tokens, rule.longest), weight=r.reward)
    return HistoryIndex(trees)


@dataclasses.dataclass(eq=False)
class _Group:
    """The running requests of a prompt: prompt key, prompt tail, and number of requests left."""

    key: bytes
    tail: np.ndarray
    num_left: int = 0


class GrowingHistory:
    """Responses by prompt, indexed as they finish, and the numbers of running groups.

    All running requests with the same prompt form a group. Beyond `max_tokens` (0: nothing is
    indexed), the least recently used prompts without running requests are forgotten.
    """

    def __init__(self, max_tokens: int, rule: ProposalRule = RULE) -> None:
        self._max_tokens = max_tokens
        self._longest = rule.longest
        self._forest = SuffixForest(rule.context_tokens)
        self._prompts = collections.OrderedDict[bytes, int]()  # trees, the most recently used last
        self._numbers: dict[bytes, int] = {}  # of running groups, by prompt
        self._groups: dict[int, _Group] = {}
        self._trees: dict[int, int] = {}
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def by_forest(self, keys: Mapping[int, str]) -> list[tuple[SuffixForest, Mapping[int, int]]]:
        """Return the forest, and a live mapping of running groups to trees."""
        return [(self._forest, self._trees)]

    def begin(self, prompt: Sequence[int], num_requests: int) -> int:
        """Register new requests of a prompt, and return the number of their group."""
        ids = np.asarray(prompt, np.int32)
        key = hashlib.sha256(ids.tobytes()).digest()
        if key not in self._numbers:
            self._num_groups += 1
            self._numbers[key] = self._num_groups
            self._groups[self._num_groups] = _Group(key, ids[-self._longest :].copy())
            if self._max_tokens:
                self._trees[self._num_groups] = self._tree(key)
        number = self._numbers[key]
        self._groups[number].num_left += num_requests
        return number

    def _tree(self, key: bytes) -> int:
        if key not in self._prompts:
            self._prompts[key] = self._forest.plant()
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def end(self, number: int, response: np.ndarray | None) -> bool:
        """Index a response unless it is None; return whether the group has no requests left."""
        group = self._groups[number]
        if self._max_tokens and response is not None:
            self._forest.add(self._trees[number], np.concatenate([group.tail, response]))
        group.num_left -= 1
        if group.num_left:
            return False
        del self._groups[number], self._numbers[group.key]
        self._trees.pop(number, None)
        while self._forest.num_tokens > self._max_tokens:
            oldest = next((key for key in self._prompts if key not in self._numbers), None)
            if oldest is None:
                break
            self._forest.uproot(self._prompts.pop(oldest))
        return True

    def drop_groups(self) -> None:
        """Forget all running requests."""
        for groups in (self._numbers, self._groups, self._trees):
            groups.clear()


class HistoryDrafter(Drafter):
    """A drafter that searches the tree of each prompt; `keys` maps groups to prompt keys."""

    def __init__(
        self,
        index: HistoryIndex | GrowingHistory,
        keys: Mapping[int, str],
        rule: ProposalRule = RULE,
    ) -> None:
        # per forest: followers, and trees by group
        self._parts = [
            (RequestFollowers(forest, rule, Source.HISTORY), trees)
            for forest, trees in index.by_forest(keys)
        ]

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        if len(self._parts) == 1:
            [(followers, trees)] = self._parts
            return followers.propose_by_group(live, trees, max_nodes_A, max_nodes)
        drafts = no_drafts(len(live), max_nodes)
        drafts.sources_AN[:] = Source.HISTORY
        for followers, trees in self._parts:
            own_A = np.isin(live.group_ids_A, list(trees))
            if own_A.any():
                drafts.put(
                    own_A,
                    followers.propose_by_group(
                        live.take(own_A), trees, max_nodes_A[own_A], max_nodes
                    ),
                )
        return drafts

    def finished(self, live: LiveSlots) -> None:
        for followers, _ in self._parts:
            followers.forget(live.request_ids_A.tolist())


REACH = 16  # distance of the search for the last two tokens in the old response, either way
FOUND = 0.95
LOST = 0.5  # probability of the first draft token, with and without a match
NEXT = 0.98  # factor per further draft token


class _Texts(NamedTuple):
    """The old responses, and the shift of each relative to the new response."""

    tokens_FL: np.ndarray
    length_F: np.ndarray
    shift_F: np.ndarray


class LastResponseDrafter(Drafter):
    """A drafter of one chain per request, from the old responses `cached` by request id."""

    def __init__(self, cached: Mapping[int, np.ndarray]) -> None:
        max_length = max(map(len, cached.values()), default=0)
        self._index = {request_id: f for f, request_id in enumerate(cached)}
        tokens_FL = np.full((len(cached), max_length), PADDING, np.int32)
        for row_L, tokens in zip(tokens_FL, cached.values(), strict=True):
            row_L[: len(tokens)] = tokens
        length_F = np.array([len(t) for t in cached.values()], np.int32)
        self._texts = _Texts(tokens_FL, length_F, np.zeros(len(cached), np.int32))

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        drafts = no_drafts(len(live), max_nodes)
        which_A = np.array([self._index.get(r, -1) for r in live.request_ids_A.tolist()], np.int32)
        _continue(
            live.tokens_BL,
            live.rows_A,
            live.prompt_tokens_A,
            live.total_tokens_A,
            which_A,
            np.asarray(max_nodes_A, np.int32),
            self._texts,
            drafts,
        )
        drafts.sources_AN[:] = Source.LAST
        return drafts


@numba.njit(cache=True, nogil=True)
def _continue(  # type: ignore[no-untyped-def]
    tokens_BL, rows_A, prompt_tokens_A, total_tokens_A, which_A, max_A, texts, out
):
    for a in range(len(rows_A)):
        f = which_A[a]
        if f < 0:
            continue
        row = tokens_BL[rows_A[a]]
        end = total_tokens_A[a]
        emitted = end - prompt_tokens_A[a]
        is_match = emitted == 0 or _matches(row, end, emitted, texts, f, texts.shift_F[f], 1)
        if not is_match:
            for step in range(1, 2 * REACH + 1):  # +1, −1, +2, −2, …
                shift = texts.shift_F[f] + ((step + 1) // 2 if step % 2 else -(step // 2))
                if _matches(row, end, emitted, texts, f, shift, 2):
                    texts.shift_F[f] = shift
                    is_match = True
                    break
        at = emitted + texts.shift_F[f]
        prob = FOUND if is_match else LOST
        for n in range(min(max_A[a], out.tokens_AN.shape[1])):
            if at + n < 0 or at + n >= texts.length_F[f]:
                break
            out.tokens_AN[a, n] = texts.tokens_FL[f, at + n]
            out.parents_AN[a, n] = n - 1
            out.prob_AN[a, n] = prob
            prob *= NEXT
            out.count_A[a] = n + 1


@numba.njit(cache=True, nogil=True)
def _matches(row, end, emitted, texts, f, shift, num_tokens):  # type: ignore[no-untyped-def]
    """Return whether the last `num_tokens` of the response equal text f, shifted by `shift`."""
    at = emitted + shift  # position of the next token
    if num_tokens > emitted or at - num_tokens < 0 or at > texts.length_F[f]:
        return False
    for k in range(1, num_tokens + 1):
        if row[end - k] != texts.tokens_FL[f, at - k]:
            return False
    return True
