"""Drafts from last epoch's responses: of the same prompt, and of the same sample.

`HistoryDrafter` is HistoSpec (RhymeRL, section 5). The index of the next step's prompts is built
while training runs (`build_index`, in a thread: its kernels release the interpreter lock). The
weight of a branch is the sum of the rewards of its responses.

`LastResponseDrafter` continues a request's own last response. If noise repeats (`coupled`), or a
prefix was cut (`lenient`), it stays a good draft after a token that differs: at the same position
if a token was replaced, a few further if some were inserted or left out.
A = live requests, F = known requests, L = tokens of a response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np

from spec.drafter import PADDING, Drafter, Drafts, LiveSlots, Source, no_drafts
from spec.retrieval.suffix_drafter import RequestFollowers, with_prompt_tail
from spec.retrieval.suffix_forest import ProposalRule, SuffixForest
from spec.reuse.rollout_cache import CachedGroup, RolloutCache

# Section 5.4: a prefix of 7 tokens, shortened down to 3 until it is found; one branch, along which
# the context grows by up to the 32 draft tokens of the longest window.
PAPER_RULE = ProposalRule(longest=7, shortest=3, by_weight=True, max_children=1)
# Trees grow by probability, which the last 16 tokens estimate as well as the whole branch does:
# counts of longer contexts are smaller (benchmarks/results/drafts_contexts.json).
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
    """The tree of each prompt by key, and its forest; none of prompts without history."""

    trees: Mapping[str, tuple[SuffixForest, int]]

    @property
    def num_tokens(self) -> int:
        return sum(forest.num_tokens for forest in {forest for forest, _ in self.trees.values()})


def build_index(
    cache: RolloutCache | Mapping[str, CachedGroup],
    prompts: Mapping[str, np.ndarray],
    rule: ProposalRule = RULE,
) -> HistoryIndex:
    """Index the cached responses to `prompts`, after `rule.longest` tokens of each prompt."""
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


class HistoryDrafter(Drafter):
    """Drafts from the tree of each request's prompt; `keys` names the prompt of a group."""

    def __init__(
        self, index: HistoryIndex, keys: Mapping[int, str], rule: ProposalRule = RULE
    ) -> None:
        trees = [(g, *index.trees[key]) for g, key in keys.items() if key in index.trees]
        # of each forest: its followers, and trees by group
        self._parts = [
            (RequestFollowers(one, rule, Source.HISTORY), {g: t for g, f, t in trees if f is one})
            for one in {forest for _, forest, _ in trees}
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
                args = live.take(own_A), trees, max_nodes_A[own_A], max_nodes
                drafts.put(own_A, followers.propose_by_group(*args))
        return drafts

    def finished(self, live: LiveSlots) -> None:
        for followers, _ in self._parts:
            followers.forget(live.request_ids_A.tolist())


REACH = 16  # how far the old response is searched for the last two tokens, to either side
FOUND, LOST = 0.95, 0.5  # probability of the first draft token, after a match and without one
NEXT = 0.98  # the factor of each further one


class _Texts(NamedTuple):
    """The old responses, and how far each is shifted against the request's position."""

    tokens_FL: np.ndarray
    length_F: np.ndarray
    shift_F: np.ndarray


class LastResponseDrafter(Drafter):
    """Drafts a chain a request from `cached`, last epoch's responses by request id."""

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
        row, end = tokens_BL[rows_A[a]], total_tokens_A[a]
        emitted = end - prompt_tokens_A[a]
        is_match = emitted == 0 or _matches(row, end, emitted, texts, f, texts.shift_F[f], 1)
        if not is_match:
            for step in range(1, 2 * REACH + 1):  # +1, −1, +2, −2, …
                shift = texts.shift_F[f] + ((step + 1) // 2 if step % 2 else -(step // 2))
                if _matches(row, end, emitted, texts, f, shift, 2):
                    texts.shift_F[f], is_match = shift, True
                    break
        at = emitted + texts.shift_F[f]
        prob = FOUND if is_match else LOST
        for n in range(min(max_A[a], out.tokens_AN.shape[1])):
            if at + n < 0 or at + n >= texts.length_F[f]:
                break
            out.tokens_AN[a, n], out.parents_AN[a, n] = texts.tokens_FL[f, at + n], n - 1
            out.prob_AN[a, n] = prob
            prob *= NEXT
            out.count_A[a] = n + 1


@numba.njit(cache=True, nogil=True)
def _matches(row, end, emitted, texts, f, shift, num_tokens):  # type: ignore[no-untyped-def]
    """True if the response's last `num_tokens` equal text f's, `shift` positions further."""
    at = emitted + shift  # of the next token
    if num_tokens > emitted or at - num_tokens < 0 or at > texts.length_F[f]:
        return False
    for k in range(1, num_tokens + 1):
        if row[end - k] != texts.tokens_FL[f, at - k]:
            return False
    return True
