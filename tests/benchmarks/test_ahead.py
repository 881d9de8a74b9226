"""Shares of the workers' time in projected steps, by hand."""

import pytest

from benchmarks import ahead
from benchmarks.simulator.steps import AheadSimulation, StepSimulation
from reprise.sched.policies.divided import Divided, Fifo
from reprise.sched.policies.steps import Ahead, StepOrder
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Cluster, WorkerSample
from tests.support.steady_rounds import STEADY

# two workers; each step has a response of ten tokens and one of two, and an update of 6 s
STEPS = [[RequestSpec(2 * s + i, 2 * s + i, 5, 100, step=s) for i in (0, 1)] for s in range(3)]
LENGTHS = {0: 10, 1: 2, 2: 10, 3: 2, 4: 10, 5: 2}
CLUSTER = Cluster(STEADY, 2, 8, 10**6)
KEPT = {"whole_fraction": 0.9, "kept_fraction": 0.95, "accepted": 0.5}


def sample(begin_s, worker_id, num_running):
    return WorkerSample(begin_s, worker_id, num_running, 0.0, 0.0)


def test_idle_is_what_lies_in_the_span_and_runs_nothing():
    """Worker 0 runs from 1 to 4 and from 6 on; worker 1 from 2 to 3; worker 2 never."""
    samples = [sample(1, 0, 2), sample(2, 1, 1), sample(3, 0, 1), sample(3, 1, 0)]
    samples += [sample(4, 0, 1), sample(4, 0, 0), sample(6, 0, 1)]
    assert ahead.idle_share(samples, 3, 0.0, 10.0) == pytest.approx(1 - (3 + 4 + 1) / 30)
    assert ahead.idle_share(samples, 3, 2.5, 7.0) == pytest.approx(1 - (1.5 + 1 + 0.5) / 13.5)


def test_workers_of_sync_wait_in_the_tail_and_in_the_update():
    order = StepOrder(Divided(Fifo(), chunk_tokens=100), "sync")
    record = StepSimulation(order, CLUSTER, LENGTHS, keep_samples=True).run_steps(STEPS, [6.0] * 3)
    assert record.trained_s == pytest.approx([17.0, 34.0, 51.0])
    # of 17 s one worker is busy for 11, the other for 3
    assert ahead.idle_share(record.samples, 2, 17.0, 34.0) == pytest.approx(1 - 14 / 34)


def test_workers_that_begin_the_next_step_count_as_busy_and_what_falls_as_dropped():
    scheduler = Ahead(Divided(Fifo(), chunk_tokens=100), chunk_tokens=100)
    simulation = AheadSimulation(scheduler, CLUSTER, LENGTHS, keep_samples=True)
    record = simulation.run_ahead(STEPS, [6.0] * 3, lambda request, begun: begun // 2)
    # from 3 on worker 1 begins both: two prompts, two tokens of both, eight more of one, until 15
    assert record.trained_s[0] == pytest.approx(17.0)
    busy_s = 11 + 3 + 12
    assert ahead.idle_share(record.samples, 2, 0.0, 17.0) == pytest.approx(1 - busy_s / 34)
    # a start's prompt is a part of it: 2 s with two tokens, 10 s with ten; the later half falls
    assert simulation.begun_s[1] == pytest.approx(12.0)
    assert simulation.dropped_s[1] == pytest.approx(1.0 + 5.0)
    assert simulation.begun_s[0] == simulation.dropped_s[0] == 0.0


def test_modes_are_played_on_the_same_steps_and_shares_have_bounds(monkeypatch):
    monkeypatch.setattr(ahead, "LENGTHS", ahead.Workload(8, 4, 200, 800, sigma=0.9))
    monkeypatch.setattr(ahead, "WORKERS", 2)
    rows = ahead.projected(KEPT, range(2))
    assert [row["update_percent"] for row in rows] == [25, 50, 100]
    for row in rows:
        assert 0 <= row["ahead_idle"] < row["sync_idle"] < 1
        assert 0 < row["ahead_dropped"] < row["ahead_begun"] < 1
        assert row["ahead_idle"] + row["ahead_begun"] <= 1
        assert row["ahead_idle"] <= row["ahead_idle_with_ends"]


def test_a_projection_alone_leaves_what_was_measured(monkeypatch):
    monkeypatch.setattr(ahead, "projected", lambda kept, seeds: [kept])
    before = {"runs": 3, "kept": {"gumbel": KEPT}, "projected": [], "commit": "before"}
    after = ahead.projected_again(before, {"commit": "after"})
    assert {**after, "projected": []} == {**before, "projection": after["projection"]}
    assert after["projected"] == [KEPT] and after["projection"]["commit"] == "after"
