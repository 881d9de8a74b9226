"""Agreement of cached responses with new ones: counts and expected rates, by hand."""

import itertools

import numpy as np
import pytest

from reprise.spec.reuse.agreement import (
    FIRST_RATE,
    PRIOR_MISSES,
    PRIOR_TOKENS,
    Agreement,
    Correction,
    RunMisses,
    agreement,
    expected_tokens,
    miss_rate,
    miss_rates,
)


@pytest.mark.parametrize(
    ("cached", "drawn", "want"),
    [
        ([5, 6, 7], [5, 6, 7], (3, 3)),
        ([5, 6, 7], [5, 6, 7, 8], (3, 3)),
        ([5, 6, 7], [5, 6], (2, 2)),
        ([5, 6, 7], [5, 9, 7], (1, 2)),
        ([5, 6, 7], [9], (0, 1)),
        ([], [5], (0, 0)),
    ],
)
def test_a_response_agrees_up_to_the_first_difference(cached, drawn, want):
    assert agreement(np.array(cached, np.int32), np.array(drawn, np.int32)) == want


def test_rates_are_shrunk_towards_their_siblings_and_these_towards_the_run():
    last = {0: Agreement(9, 10), 1: Agreement(22, 22)}
    of_group = (1 + PRIOR_TOKENS * 0.2) / (32 + PRIOR_TOKENS)
    assert miss_rate(list(last.values()), 0.2) == pytest.approx(of_group)
    want = {0: (1 + PRIOR_TOKENS * of_group) / (10 + PRIOR_TOKENS)}
    want[1] = PRIOR_TOKENS * of_group / (22 + PRIOR_TOKENS)
    assert miss_rates(last, 0.2) == pytest.approx(want)
    assert miss_rate([], 0.2) == 0.2


def test_a_runs_rate_forgets_old_steps():
    run = RunMisses()
    assert run.rate == FIRST_RATE
    run.played([Agreement(99, 100), Agreement(100, 100)])
    run.played([])
    again = RunMisses(run.different, run.decided)
    want = (0.7 * 1 + PRIOR_TOKENS * FIRST_RATE) / (0.7 * 200 + PRIOR_TOKENS)
    assert again.rate == run.rate == pytest.approx(want)


def test_expected_tokens_are_a_sum_over_the_places_of_the_first_difference():
    def by_hand(rate, n):
        draws = itertools.accumulate(range(n - 1), lambda p, _: p * (1 - rate), initial=1.0)
        return sum(draws) if n else 0.0

    rates, tokens = np.array([0.0, 0.1, 0.5, 1.0, 0.1]), np.array([32, 32, 3, 32, 0])
    want = [by_hand(r, n) for r, n in zip(rates, tokens, strict=True)]
    np.testing.assert_allclose(expected_tokens(rates, tokens), want, rtol=1e-4)


def test_rates_are_corrected_by_what_a_rollout_has_missed():
    correction = Correction()
    assert correction.factor == 1
    correction.observe(1, 5.0)
    correction.observe(0, 3.0)
    assert correction.factor == (1 + PRIOR_MISSES) / (8 + PRIOR_MISSES)
