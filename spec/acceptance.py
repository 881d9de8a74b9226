"""Which draft tokens were accepted, by a round that verified them or by plain decoding.

A = live requests, N = draft tokens of each at most.
"""

from __future__ import annotations

import numba
import numpy as np

from spec.drafter import Acceptance, Drafts, Source

# what is assumed of draft tokens before any was observed: how many, and their acceptance
PRIOR_DRAFTS, PRIOR_PROB = 8, 0.7


def round_acceptance(
    drafts: Drafts, taken_A: np.ndarray, tokens_AN: np.ndarray, emitted_A: np.ndarray
) -> Acceptance:
    """Compare with a round over the first `taken_A`; its last token is never a draft token."""
    accepted_AN = _accepted(*drafts[:2], taken_A, tokens_AN, emitted_A - 1)
    return Acceptance(True, accepted_AN, np.arange(drafts.max_nodes) < taken_A[:, None])


def plain_acceptance(drafts: Drafts, tokens_AN: np.ndarray, emitted_A: np.ndarray) -> Acceptance:
    """Compare with plain rounds that drew `tokens_AN` instead, the first `emitted_A` valid."""
    depth_AN = _depths(drafts.parents_AN, drafts.count_A)
    accepted_AN = _accepted(*drafts[:2], drafts.count_A, tokens_AN, emitted_A)
    return Acceptance(False, accepted_AN, (depth_AN > 0) & (depth_AN <= emitted_A[:, None]))


def longest_paths(drafts: Drafts, observed_AN: np.ndarray) -> np.ndarray:
    """Return the length of each request's longest observed path, the most that can be accepted."""
    depth_AN = _depths(drafts.parents_AN, drafts.count_A)
    return np.where(observed_AN, depth_AN, 0).max(axis=1, initial=0)


def by_source(drafts: Drafts, marked_AN: np.ndarray) -> np.ndarray:
    """Return how many of the marked draft tokens each `Source` gave; int64 [sources]."""
    return _count(drafts.sources_AN, marked_AN, len(Source))


def sums(drafts: Drafts, acceptance: Acceptance) -> tuple[np.ndarray, np.ndarray]:
    """Return (accepted, expected to be) of each request's observed draft tokens; float64 [A]."""
    return _sums(drafts.prob_AN, acceptance.accepted_AN, acceptance.observed_AN)


@numba.njit(cache=True, nogil=True)
def _count(sources_AN, marked_AN, num_sources):  # type: ignore[no-untyped-def]
    count = np.zeros(num_sources, np.int64)
    for a in range(len(sources_AN)):
        for n in range(sources_AN.shape[1]):
            if marked_AN[a, n]:
                count[sources_AN[a, n]] += 1
    return count


@numba.njit(cache=True, nogil=True)
def _sums(prob_AN, accepted_AN, observed_AN):  # type: ignore[no-untyped-def]
    accepted_A, expected_A = np.zeros(len(prob_AN)), np.zeros(len(prob_AN))
    for a in range(len(prob_AN)):
        for n in range(prob_AN.shape[1]):
            accepted_A[a] += accepted_AN[a, n]
            if observed_AN[a, n]:
                expected_A[a] += prob_AN[a, n]
    return accepted_A, expected_A


@numba.njit(cache=True, nogil=True)
def _accepted(draft_AN, parents_AN, verified_A, tokens_AN, known_A):  # type: ignore[no-untyped-def]
    accepted_AN = np.zeros(draft_AN.shape, np.bool_)
    for a in range(len(verified_A)):
        node = -1
        for j in range(known_A[a]):
            for i in range(node + 1, verified_A[a]):
                if parents_AN[a, i] == node and draft_AN[a, i] == tokens_AN[a, j]:
                    accepted_AN[a, i] = True
                    node = i
                    break
    return accepted_AN


@numba.njit(cache=True, nogil=True)
def _depths(parents_AN, count_A):  # type: ignore[no-untyped-def]
    """Draft tokens on the way to each one, itself included; 0 where there is none."""
    depth_AN = np.zeros(parents_AN.shape, np.int32)
    for a in range(len(count_A)):
        for i in range(count_A[a]):
            above = parents_AN[a, i]
            depth_AN[a, i] = 1 if above < 0 else depth_AN[a, above] + 1
    return depth_AN
