"""Diversity of a batch of responses: Distinct-1 and Self-BLEU, on token ids.

Both look at the first `MAX_TOKENS` of a response.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

Ngrams = collections.Counter[tuple[int, ...]]
MAX_TOKENS = 512
ORDER = 4  # the longest n-grams of BLEU
FLOOR = 0.1  # instead of 0 matches (smoothing 1 of Chen and Cherry, 2014)


def distinct_1(responses: Sequence[np.ndarray]) -> float:
    """Return different tokens over all tokens of the batch. Source: Li et al., arXiv 1510.03055."""
    tokens = np.concatenate([r[:MAX_TOKENS] for r in responses])
    return len(np.unique(tokens)) / max(len(tokens), 1)


def self_bleu(responses: Sequence[np.ndarray], group_ids: Sequence[int]) -> float:
    """Return the mean BLEU-4 of responses against their siblings; 1 if all siblings are equal.

    BLEU = min(1, e^(1 − r/c)) · exp(mean over n of log p_n): p_n is the share of the response's
    n-grams that a sibling has too (each counted at most as often as in any one sibling), c the
    response's length and r the sibling length closest to it. Orders longer than a response are left
    out, and so are responses without siblings; nan if no response has any.
    Source: Zhu et al., arXiv 1802.01886.
    """
    groups: dict[int, list[list[int]]] = {}
    for response, group in zip(responses, group_ids, strict=True):
        groups.setdefault(group, []).append(response[:MAX_TOKENS].tolist())
    scores: list[float] = []
    for siblings in groups.values():
        if len(siblings) > 1:
            scores += _group_bleu(siblings)
    return float(np.mean(scores)) if scores else math.nan


def _group_bleu(group: list[list[int]]) -> list[float]:
    counts = [[_ngrams(r, n) for n in range(1, ORDER + 1)] for r in group]
    highest = [_two_highest([c[n] for c in counts]) for n in range(ORDER)]
    scores = []
    for i, response in enumerate(group):
        logs = []
        for n in range(min(ORDER, len(response))):
            matches = 0
            for gram, count in counts[i][n].items():
                first, holder, second = highest[n][gram]
                matches += min(count, second if holder == i else first)
            logs.append(math.log(max(matches, FLOOR) / counts[i][n].total()))
        lengths = [len(r) for j, r in enumerate(group) if j != i]
        closest = min(lengths, key=lambda r: (abs(r - len(response)), r))
        penalty = min(0.0, 1 - closest / len(response))
        scores.append(math.exp(penalty + float(np.mean(logs))))
    return scores


def _two_highest(counts: list[Ngrams]) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """Return by n-gram the highest count, its response, and the highest count of the others."""
    highest: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for i, of_one in enumerate(counts):
        for gram, count in of_one.items():
            first, holder, second = highest.get(gram, (0, -1, 0))
            if count > first:
                highest[gram] = (count, i, first)
            elif count > second:
                highest[gram] = (first, holder, count)
    return highest


def _ngrams(tokens: list[int], n: int) -> Ngrams:
    return collections.Counter(zip(*(tokens[k:] for k in range(n)), strict=False))
