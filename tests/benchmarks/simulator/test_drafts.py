"""Paces that ask `spec`: by hand, and against its objects on the same outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.simulator.drafts import (
    Budgeted,
    CostTimes,
    RequestClass,
    Windowed,
    WindowMean,
    chain_probs,
    window_mean,
)
from reprise.sched.policies.specactor import sequential_tokens
from reprise.sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape
from reprise.spec.budget import aimd
from reprise.spec.budget.aimd import Aimd
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.budget.goodput import Goodput
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots

# a round takes 1 s for what it reads, with 0.05 s for every node (√ of the sum of squares)
INSTANCE = Instance(
    Accelerator("x", 20.0, 1.0, 1e9, 1e9),
    ModelShape("y", 0.5, 1.0, 1, 0.0, 0.0, 0),
    1,
    Efficiency(1, 1, 0.0, 0, 1),
)
CHAIN = RequestClass(0, chain_probs(0.8, 8))


def goodput(lanes, sizes=(2, 4, 9), **more):
    return Budgeted(INSTANCE, lanes, Goodput, sizes, **more)


def test_small_batches_draft_far_and_large_ones_not_at_all():
    round_model = goodput([CHAIN])
    for batch, nodes in ((1, 9), (5, 4), (10, 4), (15, 2), (20, 2), (30, 1)):
        found = round_model.plan(
            batch, (batch,), 100.0
        )  # a worker of its own: nothing is remembered
        assert found.tokens_per_round == pytest.approx((sequential_tokens(0.8, nodes - 1),)), batch
        assert found.cost(100.0) == pytest.approx(math.hypot(1.0, 0.05 * batch * nodes))


@pytest.mark.parametrize("counts", [(1, 0), (3, 3), (0, 3), (0, 9), (12, 1)])
def test_the_choice_is_the_one_that_the_budget_of_an_engine_makes(counts):
    lanes = [CHAIN, RequestClass(3, chain_probs(0.3, 8))]
    times = CostTimes(lambda b, n: INSTANCE.round_cost(b, n), lambda b, n: 0.0)
    A = np.arange(sum(counts))
    live = LiveSlots(A, A, A, A, A, A, np.zeros((len(A), 0), np.int32))
    probs = [lane.probs for lane, n in zip(lanes, counts, strict=True) for _ in range(n)]
    blank = np.zeros((len(A), 8), np.int32)
    drafts = Drafts(blank, blank, np.array(probs, np.float32), blank, np.full(len(A), 8))
    sizes = [len(A) * n for n in (2, 4, 9)]
    taken_A = Goodput(times).choose(live, drafts, sizes, len(A), 50).taken_A
    assert taken_A is not None
    gained = [sum(probs[:n]) for probs, n in zip(probs, taken_A, strict=True)]
    plan = goodput(lanes).plan(0, counts, 50.0).tokens_per_round
    total = sum(n * (tokens - 1) for n, tokens in zip(counts, plan, strict=True))
    assert total == pytest.approx(sum(gained), rel=1e-5)


def test_lanes_go_by_the_siblings_that_have_finished():
    round_model = goodput(
        [RequestClass(0, (0.1,)), RequestClass(1, (0.5,)), RequestClass(5, (0.9,))], sizes=(2,)
    )
    assert [round_model.lane(7, n) for n in (0, 1, 4, 5, 99)] == [0, 1, 1, 2, 2]
    assert round_model.plan(0, (1, 1, 1), 0.0).tokens_per_round == pytest.approx((1.1, 1.5, 1.9))


def test_rounds_include_the_seconds_of_drafting():
    slow = goodput([CHAIN], sizes=(3,), draft_s=lambda requests, nodes: 0.1 * (nodes - 1))
    assert slow.plan(0, (1,), 0.0).cost(0.0) == pytest.approx(math.hypot(1, 0.15) + 0.2)
    too_slow = goodput([CHAIN], sizes=(3,), draft_s=lambda requests, nodes: 5.0)
    assert too_slow.plan(0, (1,), 0.0).tokens_per_round == (1.0,)


def test_a_fixed_budget_knows_no_load_and_a_threshold_no_drafts_above_it():
    round_model = Budgeted(INSTANCE, [CHAIN], lambda times: FixedBudget(), (9,), max_requests=32)
    assert round_model.plan(0, (32,), 0.0).tokens_per_round == pytest.approx(
        (sequential_tokens(0.8, 8),)
    )
    assert round_model.plan(0, (33,), 0.0).tokens_per_round == (1.0,)


def played_windows(rng, p, rounds, budget):
    """Return the mean window that a budget of `spec` gives one request, and its mean tokens."""
    one = np.zeros(1, int)
    live = LiveSlots(one, one, one, one, one, one, np.zeros((1, 0), np.int32))
    drafted = tokens = 0
    for _ in range(rounds):
        window = int(budget.limits(live, 1)[0])
        accepted_N = np.cumprod(rng.random(window) < p).astype(bool)
        blank = np.zeros((1, window), np.int32)
        chain = np.arange(-1, window - 1, dtype=np.int32)[None]
        drafts = Drafts(blank, chain, blank.astype(float), blank, np.array([window]))
        checked = np.ones((1, window), bool)
        budget.observe(live, drafts, Acceptance(True, accepted_N[None], checked))
        drafted, tokens = drafted + window, tokens + 1 + int(accepted_N.sum())
    return drafted / rounds, tokens / rounds


@pytest.mark.parametrize("p", [0.3, 0.9, 0.97])
def test_windows_are_those_that_aimd_gives_on_the_same_outcomes(p):
    wanted = window_mean(p)
    batches = [played_windows(np.random.default_rng(s), p, 2000, Aimd()) for s in range(5)]
    drafts, tokens = np.mean(batches, axis=0)
    # about 5 standard errors of the mean of five batches
    spread = 5 * np.std(batches, axis=0, ddof=1).max() / 5**0.5
    assert drafts == pytest.approx(wanted.drafts, abs=spread + 0.02)
    assert tokens == pytest.approx(wanted.tokens, abs=spread + 0.02)


def test_windows_at_the_ends(monkeypatch):
    assert window_mean(0.0) == WindowMean(pytest.approx(2), pytest.approx(1))
    assert window_mean(1.0).drafts == pytest.approx(32)
    half = window_mean(0.9, 0.5)
    whole = window_mean(0.9)
    assert half.tokens - 1 == pytest.approx((whole.tokens - 1) / 2)
    monkeypatch.setattr(aimd, "STEP_TOKENS", 3)
    monkeypatch.setattr(aimd, "MAX_TOKENS", 9)
    assert window_mean(1.0).drafts == pytest.approx(9)  # 2, 5, 8, and 9


def test_a_gate_keeps_rounds_plain_where_trees_bring_less():
    round_model = Windowed(INSTANCE, WindowMean(3.0, 2.0))
    assert round_model.plan(0, (5,), 0.0).tokens_per_round == (2.0,)  # 20 nodes: 1 s
    assert round_model.plan(0, (20,), 0.0).tokens_per_round == (
        1.0,
    )  # 80 nodes: 4 s, for twice as much
