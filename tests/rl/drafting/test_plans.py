"""Settings of drafting workers, and their plans from what was measured, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from live_by_hand import live_texts

from reprise.rl.drafting.config import DraftingConfig, methods_of
from reprise.rl.drafting.plans import (
    DEADLINE_SHARE,
    DECAY,
    FIRST_HITS,
    FIRST_WINDOW,
    PRIOR_ROUNDS,
    MeasuredSeconds,
    Observed,
    Planner,
)
from reprise.sched.policies.specactor import PRIOR_TOKENS, WorkerPlan
from reprise.spec.budget.config import MODEL
from reprise.spec.decoupled.messages import DraftPlan
from reprise.spec.drafter import PRIOR_PROB
from reprise.spec.round_times import RoundTimes


class Costs:
    """A round takes 10 ms, 1 ms more for each token of each request, and nothing for positions."""

    def round_seconds(self, requests, positions, tokens_each):
        self.asked = requests, positions, tokens_each
        return 0.010 + 0.001 * requests * (tokens_each - 1)

    def copy_seconds(self, tokens):
        return 0.001 * tokens


def seconds(draft_s=0.002, **options):
    return MeasuredSeconds(Costs(), RoundTimes({}), 50.0, draft_s=draft_s, **options)


def planner(num_workers=4, num_requests=8, max_window=3, measured=None, **settings):
    found = Planner(DraftingConfig(**settings), num_workers, num_requests, max_window)
    found.seconds = measured
    return found


# --- what is observed -------------------------------------------------------------------


def test_before_anything_was_seen_it_is_assumed():
    seen = Observed()
    assert (seen.p, seen.hits, seen.acceptance()) == (PRIOR_PROB, pytest.approx(FIRST_HITS), {})


def test_draft_tokens_and_rounds_are_counted():
    seen, k = Observed(), PRIOR_TOKENS
    seen.add([1, 2, 3], np.array([2, 0, 0]), np.array([3, 1, 0]))
    p = (2 + k * PRIOR_PROB) / (4 + k)
    assert seen.p == pytest.approx(p)
    assert seen.acceptance() == {
        1: pytest.approx((2 + k * p) / (3 + k)),
        2: pytest.approx((0 + k * p) / (1 + k)),
    }
    rounds = DECAY * PRIOR_ROUNDS + 3
    there = DECAY * FIRST_HITS * PRIOR_ROUNDS + 2
    assert seen.hits == pytest.approx(there / rounds)
    seen.forget([1, 9])
    assert set(seen.acceptance()) == {2}
    assert seen.p == pytest.approx(p), "its method keeps what was seen"


def test_no_acceptance_is_certain():
    seen = Observed()
    for _ in range(100):
        seen.add([1], np.array([100]), np.array([100]))
    assert seen.p == 0.99


# --- seconds ----------------------------------------------------------------------------


def test_seconds_of_drafting_workers_are_those_of_their_one_size():
    assert seconds(0.002).draft(1) == seconds(0.002).draft(100) == 0.002


def test_seconds_of_ones_own_draft_model_go_by_the_batch():
    """Those of the smallest caches, a draft token: the least batch that holds the requests."""
    times = RoundTimes(
        {(4, 4, 32): 0.1, (4, 4, 64): 0.1, (8, 8, 32): 0.2},
        {
            MODEL: {
                (4, 1, 32): 0.01,
                (4, 3, 32): 0.06,
                (4, 3, 64): 9.0,
                (8, 3, 32): 0.09,
            }
        },
    )
    found = MeasuredSeconds(Costs(), times, 50.0, draft_s=7.0)
    assert found.draft(3) == pytest.approx(0.02)
    assert found.draft(4.5) == pytest.approx(0.03)
    assert found.draft(100) == pytest.approx(0.03), "the largest there is"


def test_a_round_verifies_a_window_and_one_token():
    found = seconds()
    assert found.verify(4, 2) == pytest.approx(0.018)
    assert found.costs.asked == (4, 200.0, 3)


# --- planned windows --------------------------------------------------------------------


def test_the_best_numbers_are_planned():
    """Worked out: p = 0.7 and 0.85 of rounds with a draft, 4 workers, 8 requests, D = 2 ms.

    plainly       8 / V_0(2)                                    8 / 10 ms  = 800
    d = 1, w = 1  8 · (0.85 · 1.7  + 0.15) / max(2, V_1(8/3))  12.76 / 12.67 ms = 1007.4
    d = 1, w = 2  8 · (0.85 · 2.19 + 0.15) / max(4, V_2(8/3))  16.09 / 15.33 ms = 1049.5
    d = 1, w = 3  8 · (0.85 · 2.533 + 0.15) / max(6, V_3(8/3)) 18.42 / 18 ms = 1023.6
    d = 2, w = 2  16.09 / max(4, V_2(4) = 18 ms)                893.9
    d = 0, w = 2  8 · 2.19 / (4 + V_2(2) = 14 ms)               973.3
    """
    found = planner(measured=seconds()).choose(range(3))
    assert (found.drafting_workers, found.window) == (1, 2)
    assert found.tokens_per_s == pytest.approx(8 * (0.85 * 2.19 + 0.15) / (0.010 + 0.016 / 3))
    fixed = planner(measured=seconds(), window=3).choose(range(3))
    assert (fixed.drafting_workers, fixed.window) == (1, 3)
    slow = planner(measured=seconds(draft_s=1.0)).choose(range(3))
    assert slow == WorkerPlan(0, 0, pytest.approx(800.0)), "nobody drafts"


def test_chains_that_run_ahead_have_hits_of_their_own():
    assert planner(ahead="enumeration").acceptance.hits == pytest.approx(FIRST_HITS)
    assert planner(ahead="free_running").acceptance.hits is None


def test_without_measured_seconds_there_is_a_window_all_the_same():
    assert planner().plans().plan(5, 8 / 3) == DraftPlan(3)  # at most 3
    assert planner(max_window=9).plans().plan(5, 8 / 3) == DraftPlan(FIRST_WINDOW)
    assert planner(max_window=9, window=6).plans().plan(5, 8 / 3) == DraftPlan(6)
    assert planner().plans().deadline_s == 0.0


def test_a_rollouts_window_is_the_planned_one():
    settings = planner(measured=seconds())
    settings.drafting_workers = 1
    assert settings.plans().plan(5, 8 / 3) == DraftPlan(2)
    # where no window pays, drafting workers draft one token nevertheless
    slow = planner(measured=seconds(draft_s=1.0))
    slow.drafting_workers = 1
    assert slow.plans().plan(5, 8 / 3) == DraftPlan(1)


def test_patience_is_for_drafts_of_all_cases():
    """A tenth of a plain round, and as much as drafting a window takes longer than verifying it."""
    each = 8 / 3
    options = {"measured": seconds(0.010), "window": 3}
    late_s = 3 * 0.010 - (0.010 + 0.001 * each * 3)
    for ahead, wanted in (("enumeration", DEADLINE_SHARE * 0.010 + late_s), ("free_running", 0.0)):
        found = planner(ahead=ahead, **options)
        found.drafting_workers = 1
        assert found.plans().deadline_s == pytest.approx(wanted)
    quick = planner(measured=seconds(), window=3)
    quick.drafting_workers = 1
    assert quick.plans().deadline_s == pytest.approx(DEADLINE_SHARE * 0.010)


# --- the draft ladder -------------------------------------------------------------------


def ladder(draft_s):
    """Three methods, for 8 requests on 3 verifying workers; V_w = 10 + 8/3 w ms, w up to 3."""
    found = Planner(DraftingConfig(), 4, 8, 3, methods_of(3))
    found.drafting_workers, found.draft_s = 1, dict(zip(found.methods, draft_s, strict=True))
    return found


def test_the_fastest_method_is_chosen_by_seconds_and_then_by_what_was_seen():
    """T(3) = 0.85 · (0.7 + 0.49 + 0.343) + 1 of each at first: the quickest to draft is tried."""
    found = ladder([0.004, 0.002, 1e-7])
    assert found.choose_method() == "model", "the drafter, before rounds are measured"
    found.seconds = seconds(draft_s=7.0)
    assert found.ranked() == ["model3", "model2", "model"]
    assert found.choose_method() == "model3"
    assert found.seconds.draft_s == 1e-7
    # it hardly ever has a draft: C of p = 0 in V_0; the next one takes 2 ms a token
    for _ in range(500):
        found.observed.add([1], np.zeros(1, int), np.zeros(1, int))
    assert found.observed.hits < 0.1
    assert found.choose_method() == "model2" and found.seconds.draft_s == 0.002
    # it is always wrong, and 4 ms a token are worth it
    for _ in range(500):
        found.observed.add([1], np.zeros(1, int), np.ones(1, int))
    assert found.choose_method() == "model"
    assert found.acceptance.p == PRIOR_PROB, "each has a profile of its own"


def test_of_one_method_nothing_is_chosen():
    found = planner(measured=seconds(draft_s=0.5))
    assert found.choose_method() == "model" and found.seconds.draft_s == 0.5


# --- reconfiguration --------------------------------------------------------------------


def observed(plans, ids, response, accepted, seen):
    some = live_texts(*([0] * (2 + n) for n in response), first_id=ids[0])
    plans.observed(some, np.array(accepted), np.array(seen))


def test_a_request_that_is_accepted_less_is_planned_anew_when_due():
    """After each 10 tokens; one that is accepted as others are has the plan of all."""
    found = planner(measured=seconds(0.004), window=3, reconfigure_tokens=10)
    found.drafting_workers = 1
    plans = found.plans()
    for tokens in range(1, 10):
        observed(plans, [1, 2], [tokens, tokens], [0, 3], [1, 3])
    assert plans.plan(1, 8 / 3) == plans.plan(2, 8 / 3) == DraftPlan(3), "nothing is due"
    observed(plans, [1, 2], [10, 11], [0, 3], [1, 3])
    assert plans.plan(2, 8 / 3) == DraftPlan(3)
    p = found.observed.acceptance()[1]
    assert p < found.observed.p
    window = best_window_by_hand(round(p, 2), found.observed)
    assert plans.plan(1, 8 / 3) == DraftPlan(window, max_nodes=window) and window < 3
    plans.forget([1])
    assert plans.plan(1, 8 / 3) == DraftPlan(3)


def best_window_by_hand(p, observed):
    """Two requests with windows of 3: a round takes max(3 · 4, 10 + 2 · 3) ms, a node 1 ms."""

    def tokens(p, w):
        return observed.hits * sum(p**a for a in range(1, w + 1)) + 1

    node_tokens = 2 * tokens(observed.p, 3) / 0.016 * 0.001
    return max(range(4), key=lambda w: tokens(p, w) - observed.hits * w * node_tokens)


@pytest.mark.parametrize(("batch", "windows"), [(1, [1, 1, 3, 4]), (32, [0, 0, 1, 2])])
def test_requests_have_shorter_windows_in_a_full_batch(batch, windows):
    """T(4) is 2.507 tokens, a node 1 ms: of a round of 14 ms 0.18 tokens, of 138 ms for 32 0.58.

    A window is as long as its last draft token's p^w is above that, and no longer than others'.
    """
    plan_of = planner(max_window=8, measured=seconds(0.0005))._own_plans(batch, window=4)
    assert [plan_of(p).window for p in (0.2, 0.4, 0.6, 0.8)] == windows


def test_without_reconfiguration_every_request_has_one_plan():
    plans = planner(measured=seconds(), window=3, reconfigure_tokens=0).plans()
    for tokens in range(0, 4000, 500):
        observed(plans, [1, 2], [tokens, tokens], [0, 3], [1, 3])
    assert plans.plan(1, 8 / 3) == plans.plan(2, 8 / 3) == DraftPlan(3)


def test_what_is_forgotten_is_not_kept():
    found = planner(measured=seconds(), window=3, reconfigure_tokens=1)
    plans = found.plans()
    observed(plans, [1, 2], [5, 5], [0, 1], [1, 1])
    plans.forget([1, 2])
    assert not plans._plans and not plans._tokens and not found.observed.acceptance()


# --- help -------------------------------------------------------------------------------


def test_a_copy_is_worth_it_where_it_saves_more_than_it_costs():
    """Of 100 tokens that it may have yet 50 are expected; worked out for p = 0.7, D = 2 ms.

    as it is   window 4 of 8 requests on 4 workers: T = 0.85 · 2.7731 + 0.15 in V_4(2) = 18 ms
    helped     window 3 of one: 2.533 in 3 · 2 + V_3(1) = 19 ms; 2.19 in 16 ms for two, the best
    """
    found = planner(measured=seconds(), ahead="enumeration")
    as_it_is_s = 50 * 0.018 / (0.85 * 2.7731 + 0.15)
    helped_s = 50 * 0.016 / 2.19
    assert as_it_is_s < helped_s + 0.001
    assert not found.worth(1, 100), "a round of one is no quicker here"
    # on workers that have more requests each it is
    crowded = planner(measured=seconds(), num_requests=80)
    as_it_is_s = 50 * 0.090 / (0.85 * 2.7731 + 0.15)  # V_4(20)
    saved = as_it_is_s - helped_s
    assert saved == pytest.approx(1.4296, abs=1e-4)
    assert crowded.worth(1429, 100) and not crowded.worth(1430, 100)
    # also the draft model's weights cost
    crowded.seconds = seconds(model_s=1.0)
    assert crowded.worth(429, 100) and not crowded.worth(430, 100)


def test_without_seconds_every_copy_is_worth_it():
    assert planner().worth(1000, 1)


# --- settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ahead": "telepathy"}, "expected ahead of free_running, enumeration, got 'telepathy'"),
        ({"window": 0}, "window must be 1 … 32, got 0"),
        ({"window": 33}, "window must be 1 … 32, got 33"),
        ({"workers": -1}, "workers must be 0 or more, got -1"),
        ({"reconfigure_tokens": -1}, "reconfigure_tokens must be 0 or more, got -1"),
        ({"requests_per_helper": -2}, "requests_per_helper must be 0 or more, got -2"),
        ({"methods": ()}, r"expected different methods of drafting of model, .*, got \(\)"),
        ({"methods": ("own", "own")}, "different methods of drafting of .*, got .'own', 'own'"),
        ({"methods": tuple("abcdefgh")}, "expected different methods of drafting of model"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DraftingConfig(**settings)


def test_what_settings_ask_for():
    assert not DraftingConfig().drafts_apart and not DraftingConfig().helps
    assert DraftingConfig(workers=None).drafts_apart
    assert DraftingConfig(workers=2, window=32).drafts_apart
    assert DraftingConfig(requests_per_helper=1).helps


def test_methods_are_the_draft_models():
    assert methods_of(1) == ("model",) and methods_of(3) == ("model", "model2", "model3")
