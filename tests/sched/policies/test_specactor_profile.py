"""Profiled acceptance, plans anew every so many tokens, and what is worth helping, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sched.policies.specactor import LinearTime, RequestPlan, best_request_plan
from sched.policies.specactor_profile import (
    Profile,
    Reconfiguration,
    expected_remaining_tokens,
    worth_helping,
)

DRAFTING = LinearTime(0.0, 0.2)
COMMON = RequestPlan(6, True, 0.0)


def verify_line(window):
    return LinearTime(0.0, 1.0)


def profile():
    return Profile({"small": 0.6, "ngram": 0.2}, prior_tokens=10)


def reconfiguration(every_tokens=100):
    own_plan = lambda p: best_request_plan(p, DRAFTING, verify_line)  # noqa: E731
    return Reconfiguration("small", COMMON, own_plan, every_tokens)


def test_what_was_not_seen_is_as_earlier_steps_and_the_method_say():
    found = profile()
    assert found.p_of_method("small") == found.p_of_request(7, "small") == 0.6
    found.observe(7, "small", 8, 10)
    found.observe(8, "small", 1, 20)
    of_method = (9 + 10 * 0.6) / (30 + 10)
    assert found.p_of_method("small") == pytest.approx(of_method)
    assert found.p_of_request(7, "small") == pytest.approx((8 + 10 * of_method) / 20)
    assert found.p_of_request(8, "small") == pytest.approx((1 + 10 * of_method) / 30)
    assert found.p_of_request(9, "small") == pytest.approx(of_method)
    # counts of one method say nothing of another
    assert found.p_of_request(7, "ngram") == found.p_of_method("ngram") == 0.2


def test_rounds_add_up_and_ended_requests_are_forgotten():
    parts, whole = profile(), profile()
    for accepted, seen in ((3, 4), (0, 1), (2, 2)):
        parts.observe(7, "small", accepted, seen)
    whole.observe(7, "small", 5, 7)
    assert parts.p_of_request(7, "small") == whole.p_of_request(7, "small")
    whole.forget(7)
    assert whole.p_of_method("small") == parts.p_of_method("small")
    assert whole.p_of_request(7, "small") == whole.p_of_method("small")
    with pytest.raises(ValueError, match="at most 2 accepted of 2 seen, got 3"):
        whole.observe(7, "small", 3, 2)


def test_seen_tokens_of_rounds_show_the_acceptance():
    """A window of 4 shows a + 1 tokens of a < 4 accepted ones, and 4 of a whole one."""
    rng = np.random.default_rng(0)
    run = np.cumprod(rng.random((20_000, 4)) < 0.7, axis=1).sum(axis=1)
    found = profile()
    seen = int(np.minimum(run + 1, 4).sum())
    found.observe(7, "small", int(run.sum()), seen)
    # 5 standard errors of the mean: a false alarm in 1.7 million
    assert found.p_of_request(7, "small") == pytest.approx(0.7, abs=5 * (0.21 / seen) ** 0.5)


def test_plans_are_due_whenever_another_multiple_was_passed():
    found, seen = reconfiguration(), profile()
    assert found.plan_when_due(7, 0, 99, seen) is None
    assert found.plan_when_due(7, 99, 100, seen) is not None
    assert found.plan_when_due(7, 100, 199, seen) is None
    assert found.plan_when_due(7, 150, 420, seen) is not None
    due = found.is_due(np.array([0, 99.5, 150]), np.array([99.9, 100, 201]))
    assert due.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="every_tokens"):
        reconfiguration(0)


def test_requests_below_the_average_get_the_faster_mode_and_others_the_common_plan():
    found, seen = reconfiguration(), profile()
    seen.observe(7, "small", 10, 100)
    seen.observe(8, "small", 900, 1000)
    own = found.plan_when_due(7, 0, 100, seen)
    p = round(seen.p_of_request(7, "small"), 2)
    assert own == best_request_plan(p, DRAFTING, verify_line) and own.window < COMMON.window
    assert found.plan_when_due(8, 0, 100, seen) == COMMON
    # once it is right as often as the others it is drafted for as they are
    seen.observe(7, "small", 5000, 5000)
    assert found.plan_when_due(7, 100, 200, seen) == COMMON


def test_what_remains_is_what_longer_ones_had_and_one_that_goes_to_the_limit():
    ended = np.array([50, 120, 300])
    assert expected_remaining_tokens(100, ended, 1000) == pytest.approx((20 + 200 + 900) / 3)
    assert expected_remaining_tokens(400, ended, 1000) == 600
    assert expected_remaining_tokens(400, np.zeros(0), 1000) == 600


def test_help_is_worth_what_it_saves_beyond_its_costs():
    # 100 s alone; with twice the speed 50 s
    assert worth_helping(1000, 10, 20, 49.9)
    assert not worth_helping(1000, 10, 20, 50.1)
    assert not worth_helping(1000, 10, 10, 0.0) and not worth_helping(1000, 10, 9, 0.0)
    # half as much remains, and the same costs are too much
    assert not worth_helping(500, 10, 20, 49.9)
    assert worth_helping(1000, 0.0, 1, 1e6), "it does not run at all"
