"""SpecActor's planner of devices and helpers, by hand and by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.simulator.specactor_devices import (
    LinearTime,
    best_helper_plan,
    expected_remaining_tokens,
    plan,
)
from reprise.sched.policies.specactor import best_request_plan, decoupled_tokens


def draft(devices):
    return LinearTime(0.001, 0.1)


def verify(devices, window):
    return LinearTime(0.02 * (window + 1) / devices, 1.0 / devices)


def test_the_plan_is_the_best_of_all_that_are_considered():
    for p, batch in itertools.product((0.3, 0.7, 0.95), (8, 64, 512)):
        found = plan(batch, 16, (2, 4), draft, verify, p)
        rates = {}
        for g_v, w in itertools.product((2, 4), range(1, 33)):
            for g_d in range(1, g_v + 1):
                b = -(-(g_d + g_v) * batch // 16)
                slope, fixed = 0.02 * (w + 1) / g_v / 0.001, 1 / g_v / 0.1
                if w <= max(np.ceil(slope), np.ceil(fixed)):
                    seconds = max(w * (0.001 * b + 0.1), 0.02 * (w + 1) / g_v * b + 1 / g_v)
                    rates[g_d, g_v, w] = decoupled_tokens(p, w) / seconds
        assert found.tokens_per_s == pytest.approx(max(rates.values()))
        key = found.draft_devices, found.verify_devices, found.window
        assert rates[key] == pytest.approx(found.tokens_per_s)


def test_higher_acceptance_drafts_further_ahead():
    windows = [plan(64, 16, (4,), draft, verify, p).window for p in (0.2, 0.6, 0.95)]
    assert windows == sorted(windows) and windows[0] < windows[-1]


def test_windows_stop_where_drafting_takes_as_long_as_verifying():
    def slow(devices):
        return LinearTime(0.1, 0.5)

    # V′/D′ = 0.2 (w+1), β/α = 2: no window beyond 2
    assert plan(1, 2, (1,), slow, verify, 0.99).window <= 2


def test_a_request_that_is_accepted_less_drafts_less_far_ahead():
    found = plan(64, 16, (4,), draft, verify, 0.8)
    drafting = draft(found.draft_devices)
    own = best_request_plan(0.1, drafting, lambda window: verify(found.verify_devices, window))
    assert own.window < found.window


def test_a_helpers_window_is_the_fastest_sequential_one_and_never_none():
    def verify_s(window):
        return 1.0 + 0.1 * window

    found = best_helper_plan(0.5, 0.25, verify_s, (1, 2, 4))
    # 1.5 / 1.35, 1.75 / 1.7 and 1.9375 / 2.4
    assert (found.window, found.decoupled) == (1, False)
    assert found.tokens_per_s == pytest.approx(1.5 / 1.35)
    sure = best_helper_plan(0.9, 0.25, verify_s, (1, 2, 4))
    assert (sure.window, sure.tokens_per_s) == (4, pytest.approx(4.0951 / 2.4))
    assert best_helper_plan(0.0, 0.25, verify_s, (2, 4)).window == 2


def test_what_remains_is_what_longer_ones_had_and_one_that_goes_to_the_limit():
    ended = np.array([50, 120, 300])
    assert expected_remaining_tokens(100, ended, 1000) == pytest.approx((20 + 200 + 900) / 3)
    assert expected_remaining_tokens(400, ended, 1000) == 600
    assert expected_remaining_tokens(400, np.zeros(0), 1000) == 600
