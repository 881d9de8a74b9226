"""`python -m rl.simulate`: what it refuses, what it writes, and lengths of real runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from rl import simulate
from rl.config import load
from rl.simulation import SimulateRun, lengths_of_run, play, table
from rl.simulation_figure import COLUMNS, grid, positions_at
from sched.policies import POLICIES, make_scheduler
from sched.simulator import Sample

SMALL = (
    *("Workload.num_groups=12", "Workload.group_size=4", "Workload.mean_tokens=300"),
    *("Workload.limit_tokens=2000", "Cluster.workers=3", "Cluster.kv_tokens=8000"),
    "Simulate.chunk_tokens=256",
)


def arguments(*overrides):
    return [f"--gin.{o}" for o in (*SMALL, *overrides)]


def test_every_policy_plays_the_same_rollout():
    rows = [row for row, _ in play(load(SimulateRun, [], SMALL))]
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert rows[0]["speedup"] == 1.0 and rows[0]["preemptions"] > 0
    tokens = [row["completion_s"] * row["tokens_per_s"] for row in rows]
    assert tokens == pytest.approx([tokens[0]] * len(rows))
    assert all(row["preemptions"] == 0 for row in rows[1:])
    assert len(table(rows).splitlines()) == 1 + len(rows)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    where = f"Simulate.directory={str(tmp_path)!r}"
    assert simulate.main([*arguments(where, "Simulate.seeds=(0, 1)"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert printed["simulated"] is True
    assert [row["seed"] for row in printed["rows"]] == [0] * 4 + [1] * 4
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Cluster.device='H1000'", "expected one of 'H100'"),
        ("Cluster.model='GPT'", "expected one of 'Qwen"),
        (
            "Simulate.policies=('seer', 'sear')",
            "'oracle', got tuple.*Did you mean seer",
        ),
        ("Cluster.kv_tokens=100", "a worker holds 100 positions.*mend: more"),
        ("Simulate.chunk=3", "no field Simulate.chunk. Fields of Simulate"),
        ("Cluster.workers=0", "at least one worker"),
        ("Simulate.trace='nowhere'", "expected samples of step 1 in nowhere, got none; mend"),
    ],
)
def test_what_cannot_be_simulated_is_said(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simulate.main(arguments(override)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error


def test_lengths_of_a_run_are_those_of_its_step(tmp_path):
    rows = [
        {"step": step, "example_id": example, "num_tokens": 10 * step + i}
        for step in (1, 2)
        for example in ("a", "b")
        for i in range(3)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths_of_run(tmp_path, 2, 1.0).tolist() == [[20, 21, 22], [20, 21, 22]]
    assert lengths_of_run(tmp_path, 1, 100).tolist()[0] == [1000, 1100, 1200]
    config = load(SimulateRun, [], [*SMALL, f"Simulate.trace={str(tmp_path)!r}"])
    (row, _), *_ = play(config)
    assert row["completion_s"] * row["tokens_per_s"] == pytest.approx(2 * (10 + 11 + 12))


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


def test_positions_grow_between_two_samples():
    samples = [Sample(1.0, 0, 2, 0, 100.0, 0.0), Sample(3.0, 0, 1, 0, 60.0, 140.0)]
    samples.append(Sample(5.0, 0, 0, 0, 0.0, 80.0))
    found = positions_at(samples, np.array([0.0, 1.5, 2.0, 2.999999, 4.0, 6.0]))
    assert found == pytest.approx([0, 110, 120, 140, 70, 0], abs=1e-3)


def test_a_policy_that_there_is_not():
    with pytest.raises(ValueError, match="expected a policy of group_fifo, divided_fifo, seer"):
        make_scheduler("lifo", seed=0, chunk_tokens=8)
