"""Runs of a grid in turns: each takes its steps, and one that fails leaves the others alone."""

import pytest

from benchmarks import grid_in_turns
from reprise.rl.metrics.writer import read_metrics, step_rows
from tests.support import tiny_run

GRID = """
Ablation.variants = (
    ("plain", ("Speculation.budget = 'off'",)),
    ("refused", ("Reward.functions = ('missing.py:score',)",)),
    ("drafts", ()),
)
Ablation.seeds = (0,)
"""


def test_each_run_takes_its_steps(tmp_path, capsys):
    grid, folder = tmp_path / "grid.gin", tmp_path / "turns"
    tiny = tiny_run.make_inputs(tmp_path)
    grid.write_text(f"include '{tiny}'\nRun.steps = 2\n{GRID}", encoding="utf-8")
    assert grid_in_turns.main([str(grid), "--folder", str(folder)]) == 1
    for name in ("plain-0", "drafts-0"):
        assert [row["step"] for row in step_rows(read_metrics(folder / name))] == [1, 2]
    assert not (folder / "refused-0" / "metrics.jsonl").exists()
    told = capsys.readouterr().err
    turns = ["step 1: plain", "step 1: drafts", "step 2: drafts", "step 2: plain"]
    assert [told.index(turn) for turn in turns] == sorted(told.index(turn) for turn in turns)
    assert "refused ended with" in told


def test_a_variant_that_the_grid_lacks_is_refused(tmp_path, capsys):
    grid, tiny = tmp_path / "grid.gin", tiny_run.make_inputs(tmp_path)
    grid.write_text(f"include '{tiny}'\n{GRID}", encoding="utf-8")
    with pytest.raises(SystemExit):
        grid_in_turns.main([str(grid), "--variants", "plan"])
    assert "no variants ['plan']" in capsys.readouterr().err
