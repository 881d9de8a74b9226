"""pass@k against enumeration, intervals against theory, and figures by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reprise.rl.metrics.eval_metrics import (
    EvalResponse,
    Interval,
    interval,
    mean_of,
    overall_metrics,
    pass_at_k,
    set_metrics,
)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased():
    n, p = 5, 0.3
    for k in (1, 2, 5):
        mean = math.fsum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="expected 0 ≤ correct ≤ samples"):
        pass_at_k(n, c, k)


# --- intervals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),  # Newcombe, Stat. Med. 17 (1998), table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)],
)
def test_shares_have_wilsons_interval(successes, n, low, high):
    found = interval([1.0] * successes + [0.0] * (n - successes))
    assert found.mean == successes / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)


def test_other_values_have_a_bootstrap_of_their_questions():
    values = np.linspace(-1, 3, 200)
    found = interval(values.tolist())
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert found.mean == pytest.approx(1.0)
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx((half, half), rel=0.1)
    assert interval(values.tolist()) == found, "the same resamples every time"
    assert interval([0.5] * 4) == Interval(0.5, 0.5, 0.5)


def test_responses_to_one_question_do_not_count_as_independent():
    def width(num_questions, samples):
        responses = [
            EvalResponse(q, 0.25 + 0.5 * (q % 2), False, 1, False, False)
            for q in range(num_questions)
            for _ in range(samples)
        ]
        found = set_metrics(responses, samples, (1,))
        return found["mean_reward_high"] - found["mean_reward_low"]

    assert width(40, 1) == width(40, 8) > width(320, 1)


def test_the_bounds_of_sets_add_in_squares():
    one, other = Interval(0.5, 0.2, 0.9), Interval(0.25, 0.25 - 0.4, 0.55)
    both = mean_of([one, other])
    assert (both.mean, both.low, both.high) == pytest.approx((0.375, 0.375 - 0.25, 0.375 + 0.25))


# --- figures ----------------------------------------------------------------------------


def test_a_set_by_hand():
    responses = [
        EvalResponse(0, 1.0, True, 4, False, False),
        EvalResponse(0, 0.5, False, 8, True, False),
        EvalResponse(1, 0.0, False, 6, False, False),
        EvalResponse(1, None, False, 6, False, True),  # not scored: not in the mean
    ]
    found = set_metrics(responses, 2, (1, 2))
    bounds = {name for name in found if name.endswith(("_low", "_high"))}
    assert {name: found[name] for name in found.keys() - bounds} == {
        "mean_reward": 0.375,  # the mean of 0.75 and 0
        "pass@1": 0.25,
        "pass@2": 0.5,
        "mean_length": 6.0,
        "truncated": 0.25,
        "failures": 1,
        "questions": 2,
    }
    for name in ("mean_reward", "pass@1", "pass@2"):
        assert 0 <= found[f"{name}_low"] <= found[name] <= found[f"{name}_high"] <= 1


def test_a_set_without_any_reward_has_no_mean_reward():
    found = set_metrics([EvalResponse(0, None, False, 4, False, True)], 1, (1,))
    assert "mean_reward" not in found and found["pass@1"] == 0
    whole = set_metrics([EvalResponse(0, 1.0, True, 4, False, False)], 1, (1,))
    assert "mean_reward" not in overall_metrics([whole, found])


def test_sets_of_any_size_count_the_same():
    small = set_metrics([EvalResponse(0, 1.0, True, 4, False, False)], 1, (1,))
    large = set_metrics([EvalResponse(i, 0.0, False, 8, True, False) for i in range(9)], 1, (1,))
    both = overall_metrics([small, large])
    assert (both["pass@1"], both["mean_reward"], both["mean_length"]) == (0.5, 0.5, 6.0)
    assert (both["truncated"], both["questions"]) == (0.5, 10)
    assert both["pass@1_low"] < 0.5 < both["pass@1_high"]
