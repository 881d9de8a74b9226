"""A measured worker, by hand."""

import pytest

from reprise.sched.policies.divided import make_scheduler
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Cluster, Simulation
from reprise.sched.simulator.measured_costs import MeasuredCosts
from reprise.sched.simulator.roofline import Costs

ROUNDS = {(4, 4, 64): 2.0, (4, 4, 128): 3.0, (8, 8, 64): 5.0, (8, 8, 128): 5.0, (4, 16, 64): 9.0}
MOVES = {15: (1.0, 2.0), 63: (4.0, 3.0)}
MEASURED: Costs = MeasuredCosts(ROUNDS, MOVES)


def test_rounds_are_a_line_in_the_positions():
    """Four rows with 32 positions each stand for a cache of 64."""
    assert MEASURED.round_seconds(4, 4 * 32) == pytest.approx(2.0)
    assert MEASURED.round_seconds(4, 4 * 64) == pytest.approx(3.0)
    assert MEASURED.round_seconds(3, 3 * 64) == pytest.approx(3.0), "the bucket of four"
    assert MEASURED.round_seconds(5, 1000) == pytest.approx(5.0), "no growth was measured"
    assert MEASURED.round_seconds(2, 10, 3) == pytest.approx(9.0)


def test_more_requests_than_rows_take_turns():
    assert MEASURED.round_seconds(16, 0) == pytest.approx(10.0)


def test_moves_go_by_the_least_size_that_holds_them():
    assert [MEASURED.copy_seconds(n) for n in (3, 15, 16)] == [1.0, 1.0, 4.0]
    assert MEASURED.prefill_seconds(126) == pytest.approx(6.0)
    assert MEASURED.prefers_copy(10) and not MEASURED.prefers_copy(60)
    assert MEASURED.kv_tokens == 8 * 128


def test_a_simulation_runs_on_measured_costs():
    """Two requests of 10 and 20 tokens on one worker of two rows: 20 rounds of two seconds."""
    flat = MeasuredCosts({(2, 2, 64): 2.0}, {63: (0.0, 0.0)})
    requests = [RequestSpec(0, 0, 4, 30), RequestSpec(1, 0, 4, 30)]
    scheduler = make_scheduler("group_fifo", seed=0, chunk_tokens=8)
    record = Simulation(scheduler, Cluster(flat, 1), {0: 10, 1: 20}).run(requests)
    assert record.finish_s == pytest.approx({0: 20.0, 1: 40.0})


def test_empty_tables_are_refused():
    with pytest.raises(ValueError, match="expected seconds of plain rounds and of moves"):
        MeasuredCosts({(4, 16, 64): 9.0}, MOVES)
    with pytest.raises(ValueError, match="got 5 rounds and 0 moves"):
        MeasuredCosts(ROUNDS, {})
