"""What looking up brings, by hand."""

import numpy as np
import pytest

from spec.drafter import LiveSlots
from spec.retrieval.device_lookup import LookupOutcome
from spec.retrieval.lookup_rate import LookupRate


def live(*ids):
    ids = np.asarray(ids)
    return LiveSlots(ids, ids, ids, ids, ids, ids, ids, np.zeros((9, 2), np.int32))


def acceptance(reached, right):
    return LookupOutcome(0, np.asarray(reached), np.asarray(right))


def fed(who, reached, right, calls=200):
    """Observed until what was assumed at first is forgotten."""
    rate = LookupRate()
    for _ in range(calls):
        rate.observe(who, acceptance(reached, right))
    return rate


def test_nothing_known_brings_nothing():
    rate = LookupRate()
    assert rate.mean == 0 and rate.tokens_per_round(live(1), [4])[0] == 1.0
    rate.observe(live(1), acceptance([[8, 0, 0]], [[0, 0, 0]]))
    assert rate.mean == 0 and rate.tokens_per_round(live(1), [4])[0] == 1.0


def test_places_have_probs_of_their_own():
    """3/4 of the first draft tokens are right, 1/2 of those after them, all of the third ones."""
    rate = fed(live(1), [[40_000, 30_000, 15_000]], [[30_000, 15_000, 15_000]])
    for nodes, want in ((2, 0.75), (3, 0.75 + 0.375), (4, 0.75 + 0.375 + 0.375)):
        assert rate.tokens_per_round(live(1), [nodes])[0] == pytest.approx(1 + want, rel=1e-3)
    # a fourth one was never reached: as good as all others, 60 of 85
    want = 0.75 + 0.375 + 0.375 * (1 + 60 / 85)
    assert rate.tokens_per_round(live(1), [5])[0] == pytest.approx(1 + want, rel=1e-3)


def test_requests_have_probs_of_their_own():
    """A quarter and three quarters are right: the mean of a half, times 1/2 and 3/2."""
    rate = fed(live(1, 2), [[40_000], [40_000]], [[10_000], [30_000]])
    assert rate.tokens_per_round(live(1), [2])[0] == pytest.approx(1.25, rel=1e-3)
    assert rate.tokens_per_round(live(2), [2])[0] == pytest.approx(1.75, rel=1e-3)
    assert rate.tokens_per_round(live(1, 2), [2])[0] == pytest.approx(1.5, rel=1e-3)
    assert rate.tokens_per_round(live(3), [2])[0] == pytest.approx(1.5, rel=1e-3)  # a newcomer
    # no probability exceeds one: three times 3/4 of all
    rate = fed(live(1, 2), [[30_000], [10_000]], [[0], [10_000]])
    assert rate.tokens_per_round(live(2), [2])[0] == pytest.approx(2.0, rel=1e-3)


def test_a_few_right_drafts_prove_little():
    """(1 + 4 m) / (1 + 4) of the place and of the request, m = 1 / (1 + 8), over m."""
    rate = LookupRate()
    rate.observe(live(1), acceptance([[1]], [[1]]))
    mean = 1 / (1 + 0.8 * LookupRate.CAUTION)
    want = ((1 + 4 * mean) / 5) ** 2 / mean
    assert rate.tokens_per_round(live(1), [2])[0] == pytest.approx(1 + want)
    assert want < 0.75


def test_what_is_long_ago_is_forgotten():
    rate = fed(live(1), [[40, 40]], [[40, 40]])
    for _ in range(20):
        rate.observe(live(1), acceptance([[40, 0]], [[0, 0]]))
    assert rate.tokens_per_round(live(1), [3])[0] < 1.05


def test_what_nobody_reached_proves_nothing():
    """A probe whose requests have all gone comes as an outcome of no request."""
    rate, other = LookupRate(), LookupRate()
    rate.observe(live(), acceptance(np.zeros((0, 3), int), np.zeros((0, 3), int)))
    rate.observe(live(1), acceptance([[0, 0, 0]], [[0, 0, 0]]))
    for one in (rate, other):
        one.observe(live(1), acceptance([[4, 2, 1]], [[2, 1, 1]]))
    assert rate.mean == other.mean > 0
    assert rate.tokens_per_round(live(1), [2, 4]) == other.tokens_per_round(live(1), [2, 4])
