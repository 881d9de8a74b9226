"""What became of draft tokens: of those that a round tried, and of those that plain decoding
passed.

A = live requests, N = draft tokens of each at most.
"""

from __future__ import annotations

import dataclasses

import numba
import numpy as np

from spec.drafter import Drafts


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """What became of draft tokens; bool [A, N] as in their `Drafts`.

    `accepted_AN` is the path that a request's next tokens took, `observed_AN` the draft tokens of
    which that is known. `verified`: a round verified them; else plain decoding went past.
    """

    verified: bool
    accepted_AN: np.ndarray
    observed_AN: np.ndarray


def of_round(
    drafts: Drafts, num_nodes: int, tokens_AN: np.ndarray, emitted_A: np.ndarray
) -> Acceptance:
    """Of a round over trees of `num_nodes`: all but the last token of each were draft tokens."""
    tried_A = np.minimum(drafts.count_A, num_nodes - 1)
    accepted_AN = _accepted(drafts, tried_A, tokens_AN, emitted_A - 1)
    return Acceptance(True, accepted_AN, np.arange(drafts.max_nodes) < tried_A[:, None])


def of_plain(drafts: Drafts, tokens_AN: np.ndarray, emitted_A: np.ndarray) -> Acceptance:
    """Of plain rounds that drew `tokens_AN` instead, the first `emitted_A` valid."""
    observed_AN = np.zeros(drafts.tokens_AN.shape, bool)
    _mark_within(drafts.parents_AN, drafts.count_A, emitted_A, observed_AN)
    return Acceptance(False, _accepted(drafts, drafts.count_A, tokens_AN, emitted_A), observed_AN)


def deepest(drafts: Drafts, observed_AN: np.ndarray) -> np.ndarray:
    """Draft tokens on the longest path of those that were checked: the most that can be right;
    [A].
    """
    deepest_A = np.zeros(len(drafts.count_A), np.int64)
    _deepest(drafts.parents_AN, observed_AN, deepest_A)
    return deepest_A


def _accepted(
    drafts: Drafts, tried_A: np.ndarray, tokens_AN: np.ndarray, known_A: np.ndarray
) -> np.ndarray:
    accepted_AN = np.zeros(drafts.tokens_AN.shape, bool)
    _follow(drafts.tokens_AN, drafts.parents_AN, tried_A, tokens_AN, known_A, accepted_AN)
    return accepted_AN


@numba.njit(cache=True, nogil=True)
def _follow(  # type: ignore[no-untyped-def]
    draft_AN, parents_AN, tried_A, tokens_AN, known_A, accepted_AN
):
    for a in range(len(tried_A)):
        node = -1
        for j in range(known_A[a]):
            for i in range(node + 1, tried_A[a]):
                if parents_AN[a, i] == node and draft_AN[a, i] == tokens_AN[a, j]:
                    accepted_AN[a, i] = True
                    node = i
                    break


@numba.njit(cache=True, nogil=True)
def _deepest(parents_AN, observed_AN, deepest_A):  # type: ignore[no-untyped-def]
    depth_N = np.empty(parents_AN.shape[1], np.int32)
    for a in range(len(deepest_A)):
        for i in range(parents_AN.shape[1]):
            if observed_AN[a, i]:  # those above it were checked too
                depth_N[i] = 1 if parents_AN[a, i] < 0 else depth_N[parents_AN[a, i]] + 1
                deepest_A[a] = max(deepest_A[a], depth_N[i])


@numba.njit(cache=True, nogil=True)
def _mark_within(parents_AN, count_A, known_A, within_AN):  # type: ignore[no-untyped-def]
    depth_N = np.empty(parents_AN.shape[1], np.int32)
    for a in range(len(count_A)):
        for i in range(count_A[a]):
            depth_N[i] = 1 if parents_AN[a, i] < 0 else depth_N[parents_AN[a, i]] + 1
            within_AN[a, i] = depth_N[i] <= known_A[a]
