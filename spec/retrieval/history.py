"""HistoSpec: drafts from the prompt's own responses of the last epoch (RhymeRL, section 5).

The index of the next step's prompts is built while training runs (`build_index`, in a thread:
its kernels do not hold the interpreter lock), then given to the drafter of that step. The weight
of a branch is the sum of the rewards of its responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from spec.drafter import Drafter, Drafts, LiveSlots, Source
from spec.retrieval.suffix_arrays import TreeArrays
from spec.retrieval.suffix_drafter import RequestFollowers, with_prompt_tail
from spec.retrieval.suffix_forest import ProposalRule, SuffixForest
from spec.reuse.rollout_cache import CachedGroup

# Section 5.4: a prefix of 7 tokens, shortened down to 3 until it is found; one branch, along which
# the context grows by up to the 32 draft tokens of the longest window.
PAPER_RULE = ProposalRule(longest=7, shortest=3, rank_by="weight", max_children=1)
# Trees grow by probability, which the last 16 tokens estimate as well as the whole branch does:
# counts of longer contexts are smaller (benchmarks/results/drafts_contexts.json).
RULE = ProposalRule(
    longest=16,
    shortest=1,
    rank_by="weight",
    max_children=2,
    prior=0.3,
    min_prob=0.05,
    path_tokens=0,
)


@dataclasses.dataclass(frozen=True, eq=False)
class HistoryIndex:
    """The trees of some prompts by key, in one forest; prompts without history have none."""

    forest: SuffixForest
    trees: Mapping[str, int]

    @property
    def num_tokens(self) -> int:
        return self.forest.num_tokens


class Groups(Protocol):
    """Cached groups by prompt key: a RolloutCache, or a mapping."""

    def get(self, key: str, /) -> CachedGroup | None: ...


@dataclasses.dataclass(frozen=True, eq=False)
class IndexPart:
    """The trees of some prompts as arrays, for other programs; tree t is that of `keys[t]`."""

    keys: tuple[str, ...]
    trees: TreeArrays


def build_index(
    cache: Groups, prompts: Mapping[str, np.ndarray], rule: ProposalRule = RULE
) -> HistoryIndex:
    """Index the cached responses to `prompts` (prompt ids by key), for drafters of this rule.

    Of `prompts` only the last `rule.longest` tokens are read.
    """
    forest = SuffixForest(rule.context_tokens)
    trees = {}
    for key, prompt in prompts.items():
        group = cache.get(key)
        if group is None:
            continue
        trees[key] = tree = forest.plant()
        for r in group.responses:
            forest.add(tree, with_prompt_tail(prompt, r.tokens, rule.longest), weight=r.reward)
    return HistoryIndex(forest, trees)


def part_of(index: HistoryIndex) -> IndexPart:
    """Return an index that `build_index` has made, as arrays."""
    return IndexPart(tuple(index.trees), index.forest.arrays())


def joined(parts: Sequence[IndexPart]) -> HistoryIndex:
    """Return one index of parts of the same rule."""
    forest, ids = SuffixForest.of([part.trees for part in parts])
    pairs = zip(parts, ids, strict=True)
    trees = {key: tree for part, of in pairs for key, tree in zip(part.keys, of, strict=True)}
    return HistoryIndex(forest, trees)


class HistoryDrafter(Drafter):
    """Drafts from the tree of each request's prompt; `keys` names the prompt of a group."""

    def __init__(
        self, index: HistoryIndex, keys: Mapping[int, str], rule: ProposalRule = RULE
    ) -> None:
        self._trees = {g: index.trees[key] for g, key in keys.items() if key in index.trees}
        self._followers = RequestFollowers(index.forest, rule, Source.HISTORY)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        return self._followers.propose_by_group(live, self._trees, max_nodes_A, max_nodes)

    def finished(self, live: LiveSlots) -> None:
        self._followers.forget(live.request_ids_A.tolist())
