"""Diversity of a batch of responses: Distinct-1 and Self-BLEU, on token ids.

Both use the first `MAX_TOKENS` tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MAX_TOKENS = 512
ORDER = 4  # the longest n-grams of BLEU
FLOOR = 0.1  # instead of 0 matches (smoothing 1 of Chen and Cherry, 2014)


def distinct_1(responses: Sequence[np.ndarray]) -> float:
    """Return distinct tokens over all tokens of the batch. Source: Li et al., arXiv 1510.03055."""
    tokens = np.concatenate([r[:MAX_TOKENS] for r in responses])
    return len(np.unique(tokens)) / max(len(tokens), 1)


def self_bleu(responses: Sequence[np.ndarray], group_ids: Sequence[int]) -> float:
    """Return the mean BLEU-4 of responses against their siblings; 1 if all siblings are equal.

    BLEU = min(1, e^(1 − r/c)) · exp(mean over n of log p_n), where p_n is the share of n-grams of
    the response that a sibling has too (each counted at most as often as in any one sibling), c is
    the length of the response, and r is the closest sibling length. Orders longer than a response
    and responses without siblings are left out; the result is nan if no response has siblings.
    N-grams are compared by hashes of 64 bits, minus the bits that number the responses of a group.
    A group of 16 has a wrong match with a probability of 1e-10.
    Source: Zhu et al., arXiv 1802.01886.
    """
    groups: dict[int, list[np.ndarray]] = {}
    for response, group in zip(responses, group_ids, strict=True):
        groups.setdefault(group, []).append(response[:MAX_TOKENS])
    scores = [_group_bleu(siblings) for siblings in groups.values() if len(siblings) > 1]
    return float(np.mean(np.concatenate(scores))) if scores else math.nan


def _group_bleu(group: Sequence[np.ndarray]) -> np.ndarray:
    """Return the BLEU-4 of each response of a group; [R]."""
    lengths_R = np.array([len(response) for response in group])
    grams_NR = lengths_R - np.arange(ORDER)[:, None]
    exists_NR = grams_NR > 0
    shares_NR = np.maximum(_matches(group, lengths_R), FLOOR) / np.maximum(grams_NR, 1)
    logs_R = np.where(exists_NR, np.log(shares_NR), 0.0).sum(0) / exists_NR.sum(0)
    penalties_R = np.minimum(0.0, 1 - _closest_lengths(lengths_R) / lengths_R)
    return np.exp(penalties_R + logs_R)


def _matches(group: Sequence[np.ndarray], lengths_R: np.ndarray) -> np.ndarray:
    """Return, by order and response, the n-grams that a sibling has too; float64 [ORDER, R]."""
    responses_T = np.repeat(np.arange(len(group), dtype=np.uint64), lengths_R)
    tokens_T = np.concatenate(group).astype(np.uint64)
    bits = np.uint64((len(group) - 1).bit_length())
    hashes = np.zeros_like(tokens_T)
    matches = []
    for n in range(ORDER):
        num = max(0, len(tokens_T) - n)
        hashes = _mixed(hashes[:num] + tokens_T[n:])
        is_inside = responses_T[n:] == responses_T[:num]
        keys = (hashes << bits | responses_T[:num])[is_inside]
        keys.sort()
        matches.append(_clipped_counts(keys, bits, len(group)))
    return np.stack(matches)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return a hash of each number (splitmix64)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _clipped_counts(keys: np.ndarray, bits: np.uint64, num_responses: int) -> np.ndarray:
    """Return the sum of n-gram counts, each at most the highest sibling count; float64 [R].

    A key is the hash of an n-gram above the `bits` that number its response. Keys are sorted, so
    that the responses of an n-gram are adjacent.
    """
    if not len(keys):
        return np.zeros(num_responses)
    starts = _run_starts(keys)
    counts = np.diff(starts, append=len(keys))
    grams = keys[starts] >> bits
    responses = (keys[starts] ^ (grams << bits)).astype(np.int64)
    gram_starts = _run_starts(grams)
    lengths = np.diff(gram_starts, append=len(grams))
    highest = np.repeat(np.maximum.reduceat(counts, gram_starts), lengths)
    is_highest = counts == highest
    holders = np.repeat(np.add.reduceat(is_highest.astype(np.int64), gram_starts), lengths)
    others = np.maximum.reduceat(np.where(is_highest, 0, counts), gram_starts)
    sibling_counts = np.where(is_highest & (holders == 1), np.repeat(others, lengths), highest)
    return np.bincount(responses, np.minimum(counts, sibling_counts), num_responses)


def _run_starts(values: np.ndarray) -> np.ndarray:
    """Return the indices where sorted values change, including index 0."""
    changes = np.empty(len(values), bool)
    changes[0] = True
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return np.flatnonzero(changes)


def _closest_lengths(lengths_R: np.ndarray) -> np.ndarray:
    """Return the closest sibling length of each response; ties go to the shorter sibling."""
    order = np.argsort(lengths_R)
    gaps = np.diff(lengths_R[order])
    before = np.r_[2 * MAX_TOKENS, gaps]
    after = np.r_[gaps, 2 * MAX_TOKENS]
    closest_R = np.empty_like(lengths_R)
    closest_R[order] = lengths_R[order] + np.where(before <= after, -before, after)
    return closest_R
