"""Plans of drafting workers: rates by hand, and the best one against all of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.policies import drafting_plan
from sched.policies.drafting_plan import (
    Acceptance,
    Prices,
    WorkerPlan,
    batch_prices,
    plan_workers,
    rate,
)
from sched.policies.specactor import RequestPlan

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


def test_the_slower_of_drafting_and_verifying_is_the_round():
    slow = rate(2, 4, 1, 2, lambda b: 2.0 * b, verify, HALF)
    assert slow == pytest.approx(4 * HALF.tokens(2) / 16)


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


def test_plain_decoding_wins_where_drafts_do_not_pay():
    given = {"drafting_workers": range(3), "windows": range(1, 9)}
    wrong = plan_workers(3, 12, draft, verify, Acceptance(0.0), **given)
    assert wrong == WorkerPlan(0, 0, 12 / verify(4, 0))
    dear = plan_workers(3, 12, lambda b: 100.0, verify, Acceptance(0.9), **given)
    assert (dear.drafting_workers, dear.window) == (0, 0)
    nothing = plan_workers(3, 12, draft, verify, HALF, drafting_workers=(), windows=(1,))
    assert (nothing.drafting_workers, nothing.window) == (0, 0)


def test_of_equal_plans_the_first():
    seconds = (lambda b: 0.25), (lambda b, w: 1.0)
    given = 4, 4, *seconds, Acceptance(1.0, 1.0)
    got = plan_workers(*given, drafting_workers=(2, 1), windows=(3, 3))
    assert got == WorkerPlan(2, 3, 16.0)
    # without a draft a window brings what plain decoding does
    none = 4, 4, *seconds, Acceptance(1.0, 0.0)
    assert plan_workers(*none, drafting_workers=(1,), windows=(3,)) == WorkerPlan(0, 0, 4.0)


def test_workers_draft_for_others_where_drafts_are_there_in_time():
    """Verifying seconds hardly grow with the batch, drafting takes as long as a round."""
    got = plan_workers(
        *(4, 8, lambda b: 0.25, lambda b, w: 1 + 0.001 * b, Acceptance(0.9, 0.95)),
        drafting_workers=range(4),
        windows=iter(range(1, 9)),  # gone through once for every number of workers
    )
    assert (got.drafting_workers, got.window) == (1, 4)


def test_a_planted_fault_is_found(monkeypatch):
    """Verifying workers that are counted whole: a plan that drafts too much is chosen."""
    right = drafting_plan.rate
    given = 4, 8, draft, verify, Acceptance(0.9, 0.9)
    options = {"drafting_workers": range(4), "windows": range(1, 9)}
    want = best_of_all(*given, *options.values())
    assert plan_workers(*given, **options) == want
    monkeypatch.setattr(drafting_plan, "rate", lambda n, R, d, *rest: right(n + d, R, d, *rest))
    assert plan_workers(*given, **options) != want
