"""The report of a simulation: its remarks, and its grid of workers and time."""

from __future__ import annotations

import numpy as np
import pytest
from small_simulation import SMALL

from reprise.rl.gin.loader import load
from reprise.rl.simulation.config import SimulateRun
from reprise.rl.simulation.report import COLUMNS, grid, remarks
from reprise.rl.simulation.rollouts import play


def test_remarks_say_what_seers_order_costs_and_saves():
    def row(policy, seconds, tail_s):
        speedup, cut = 10 / seconds, 1 - tail_s / 5
        return {
            "policy": policy, "completion_s": seconds, "tail_s": tail_s, "speedup": speedup,
            "tail_reduction": cut,
        }  # fmt: skip

    rows = [row("group_fifo", 10, 5), row("divided_fifo", 8, 4), row("seer", 9, 1)]
    text = "\n".join(remarks(rows))
    assert "seer: 1.11× as fast, tail shorter by 80%" in text
    assert "seer ends after divided_fifo in 1 of 1 seeds, its tail is shorter in 1" in text
    assert "divided_fifo in" not in "\n".join(remarks(rows[:2]))


def test_the_grid_of_a_record_is_what_ran_when():
    config = load(SimulateRun, [], [*SMALL, "Simulate.policies=('seer',)"])
    ((_, record),) = play(config)
    running, positions = grid(record, record.completion_s)
    assert running.shape == positions.shape == (3, COLUMNS)
    assert running[:, 0].sum() > 0 and running[:, -1].sum() == 0
    assert positions.max() <= 8000
    busy_s = np.count_nonzero(running, axis=1) * record.completion_s / COLUMNS
    wanted = [w.busy_s for w in record.workers]
    assert busy_s == pytest.approx(wanted, rel=0.02)
