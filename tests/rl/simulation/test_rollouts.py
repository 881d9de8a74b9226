"""Simulated rollouts: the same for every policy, with drawn lengths or those of a run."""

from __future__ import annotations

import pytest
from small_simulation import SMALL

from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter
from reprise.rl.simulation.config import SimulateRun
from reprise.rl.simulation.report import table
from reprise.rl.simulation.rollouts import lengths_of_run, play
from reprise.sched.policies.divided import POLICIES, make_scheduler


def test_every_policy_plays_the_same_rollout():
    rows = [row for row, _ in play(load(SimulateRun, [], SMALL))]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert rows[0]["speedup"] == 1.0 and rows[0]["preemptions"] > 0
    tokens = [row["completion_s"] * row["tokens_per_s"] for row in rows]
    assert tokens == pytest.approx([tokens[0]] * len(rows))
    assert all(row["preemptions"] == 0 for row in rows[1:])
    assert len(table(rows).splitlines()) == 1 + len(rows)


def test_lengths_of_a_run_are_those_of_its_step(tmp_path):
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=False, samples_per_step=-1)) as writer:
        for step in (1, 2):
            rows = [
                {"example_id": example, "num_tokens": 10 * step + i}
                for example in ("a", "b")
                for i in range(3)
            ]
            writer.write_samples(step, rows)
    assert lengths_of_run(tmp_path, 2, 1.0).tolist() == [[20, 21, 22], [20, 21, 22]]
    assert lengths_of_run(tmp_path, 1, 100).tolist()[0] == [1000, 1100, 1200]
    config = load(SimulateRun, [], [*SMALL, f"Simulate.trace={str(tmp_path)!r}"])
    (row, _), *_ = play(config)
    assert row["completion_s"] * row["tokens_per_s"] == pytest.approx(2 * (10 + 11 + 12))
    with MetricsWriter(
        tmp_path / "odd", MetricsConfig(tensorboard=False, samples_per_step=-1)
    ) as writer:
        writer.write_samples(1, [{"example_id": example, "num_tokens": 1} for example in "aab"])
    with pytest.raises(ValueError, match=r"groups of one size, got sizes \[1, 2\]"):
        lengths_of_run(tmp_path / "odd", 1, 1.0)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="expected a policy of group_fifo, divided_fifo, seer"):
        make_scheduler("lifo", seed=0, chunk_tokens=8)
