"""Which draft tokens were accepted, by a round that verified them or by plain decoding.

A = live requests, N = draft tokens of each at most.
"""

from __future__ import annotations

import numba
import numpy as np

from spec.drafter import Acceptance, Drafts, Source


def round_acceptance(
    drafts: Drafts, taken_A: np.ndarray, tokens_AN: np.ndarray, emitted_A: np.ndarray
) -> Acceptance:
    """Compare with a round over the first `taken_A`; its last token is never a draft token."""
    accepted_AN = _accepted(drafts, taken_A, tokens_AN, emitted_A - 1)
    return Acceptance(True, accepted_AN, np.arange(drafts.max_nodes) < taken_A[:, None])


def plain_acceptance(drafts: Drafts, tokens_AN: np.ndarray, emitted_A: np.ndarray) -> Acceptance:
    """Compare with plain rounds that drew `tokens_AN` instead, the first `emitted_A` valid."""
    depth_AN = _depths(drafts)
    observed_AN = (depth_AN > 0) & (depth_AN <= emitted_A[:, None])
    return Acceptance(False, _accepted(drafts, drafts.count_A, tokens_AN, emitted_A), observed_AN)


def longest_paths(drafts: Drafts, observed_AN: np.ndarray) -> np.ndarray:
    """Return the length of each request's longest observed path, the most that can be accepted."""
    return np.where(observed_AN, _depths(drafts), 0).max(axis=1, initial=0)


def by_source(drafts: Drafts, marked_AN: np.ndarray) -> np.ndarray:
    """Return how many of the marked draft tokens each `Source` gave; int64 [sources]."""
    count = np.zeros(len(Source), np.int64)
    _count(drafts.sources_AN, marked_AN, count)
    return count


def sums(drafts: Drafts, acceptance: Acceptance) -> tuple[np.ndarray, np.ndarray]:
    """Return (accepted, expected to be) of each request's observed draft tokens; float64 [A]."""
    accepted_A, expected_A = np.zeros((2, len(drafts.count_A)))
    _add(drafts.prob_AN, acceptance.accepted_AN, acceptance.observed_AN, accepted_A, expected_A)
    return accepted_A, expected_A


def _depths(drafts: Drafts) -> np.ndarray:
    """Draft tokens on the way to each one, itself included; 0 where there is none."""
    depth_AN = np.zeros(drafts.tokens_AN.shape, np.int32)
    _measure(drafts.parents_AN, drafts.count_A, depth_AN)
    return depth_AN


def _accepted(
    drafts: Drafts, verified_A: np.ndarray, tokens_AN: np.ndarray, known_A: np.ndarray
) -> np.ndarray:
    accepted_AN = np.zeros(drafts.tokens_AN.shape, bool)
    _follow(drafts.tokens_AN, drafts.parents_AN, verified_A, tokens_AN, known_A, accepted_AN)
    return accepted_AN


@numba.njit(cache=True, nogil=True)
def _count(sources_AN, marked_AN, count):  # type: ignore[no-untyped-def]
    A, N = sources_AN.shape
    for a in range(A):
        for n in range(N):
            if marked_AN[a, n]:
                count[sources_AN[a, n]] += 1


@numba.njit(cache=True, nogil=True)
def _add(  # type: ignore[no-untyped-def]
    prob_AN, accepted_AN, observed_AN, accepted_A, expected_A
):
    A, N = prob_AN.shape
    for a in range(A):
        for n in range(N):
            accepted_A[a] += accepted_AN[a, n]
            if observed_AN[a, n]:
                expected_A[a] += prob_AN[a, n]


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
def _measure(parents_AN, count_A, depth_AN):  # type: ignore[no-untyped-def]
    for a in range(len(count_A)):
        for i in range(count_A[a]):
            above = parents_AN[a, i]
            depth_AN[a, i] = 1 if above < 0 else depth_AN[a, above] + 1
