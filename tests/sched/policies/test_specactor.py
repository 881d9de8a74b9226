"""SpecActor's planner, reconfiguration, best-of-N and ladder, by hand and by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sched.policies.specactor import (
    LinearTime,
    assign_drafters,
    best_helper_plan,
    best_request_plan,
    decoupled_tokens,
    plan,
    rank_methods,
    sequential_tokens,
)


def test_expected_tokens_of_a_window():
    # one token: right with p, worth 1; wrong, worth the half of what the verifier draws
    assert decoupled_tokens(0.6, 1) == pytest.approx(0.4 * 0.5 + 0.6)
    assert decoupled_tokens(0.5, 2) == pytest.approx(0.5 * 0.5 + 0.25 * 1.0 + 2 * 0.25)
    assert decoupled_tokens(1.0, 7) == 7 and decoupled_tokens(0.0, 7) == 0.5
    assert sequential_tokens(0.5, 2) == pytest.approx(1.75)
    assert sequential_tokens(1.0, 7) == 8 and sequential_tokens(0.0, 7) == 1


def test_sequential_tokens_are_the_mean_of_draws():
    rng = np.random.default_rng(0)
    right = rng.random((200_000, 4)) < 0.7
    run = np.cumprod(right, axis=1).sum(axis=1)
    # 5 standard errors of the mean: a false alarm in 1.7 million
    assert sequential_tokens(0.7, 4) == pytest.approx((run + 1).mean(), abs=5 * run.std() / 447)


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


def test_requests_that_are_hardly_accepted_are_not_drafted_ahead():
    def verify_of(window):
        return LinearTime(0.0, 1.0)

    cheap = LinearTime(0.0, 0.01)
    # at b = 1 a miss costs decoupled drafting half of what it brought
    assert not best_request_plan(0.2, cheap, verify_of).decoupled
    dear = LinearTime(0.0, 0.9)
    # drafting as slow as verifying: only beside it is there anything to gain
    sure = best_request_plan(0.99, dear, verify_of)
    assert sure.decoupled
    hopeless = best_request_plan(0.0, dear, verify_of)
    assert (hopeless.window, hopeless.tokens_per_s) == (0, 1.0)


def test_freed_workers_draft_for_those_that_are_accepted_least():
    acceptance = {1: 0.9, 2: 0.2, 3: 0.5}
    added = assign_drafters(acceptance, ("small", "ngram"), [7, 8, 9], {"small": {1}}, {1: 5}, 2)
    # ngram has none and gets 7; both have one, small gets 8; then ngram 9. Worker 1 is full
    assert added == {
        (2, "small"): 8,
        (3, "small"): 8,
        (2, "ngram"): 7,
        (3, "ngram"): 7,
        (1, "ngram"): 9,
    }
    assert assign_drafters({}, ("small",), [7], {}, {}, 2) == {}
    assert assign_drafters(acceptance, ("small",), [], {}, {}, 2) == {}


def test_a_method_passes_over_requests_that_it_is_not_to_help():
    asked = []

    def helps(request, method, worker, batch):
        asked.append((request, method, worker, batch))
        return request != 2

    acceptance = {1: 0.9, 2: 0.2, 3: 0.5}
    added = assign_drafters(acceptance, ("small",), [7, 8], {}, {8: 1}, 2, helps)
    # 2 takes no room, so that 3 and 1 fill worker 7
    assert added == {(3, "small"): 7, (1, "small"): 7}
    assert asked == [(2, "small", 7, 1), (3, "small", 7, 1), (1, "small", 7, 2)]


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


def test_the_ladder_ranks_methods_by_what_they_gain_at_their_acceptance():
    draft = {"ngram": LinearTime(0.0, 0.001), "small": LinearTime(0.0, 0.2)}

    def rank(ngram, small):
        return rank_methods(
            {"ngram": ngram, "small": small}, draft, lambda window: LinearTime(0.0, 1.0)
        )

    assert rank(0.3, 0.8) == ["small", "ngram"]
    assert rank(0.7, 0.7) == rank(0.8, 0.8) == ["ngram", "small"]
    assert rank(0.0, 0.0) == ["ngram", "small"], "neither gains: the first"
