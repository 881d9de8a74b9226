"""ArcticInference's suffix decoding on `benchmarks.drafts`' replay, in each of its settings.

Runs in an interpreter that has it: `python -m benchmarks.baselines.arctic_suffix FILE`.
A cache of its own for each group: other groups' texts would only mislead it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.draft_texts import Group, accepted_by_walk, load_groups

FACTORS = (1.0, 2.0, 4.0)  # tokens speculated at most, as a multiple of the match
LEAST_CHANCES = (0.1, 0.05, 0.0)
TREES = (False, True)


def replay(group: Group, depth: int, budget: int, **setting: Any) -> tuple[int, int, int]:
    """(lookups, guesses that were right, guesses), the texts growing side by side."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=depth)
    totals = [group.prompt_tokens + 1] * len(group.texts)
    for i, text in enumerate(group.texts):
        cache.start_request(i, text[: group.prompt_tokens])
        cache.add_active_response(i, text[group.prompt_tokens : totals[i]])
    lookups = accepted = drafted = 0
    while alive := [i for i, text in enumerate(group.texts) if totals[i] < len(text)]:
        new: dict[int, np.ndarray] = {}
        for i in alive:
            text, at = group.texts[i], totals[i]
            most = min(budget, len(text) - at)
            context = text[max(0, at - depth) : at]
            draft = cache.speculate(i, context, max_spec_tokens=most, **setting)
            right = accepted_by_walk(draft.token_ids, draft.parents, text[at:])
            lookups, accepted = lookups + 1, accepted + right
            drafted += len(draft.token_ids)
            totals[i] = min(at + right + 1, len(text))
            new[i] = text[at : totals[i]]
        for i, tokens in new.items():  # siblings see a round's tokens after it
            cache.add_active_response(i, tokens)
    return lookups, accepted, drafted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", type=Path)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True)
    arguments = parser.parse_args()
    groups = load_groups(arguments.groups)
    rows = []
    for factor, chance, tree in itertools.product(FACTORS, LEAST_CHANCES, TREES):
        setting = {
            "max_spec_factor": factor,
            "min_token_prob": chance,
            "use_tree_spec": tree,
        }
        counts = [replay(group, arguments.depth, arguments.budget, **setting) for group in groups]
        lookups, accepted, drafted = (sum(column) for column in zip(*counts, strict=True))
        means = {"mean_accepted": accepted / lookups, "mean_drafted": drafted / lookups}
        rows.append(setting | {"lookups": lookups} | {k: round(v, 4) for k, v in means.items()})
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
