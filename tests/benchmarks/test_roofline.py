"""Pricing by hand: a machine of one byte and one operation a second."""

import numpy as np
import pytest

from benchmarks import roofline
from benchmarks.roofline import OVERHEAD_S, UTILISATION, Accelerator, PolicyShape
from rl.timeline import EngineStats, RoundRecord

SLOW_MEMORY = Accelerator("", 1e9, 1.0)
SLOW_ARITHMETIC = Accelerator("", 1.0, 1e9)
POLICY = PolicyShape("", 100.0, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)


def record(num_nodes, cached, rounds):
    rounds = np.array(rounds)
    ids = np.arange(len(rounds))
    return RoundRecord(*[0.0] * 6, 8, num_nodes, 64, ids, np.array(cached), rounds, rounds)


def test_memory_bound_rounds_move_the_weights_and_what_is_live():
    # two rounds of two requests, then one of the one that is left: half of the live positions
    got = roofline.rounds_seconds(SLOW_MEMORY, POLICY, [record(1, [10, 30], [2, 3])])
    weights, position = 2 * 100, 2 * 1 * 1 * 4 * 2
    moved = 3 * weights + (40 + 40 + 20) * position
    assert got == pytest.approx(moved / UTILISATION + 3 * OVERHEAD_S)
    longer = roofline.rounds_seconds(SLOW_MEMORY, POLICY, [record(1, [10, 30], [2, 3])], scale=2)
    assert longer - got == pytest.approx(100 * position / UTILISATION)


def test_arithmetic_bound_rounds_pay_every_node():
    got = roofline.rounds_seconds(SLOW_ARITHMETIC, POLICY, [record(4, [10, 30], [1, 1])])
    operations = (2 * 100 * 2 + 4 * 1 * 2 * 4 * 40) * 4
    assert got == pytest.approx(operations / UTILISATION + OVERHEAD_S)


def test_a_phase_is_rounds_passes_and_prefill():
    stats = EngineStats(timeline=[record(1, [10], [1])], prefilled_tokens=12)
    stats.verified.passes[5, 384] += 2
    total, passes = roofline.phase_seconds(SLOW_ARITHMETIC, POLICY, stats)
    one_pass = 5 * 384 * (2 * 100 + 2 * 1 * 2 * 4 * 384) / UTILISATION + OVERHEAD_S
    assert passes == pytest.approx(2 * one_pass)
    prefill = 12 * (2 * 100 + 2 * 1 * 2 * 4 * 12) / UTILISATION + OVERHEAD_S
    rounds = roofline.rounds_seconds(SLOW_ARITHMETIC, POLICY, stats.timeline)
    assert total == pytest.approx(rounds + passes + prefill)
