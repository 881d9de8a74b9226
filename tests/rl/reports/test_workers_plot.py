"""The picture of workers, from records made by hand."""

import numpy as np
import pytest

from rl.engine.worker_record import WorkerEvent, WorkerPart, WorkerStep
from rl.reports import plots, workers_plot
from rl.reports.runs import Run


def step(number, parts, events=(), leg=0, ended_s=10.0):
    return WorkerStep(number, leg, ended_s, tuple(parts), tuple(events))


def part(number, version, *spans):
    return WorkerPart(f"worker {number}", "here", version, spans)


def event(number, kind, at_s):
    return WorkerEvent(f"worker {number}", "here", kind, at_s, "", 2)


ROWS = [
    step(1, [part(10, 0, (0.0, 5.0)), part(9, 0, (0.0, 2.5))], [event(9, "joined", 0.0)]),
    step(2, [part(10, 1, (2.0, 4.0))], [event(10, "joined", 0.0)], leg=1),
]


def test_legs_follow_one_another_and_workers_are_in_order():
    lanes = workers_plot.lanes_of(ROWS)
    assert lanes.lane_of == {"worker 9": 0, "worker 10": 1}
    assert (lanes.ends_s, lanes.resumed_s, lanes.end_s) == ([10.0, 20.0], [10.0], 20.0)
    assert lanes.present_s == {"worker 9": [(0.0, 10.0)], "worker 10": [(10.0, 20.0)]}
    shares, tints = workers_plot.occupancy(lanes, {0: "red", 1: "blue"})
    seconds = shares.sum(axis=1) * 20.0 / workers_plot.BINS
    np.testing.assert_allclose(seconds, [2.5, 7.0])
    np.testing.assert_allclose(
        tints.sum(axis=1) * 20.0 / workers_plot.BINS, [[2.5, 0, 0], [5, 0, 2]]
    )


def test_many_workers_share_lanes():
    lanes = workers_plot.lanes_of([step(1, [part(i, 0, (0.0, 5.0)) for i in range(1000)])])
    assert lanes.num_lanes <= workers_plot.MOST_LANES and lanes.workers_a_lane == 32
    shares, _ = workers_plot.occupancy(lanes, {})
    np.testing.assert_allclose(shares.mean(axis=1), 0.5)


@pytest.mark.parametrize("count", [2, 40])
def test_it_is_drawn(count):
    """Of one run and of several; with more versions than a legend has, lost ones and late ones."""
    rows = [
        step(n, [part(i, n, (n, n + 0.5)) for i in range(count)], ended_s=n + 1.0)
        for n in range(count // 2 + 2)
    ]
    rows[1] = step(1, rows[1].parts, [event(1, "killed", 1.2), event(1, "joined", 1.6)], ended_s=2)
    row = {"step": 1, "reward": 0.5}
    runs = [Run(name, [row], [], workers=rows) for name in "ab"]
    panel = workers_plot.WorkersTimeline()
    for given in (runs[:1], runs):
        assert panel.shown(given)
        assert plots._figure([panel], given, 1, columns=1).startswith(b"\x89PNG")
    assert not panel.shown([Run("c", [row], [])])
