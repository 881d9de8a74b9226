"""SpecActor's plans, reconfiguration, best-of-N and ladder: by hand and by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.sched.policies.specactor import (
    Acceptance,
    Prices,
    Profile,
    Reconfiguration,
    RequestPlan,
    WorkerPlan,
    assign_drafters,
    batch_prices,
    best_request_plan,
    decoupled_tokens,
    plan_workers,
    rank_methods,
    rate,
    sequential_tokens,
    worth_helping,
)


def line(slope, fixed):
    return lambda batch: slope * batch + fixed


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


def test_requests_that_are_hardly_accepted_are_not_drafted_ahead():
    def verify_of(window):
        return line(0.0, 1.0)

    cheap = line(0.0, 0.01)
    # at b = 1 a miss costs decoupled drafting half of what it brought
    assert not best_request_plan(0.2, cheap, verify_of).decoupled
    dear = line(0.0, 0.9)
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


def test_the_ladder_ranks_methods_by_what_they_gain_at_their_acceptance():
    draft = {"ngram": line(0.0, 0.001), "small": line(0.0, 0.2)}

    def rank(ngram, small):
        return rank_methods({"ngram": ngram, "small": small}, draft, lambda window: line(0.0, 1.0))

    assert rank(0.3, 0.8) == ["small", "ngram"]
    assert rank(0.7, 0.7) == rank(0.8, 0.8) == ["ngram", "small"]
    assert rank(0.0, 0.0) == ["ngram", "small"], "neither gains: the first"


# --- profiles and reconfiguration


DRAFTING = line(0.0, 0.2)


COMMON = RequestPlan(6, True, 0.0)


def verify_line(window):
    return line(0.0, 1.0)


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


def test_help_is_worth_what_it_saves_beyond_its_costs():
    # 100 s alone; with twice the speed 50 s
    assert worth_helping(1000, 10, 20, 49.9)
    assert not worth_helping(1000, 10, 20, 50.1)
    assert not worth_helping(1000, 10, 10, 0.0) and not worth_helping(1000, 10, 9, 0.0)
    # half as much remains, and the same costs are too much
    assert not worth_helping(500, 10, 20, 49.9)
    assert worth_helping(1000, 0.0, 1, 1e6), "it does not run at all"


# --- drafting workers


HALF = Acceptance(0.5)


def draft(requests):
    return 0.125 * requests


def verify(requests, window):
    return 1 + 0.25 * requests + 0.5 * window


def rate_of(workers, requests, drafting, window, acceptance=HALF):
    return rate(workers, requests, drafting, window, draft, verify, acceptance)


def test_tokens_of_a_window_whose_chain_runs_ahead():
    # h = ½ / (1 + ½ − ¼) = 0.4, C(1) = 1.5
    assert HALF.tokens(1) == pytest.approx(0.4 * 1.5 + 0.6)
    # h = ½ / (1 + ½ − ⅛) = 4/11, C(2) = 1.75
    assert HALF.tokens(2) == pytest.approx(4 / 11 * 1.75 + 7 / 11)
    assert Acceptance(0.0).tokens(3) == 1
    assert Acceptance(1.0).tokens(3) == 4, "nothing is ever rolled back"


def test_tokens_of_a_window_where_the_share_of_rounds_is_known():
    assert Acceptance(0.5, 1.0).tokens(2) == 1.75
    assert Acceptance(0.5, 0.25).tokens(2) == 0.25 * 1.75 + 0.75
    assert Acceptance(0.5, 0.0).tokens(2) == 1


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_the_share_of_rounds_with_a_draft_is_what_it_stays_at(p, window):
    tokens = sum(p**i for i in range(window + 1))
    h = (Acceptance(p).tokens(window) - 1) / (tokens - 1)
    assert h * p ** (window + 1) + (1 - h) * p == pytest.approx(h)


def test_rates_by_hand():
    # plain: 2 requests each, 4 tokens in 1.5 s
    assert rate_of(2, 4, 0, 0) == pytest.approx(4 / 1.5)
    # each drafts: 4 · 1.5 tokens in 0.25 + 2 s
    assert rate_of(2, 4, 0, 1) == pytest.approx(6 / 2.25)
    # one drafts for the other, which verifies all: 4 · 1.2 in 2.5 s; drafting takes 0.5
    assert rate_of(2, 4, 1, 1) == pytest.approx(4.8 / 2.5)
    # two draft for one: 4 · T(8) in 6 s; drafting takes 8 · 0.25
    assert rate_of(3, 4, 2, 8) == pytest.approx(4 * HALF.tokens(8) / 6)


def test_prices_in_a_batch_by_hand():
    """Four requests with windows of two: T = 1.75, a round takes max(2 · 0.5, 3) s, R = 7/3 a s."""
    found = batch_prices(4, 2, draft, verify, Acceptance(0.5, 1.0))
    assert found.round_s == 3
    assert found.draft == pytest.approx(7 / 3 * (0.5 - 0.125) / 3)
    assert found.node == pytest.approx(7 / 3 * (3 - 2) / 8)
    alone = batch_prices(1, 2, draft, verify, Acceptance(0.5, 1.0))
    assert alone.draft == 0.0, "it shares the drafting worker with nobody"


def test_windows_go_by_what_a_node_costs_the_batch():
    """A node costs 7/12 of a token: 1 + Σ_{i ≤ w} (p^i − 7/12) is most at w = 5, 1 and 0."""
    prices = Prices(round_s=3.0, draft=0.0, node=7 / 12)

    def plan(p, prices=prices):
        return Acceptance(p, 1.0).own_plan(prices, range(1, 9))

    tokens = sum(0.9**i for i in range(6)) - 5 * 7 / 12
    assert plan(0.9) == RequestPlan(5, True, pytest.approx(tokens / 3))
    assert plan(0.6).window == 1
    assert plan(0.5) == RequestPlan(0, False, pytest.approx(1 / 3)), "it decodes plainly"
    # alone a node costs hardly anything, and windows are all alike
    alone = Prices(3.0, 0.0, 0.001)
    assert [plan(p, alone).window for p in (0.5, 0.6, 0.9)] == [8, 8, 8]


def test_chains_that_run_ahead_stop_early_where_drafts_are_dear():
    """p = 0.82: chains of 11 in turns bring 0.41 · (C(10) − 1) − 0.55, the most there is."""
    p, prices = 0.82, Prices(1.0, draft=0.1, node=0.0)
    found = Acceptance(p).own_plan(prices, range(1, 17))
    left = sum(p**i for i in range(1, 11))
    assert found == RequestPlan(11, False, pytest.approx(1 + (p * left - 1.1) / 2))
    assert Acceptance(p).own_plan(Prices(1.0, 0.0, 0.0), range(1, 17)).decoupled
    # all cases at once: what brings less than it costs is not drafted at all
    assert Acceptance(p, 0.9).own_plan(prices, range(1, 17)).decoupled


def best_of_all(workers, requests, draft, verify, acceptance, numbers, windows):
    plans = [WorkerPlan(0, 0, rate(workers, requests, 0, 0, draft, verify, acceptance))]
    for d, w in itertools.product(numbers, windows):
        given = workers, requests, d, w, draft, verify, acceptance
        plans.append(WorkerPlan(d, w, rate(*given)))
    return max(plans, key=lambda plan: plan.tokens_per_s)  # the first of equal ones


SECONDS = st.floats(0.001, 10)


@given(
    *(st.integers(1, 6), st.integers(1, 40), st.floats(0, 1), st.none() | st.floats(0, 1)),
    *(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.lists(st.integers(0, 8), max_size=5)),
)
def test_the_best_of_all(workers, requests, p, hits, a, b, c, d, e, windows):
    def draft(n):
        return a * n + b

    def verify(n, window):
        return c * n + d + e * window

    acceptance, numbers = Acceptance(p, hits), range(workers)
    given = workers, requests, draft, verify, acceptance
    got = plan_workers(*given, drafting_workers=numbers, windows=windows)
    assert got == best_of_all(*given, numbers, windows)
