"""The history that a rollout worker drafts from: shards of an index, which it fetches, and groups.

It drafts without the shards that it does not get.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rl.remote.history_service import CODEC, Fetch, Trees
from rl.remote.messages import Drafting
from rl.remote.wire import WireError
from rl.runtime.waits import ProgramLost
from spec.retrieval import suffix_arrays
from spec.retrieval.history import HistoryIndex, IndexPart, build_index, joined, part_of
from spec.retrieval.suffix_forest import ProposalRule
from spec.reuse.rollout_cache import of_group

# Asks the program of an address, and waits; raises ProgramLost where there is no answer in time.
AskAt = Callable[[str, bytes], bytes]
MOST_THREADS = 16


def history_index(
    asked: Drafting,
    rule: ProposalRule,
    vocab_size: int,
    ask: AskAt | None,
    told: Callable[[str], None],
) -> HistoryIndex:
    """Return the index of a rollout's prompts; `told` hears of shards that are not in it."""
    prompts = {
        key: np.asarray(ids, np.int32)
        for key, ids in zip(asked.keys, asked.prompts, strict=True)
        if key in asked.history
    }
    own, indexed = build_index(asked.history, prompts, rule), asked.indexed
    if indexed is None or not indexed.addresses:
        return own

    def fetch(address: str) -> IndexPart | None:
        try:
            return _fetch(address, indexed.name, rule, vocab_size, ask)
        except (ProgramLost, ValueError) as error:
            told(f"it drafts without the history of {address}: {str(error)[:300]}")
            return None

    with ThreadPoolExecutor(min(len(indexed.addresses), MOST_THREADS)) as threads:
        fetched = list(threads.map(fetch, indexed.addresses))
    return joined([part_of(own), *(part for part in fetched if part is not None)])


def compile_join(rule: ProposalRule) -> None:
    """Compile the kernel that joins shards."""
    prompt = np.zeros(1, np.int32)
    group = of_group([prompt], [0.0])
    joined([part_of(build_index({"": group}, {"": prompt}, rule))])


def _fetch(
    address: str, name: str, rule: ProposalRule, vocab_size: int, ask: AskAt | None
) -> IndexPart:
    if ask is None:
        raise ProgramLost("this worker reaches no history workers")
    answer = CODEC.decode(ask(address, CODEC.encode(Fetch(name))))
    if not isinstance(answer, Trees):
        raise WireError(str(getattr(answer, "message", answer)))
    trees = answer.part.trees
    suffix_arrays.check(trees, vocab_size)
    if trees.max_context != rule.context_tokens:
        raise WireError(f"expected contexts of {rule.context_tokens}, got {trees.max_context}")
    return answer.part
