"""The seconds that HistoPipe's second tier plans by, from what a run has measured."""

from __future__ import annotations

import numpy as np
import pytest

from reprise.rl.records.stats import EngineStats, RoundRecord
from reprise.rl.steps.pacing import Pacing, pace_of
from reprise.rl.steps.rollouts import Prompts
from reprise.sched.policies.histopipe import Pace
from reprise.sched.simulator.measured_costs import MeasuredCosts


def fetch(num_nodes, rounds, emitted):
    names = np.arange(len(rounds))
    times = dict.fromkeys(
        ("began_s", "ready_s", "drafted_s", "called_s", "fetched_s", "ended_s"), 0.0
    )
    return RoundRecord(
        **times,
        num_slots=4,
        num_nodes=num_nodes,
        num_positions=16,
        request_ids_A=names,
        cached_tokens_A=names,
        rounds_A=np.array(rounds),
        emitted_A=np.array(emitted),
    )


def test_the_pace_is_the_tokens_and_the_nodes_of_a_requests_round():
    # three plain rounds, in which one request ends early, and one that verifies two trees
    stats = EngineStats(timeline=[fetch(4, [3, 2], [3, 2]), fetch(12, [1, 1], [4, 1])])
    assert pace_of(stats) == Pace(nodes=(3 * 4 + 12) / (3 * 4 + 4), tokens=10 / 7)
    assert pace_of(EngineStats()) == Pace()


def test_tau_follows_the_last_step():
    costs = MeasuredCosts({(2, 2, 8): 1.0, (4, 4, 8): 2.0, (4, 12, 8): 6.0}, {8: (1.0, 1.0)})
    pacing = Pacing(costs)
    pacing.plans(Prompts(tokens=((1,) * 2, (1,) * 4)))
    assert pacing.tau()(10, 2) == pytest.approx(10 * 1.0)
    assert pacing.tau()(10, 8) == pytest.approx(10 * 2 * 2.0), "two turns of four"
    pacing.played(EngineStats(timeline=[fetch(12, [1, 1], [5, 5])]))
    assert pacing.tau()(10, 4) == pytest.approx(10 / 5 * 6.0)
