"""The picture of workers, from records made by hand."""

import numpy as np
import pytest

from reprise.rl.records.worker_record import WorkerEvent, WorkerPart, WorkerStep
from reprise.rl.reports import plots, workers_plot
from reprise.rl.reports.runs import Run


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
    assert lanes.present_s() == {"worker 9": [(0.0, 10.0)], "worker 10": [(10.0, 20.0)]}
    assert lanes.late == [] and lanes.lost == []


def test_busy_workers_are_counted_over_time():
    times_s, busy = workers_plot.workers_busy(workers_plot.lanes_of(ROWS))
    np.testing.assert_allclose(busy.sum() * 20.0 / workers_plot.BINS, 2.5 + 5.0 + 2.0)
    for at_s, count in ((1.0, 2), (4.0, 1), (6.0, 0), (13.0, 1), (19.0, 0)):
        np.testing.assert_allclose(busy[np.abs(times_s - at_s).argmin()], count, atol=1e-9)


@pytest.mark.parametrize("count", [2, 40])
def test_it_is_drawn(count):
    """Of one run and of several; with many versions, a lost worker and a late one."""
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
