"""Rooflines by hand, and the closed form of many rounds against their sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.sched.simulator.roofline import (
    ACCELERATORS,
    MODELS,
    Accelerator,
    Efficiency,
    Instance,
    ModelShape,
    RoundCost,
    dense,
)

SLOW = Accelerator("slow", 1000.0, 100.0, 500.0, 20.0, 50.0)
SMALL = ModelShape("small", 10.0, 20.0, 2, 4.0, 3.0, 5)
PLAIN = Efficiency(1.0, 1.0, 0.5, 0.0, 1.0)
ONE = Instance(SLOW, SMALL, 1, PLAIN)


def test_a_round_is_its_matrices_and_its_attention():
    # 20 / 100 of weights with 2·10·2 / 1000, then 4·60 / 100 of cache or 3·60 / 1000, 0.5 besides
    assert ONE.round_seconds(2, 60) == pytest.approx(0.5 + math.hypot(0.2, 0.04) + 2.4)
    # trees of 200: 2·10·400 / 1000, then 3·200·60 / 1000
    assert ONE.round_seconds(2, 60, 200) == pytest.approx(0.5 + math.hypot(0.2, 8.0) + 36.0)
    # of 12: computing the matrices does not hide behind the reading of the cache
    assert ONE.round_seconds(2, 60, 12) == pytest.approx(0.5 + math.hypot(0.2, 0.48) + 2.4)


def test_the_cache_has_the_room_beside_the_weights():
    assert ONE.kv_tokens == 120  # (500 − 20) / 4
    assert Instance(SLOW, SMALL, 2, PLAIN).kv_tokens == 245
    experts = ModelShape("experts", 10.0, 600.0, 2, 4.0, 3.0, 5, expert_bytes=400.0)
    # 200 and a fourth of the experts on each of four ranks
    assert Instance(SLOW, experts, 1, PLAIN, num_ranks=4).kv_tokens == 50
    assert Instance(SLOW, ModelShape("big", 1, 600, 1, 1, 1, 1), 1, PLAIN).kv_tokens == 0


def test_seconds_of_prefill_and_copies():
    # 5 tokens: 5·20 / 1000 with 20 / 100; then attention, 5·3·2.5 / 1000
    assert ONE.prefill_seconds(5) == pytest.approx(0.5 + math.hypot(0.2, 0.1) + 0.0375)
    assert ONE.prefill_seconds(100) == pytest.approx(0.5 + math.hypot(0.2, 2.0) + 15)
    assert ONE.copy_seconds(10) == pytest.approx(2.0)
    assert Instance(SLOW, SMALL, 4, PLAIN).copy_seconds(10) == pytest.approx(0.5)


def test_devices_share_the_work_and_meet_twice_a_layer():
    pair = Instance(SLOW, SMALL, 2, Efficiency(0.5, 1.0, 0.5, 0.1, 1.0))
    # two sums a layer, of 2 nodes of 5 values of 2 bytes, half of which go out twice: 0.8 s
    linear_s = math.hypot(20 / 100, 40 / 2000)
    assert pair.round_seconds(2, 60) == pytest.approx(
        0.5 + 4 * (0.1 + 20 / 50 / 0.5) + linear_s + 2.4
    )


def test_a_round_of_many_nodes_meets_all_experts_one_of_few_does_not():
    shape = ModelShape(
        "experts", 1, 100, 1, 1, 1, 1, expert_bytes=80, num_experts=4, experts_per_token=1
    )
    assert shape.moved_weight_bytes(1) == pytest.approx(20 + 80 / 4)
    assert shape.moved_weight_bytes(2) == pytest.approx(20 + 80 * (1 - 0.75**2))
    assert shape.moved_weight_bytes(1000) == pytest.approx(100)
    # two ranks with a node each: each holds half of the experts
    assert shape.moved_weight_bytes(2, 2) == pytest.approx(20 + 40 * (1 - 0.75**2))


def test_published_figures_are_near_the_model():
    """A batch of one of Qwen2.5-7B on one H100 and on two (TLT, tables 2 and 7)."""
    for devices, tokens_per_s in ((1, 164.65), (2, 242.11)):
        instance = Instance(ACCELERATORS["H100"], MODELS["Qwen2.5-7B"], devices)
        assert 1 / instance.round_seconds(1, 1000) == pytest.approx(tokens_per_s, rel=0.06)
    assert dense("x", 7e9, 28, 28, 4, 128).kv_bytes == 28 * 4 * 128 * 2 * 2


costs = st.builds(RoundCost, fixed_s=st.floats(0.01, 1), per_position_s=st.floats(0, 0.01))


@given(costs, st.floats(100, 1000), st.floats(0, 100), st.integers(0, 300))
def test_the_integral_is_the_sum_of_its_rounds_and_has_an_inverse(cost, positions, growth, rounds):
    seconds = cost.integral(positions, growth, rounds)
    wanted = math.fsum(cost(positions + growth * k) for k in range(rounds))
    assert seconds == pytest.approx(wanted, rel=1e-9)
    assert cost.rounds(positions, growth, seconds) == pytest.approx(rounds, rel=1e-6, abs=1e-6)
