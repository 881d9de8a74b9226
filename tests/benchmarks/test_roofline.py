"""Pricing by hand: a machine of one byte and one operation a second."""

import dataclasses

import numpy as np
import pytest

from benchmarks import roofline
from reprise.rl.records.stats import EngineStats, RoundRecord
from reprise.sched.simulator.roofline import Accelerator, Instance, dense

POLICY = dense("", 100.0, layers=1, heads=2, kv_heads=1, head_dim=4)
SLOW_MEMORY = Instance(Accelerator("", 1e9, 1.0, 0.0, 1.0), POLICY, efficiency=roofline.PRICED)
SLOW_ARITHMETIC = Instance(Accelerator("", 1.0, 1e9, 0.0, 1.0), POLICY, efficiency=roofline.PRICED)
UTILISATION = 0.7  # what published results were priced with: of peak operations and bandwidth
OVERHEAD_S = 100e-6


def test_published_results_keep_their_prices():
    priced = roofline.PRICED
    assert (priced.bandwidth, priced.operations, priced.overhead_s) == (0.7, 0.7, 100e-6)
    device = roofline.PRICED_8B.device
    assert roofline.PRICED_8B.model == dense("Qwen3-8B", 7.57e9, 36, 32, 8, 128)
    assert (device.operations_per_s, device.bytes_per_s) == (989e12, 3.35e12)


def record(num_nodes, cached, rounds):
    rounds = np.array(rounds)
    ids = np.arange(len(rounds))
    return RoundRecord(*[0.0] * 6, 8, 8 * num_nodes, 64, ids, np.array(cached), rounds, rounds)


def test_memory_bound_rounds_move_the_weights_and_what_is_live():
    # two rounds of two requests, then one of the one that is left: half of the live positions
    got = roofline.rounds_seconds(SLOW_MEMORY, [record(1, [10, 30], [2, 3])])
    weights, position = 2 * 100, 2 * 1 * 1 * 4 * 2
    moved = 3 * weights + (40 + 40 + 20) * position
    assert got == pytest.approx(moved / UTILISATION + 3 * OVERHEAD_S)


def test_arithmetic_bound_rounds_pay_every_node():
    got = roofline.rounds_seconds(SLOW_ARITHMETIC, [record(4, [10, 30], [1, 1])])
    operations = (2 * 100 * 2 + 4 * 1 * 2 * 4 * 40) * 4
    assert got == pytest.approx(operations / UTILISATION + OVERHEAD_S)


def test_the_table_of_a_budget_has_the_price_of_recorded_rounds():
    table = roofline.round_times(SLOW_ARITHMETIC, [(8, 8, 64), (8, 32, 64)])
    for nodes in (1, 4):  # of each slot
        full = record(nodes, [32] * 8, [1] * 8)
        assert table(8, 8 * nodes, 64) == roofline.rounds_seconds(SLOW_ARITHMETIC, [full])


def test_a_phase_is_rounds_and_prefill():
    stats = EngineStats(timeline=[record(1, [10], [1])], prefilled_tokens=12)
    prefill = 12 * (2 * 100 + 2 * 1 * 2 * 4 * 12) / UTILISATION + OVERHEAD_S
    rounds = roofline.rounds_seconds(SLOW_ARITHMETIC, stats.timeline)
    assert roofline.phase_seconds(SLOW_ARITHMETIC, stats) == pytest.approx(rounds + prefill)


def test_cached_tokens_cost_their_share_of_a_round():
    plain, mixed = record(1, [10], [1]), record(4, [10], [1])
    mixed = dataclasses.replace(mixed, cached_nodes=8)  # of 32
    got = roofline.cached_seconds(SLOW_ARITHMETIC, [plain, mixed])
    assert got == pytest.approx(roofline.rounds_seconds(SLOW_ARITHMETIC, [mixed]) / 4)
