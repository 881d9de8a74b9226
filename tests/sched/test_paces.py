"""Windows of guesses in simulated rounds, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from sched.cost_model import Accelerator, Efficiency, Instance, ModelShape
from sched.paces import Drafting, Windows, chance_of
from sched.specactor import coupled_tokens

# a round takes 1 s for what it reads, and 0.05 s for every node
INSTANCE = Instance(
    Accelerator("x", 20.0, 1.0, 1e9, 1e9),
    ModelShape("y", 0.5, 1.0, 1, 0.0, 0.0),
    1,
    Efficiency(1, 1, 0.0, 0, 1),
)


def test_a_chance_is_the_one_that_brings_so_many_tokens():
    for p in (0.0, 0.3, 0.9, 1.0):
        assert chance_of(coupled_tokens(p, 8), 8) == pytest.approx(p, abs=1e-9)
    with pytest.raises(ValueError, match=r"expected 1 … 3 tokens of 2 guesses, got 4"):
        chance_of(4, 2)


def test_small_batches_guess_far_and_large_ones_not_at_all():
    pace = Windows(INSTANCE, (0,), [Drafting(1, (0.8,))], windows=(1, 3, 8))
    for batch, window in ((1, 8), (5, 3), (10, 1), (20, 0)):
        found = pace.plan(0, (batch,), 100.0)
        assert found.tokens_per_round == pytest.approx((coupled_tokens(0.8, window),)), batch
        # nodes = batch · (window + 1): none of these is bound by computing
        assert found.cost(100.0) == pytest.approx(1.0)


def test_more_paths_where_there_is_room_for_their_nodes():
    ways = [Drafting(1, (0.5,)), Drafting(4, (0.7,))]
    pace = Windows(INSTANCE, (0,), ways, windows=(4,))
    assert pace.plan(0, (1,), 0.0).tokens_per_round == pytest.approx((coupled_tokens(0.7, 4),))
    assert pace.plan(0, (4,), 0.0).tokens_per_round == pytest.approx((coupled_tokens(0.5, 4),))


def test_drafting_takes_its_time():
    slow = Drafting(1, (0.8,), seconds=lambda batch, window: 0.1 * window)
    found = Windows(INSTANCE, (0,), [slow], windows=(2,)).plan(0, (1,), 0.0)
    assert found.cost(0.0) == pytest.approx(1.2)
    too_slow = dataclasses.replace(slow, seconds=lambda batch, window: 5.0)
    found = Windows(INSTANCE, (0,), [too_slow], windows=(2,)).plan(0, (1,), 0.0)
    assert found.tokens_per_round == (1.0,)


def test_lanes_go_by_the_siblings_that_have_finished():
    pace = Windows(INSTANCE, (0, 1, 5), [Drafting(1, (0.1, 0.5, 0.9))], windows=(2,))
    assert [pace.lane(7, n) for n in (0, 1, 4, 5, 99)] == [0, 1, 1, 2, 2]
    tokens = pace.plan(0, (1, 1, 1), 0.0).tokens_per_round
    assert tokens == pytest.approx([coupled_tokens(p, 2) for p in (0.1, 0.5, 0.9)])


def test_a_fixed_window_knows_no_load_and_a_threshold_no_guesses_above_it():
    always = Windows(INSTANCE, (0,), [Drafting(1, (0.5,))], fixed=8)
    assert always.plan(0, (100,), 0.0).tokens_per_round == pytest.approx((coupled_tokens(0.5, 8),))
    below = Windows(INSTANCE, (0,), [Drafting(1, (0.5,))], fixed=8, most_requests=32)
    assert below.plan(0, (33,), 0.0).tokens_per_round == (1.0,)
    assert below.plan(0, (32,), 0.0).tokens_per_round != (1.0,)
