"""Which draft tokens were accepted, by a round that verified them or by plain decoding.

A = live requests, N = draft tokens of each at most.
"""

from __future__ import annotations

import numba
import numpy as np

from spec.drafter import Acceptance, Drafts


def round_acceptance(
    drafts: Drafts, taken_A: np.ndarray, tokens_AN: np.ndarray, emitted_A: np.ndarray
) -> Acceptance:
    """Compare with a round over the first `taken_A`; its last token is never a draft token."""
    accepted_AN = _accepted(drafts, taken_A, tokens_AN, emitted_A - 1)
    return Acceptance(True, accepted_AN, np.arange(drafts.max_nodes) < taken_A[:, None])


def plain_acceptance(drafts: Drafts, tokens_AN: np.ndarray, emitted_A: np.ndarray) -> Acceptance:
    """Compare with plain rounds that drew `tokens_AN` instead, the first `emitted_A` valid."""
    observed_AN = np.zeros(drafts.tokens_AN.shape, bool)
    _mark_within(drafts.parents_AN, drafts.count_A, emitted_A, observed_AN)
    return Acceptance(False, _accepted(drafts, drafts.count_A, tokens_AN, emitted_A), observed_AN)


def longest_paths(drafts: Drafts, observed_AN: np.ndarray) -> np.ndarray:
    """Return the length of each request's longest observed path, the most that can be accepted."""
    longest_A = np.zeros(len(drafts.count_A), np.int64)
    _measure_paths(drafts.parents_AN, observed_AN, longest_A)
    return longest_A


def _accepted(
    drafts: Drafts, verified_A: np.ndarray, tokens_AN: np.ndarray, known_A: np.ndarray
) -> np.ndarray:
    accepted_AN = np.zeros(drafts.tokens_AN.shape, bool)
    _follow(drafts.tokens_AN, drafts.parents_AN, verified_A, tokens_AN, known_A, accepted_AN)
    return accepted_AN


@numba.njit(cache=True, nogil=True)
def _follow(  # type: ignore[no-untyped-def]
    draft_AN, parents_AN, verified_A, tokens_AN, known_A, accepted_AN
):
    for a in range(len(verified_A)):
        node = -1
        for j in range(known_A[a]):
            for i in range(node + 1, verified_A[a]):
                if parents_AN[a, i] == node and draft_AN[a, i] == tokens_AN[a, j]:
                    accepted_AN[a, i] = True
                    node = i
                    break


@numba.njit(cache=True, nogil=True)
def _measure_paths(parents_AN, observed_AN, longest_A):  # type: ignore[no-untyped-def]
    depth_N = np.empty(parents_AN.shape[1], np.int32)
    for a in range(len(longest_A)):
        for i in range(parents_AN.shape[1]):
            if observed_AN[a, i]:  # and so were its ancestors
                depth_N[i] = 1 if parents_AN[a, i] < 0 else depth_N[parents_AN[a, i]] + 1
                longest_A[a] = max(longest_A[a], depth_N[i])


@numba.njit(cache=True, nogil=True)
def _mark_within(parents_AN, count_A, known_A, within_AN):  # type: ignore[no-untyped-def]
    depth_N = np.empty(parents_AN.shape[1], np.int32)
    for a in range(len(count_A)):
        for i in range(count_A[a]):
            depth_N[i] = 1 if parents_AN[a, i] < 0 else depth_N[parents_AN[a, i]] + 1
            within_AN[a, i] = depth_N[i] <= known_A[a]
