"""`python -m rl.simulate`: what it refuses, what it writes, and lengths of real runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from reprise.rl.commands import simulate
from reprise.rl.commands.simulate import (
    COLUMNS,
    SimulateRun,
    grid,
    lengths_of_run,
    play,
    remarks,
    table,
)
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter
from reprise.sched.policies.divided import POLICIES, make_scheduler

SMALL = (
    *("Workload.num_groups=12", "Workload.group_size=4", "Workload.mean_tokens=300"),
    *("Workload.limit_tokens=2000", "SimulatedCluster.workers=3", "Simulate.chunk_tokens=256"),
    "SimulatedCluster.kv_tokens=8000",
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
        ("SimulatedCluster.device='H1000'", "expected one of 'H100'"),
        ("SimulatedCluster.model='GPT'", "expected one of 'Qwen"),
        (
            "Simulate.policies=('seer', 'sear')",
            "'oracle' or PATH.py:name, got tuple.*Did you mean seer",
        ),
        ("SimulatedCluster.kv_tokens=100", "a worker holds 100 positions.*fix: more"),
        ("SimulatedCluster.workers=0", "at least one worker"),
        ("Simulate.trace='nowhere'", "expected samples of step 1 in nowhere, got none; fix"),
    ],
)
def test_impossible_simulations_are_refused(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simulate.main(arguments(override)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error), error


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


def test_the_picture_says_what_it_is(tmp_path, monkeypatch):
    """Its title, a line where the tail begins, and room for the last line."""
    import matplotlib.figure

    seen = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path: seen.append(self))
    where = f"Simulate.directory={str(tmp_path)!r}"
    assert simulate.main([*arguments(where, "Simulate.seeds=(0, 1)")]) == 0
    (picture,) = seen
    title = picture.get_suptitle()
    assert "Simulated" in title and "roofline" in title and "seed 1" in title
    panels = [axis for axis in picture.axes if len(axis.lines) == 2]
    assert len(panels) == 4
    for axis in panels:
        end_s, tail_s = (line.get_xdata()[0] for line in axis.lines)
        assert 0 < tail_s <= end_s < axis.get_xlim()[1]


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


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="expected a policy of group_fifo, divided_fifo, seer"):
        make_scheduler("lifo", seed=0, chunk_tokens=8)
