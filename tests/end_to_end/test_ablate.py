"""`python -m rl.ablate` as a user runs it: a grid, stopped, gone on with, and its table."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
import time

import pytest
from command_runs import call_main
from held_runs import held, make_held_inputs

from reprise.rl.commands import ablate
from tests.support import tiny_run

GRID = """
Ablation.variants = (
    ("plain", ()),
    ("full", ("Reuse.mode = 'full'", "Reuse.fresh_share = 0.0", "Reuse.renew_groups = False")),
)
Ablation.seeds = (0,)
Run.steps = 4
Checkpoint.every_steps = 0
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablate")
    base = make_held_inputs(folder)
    (folder / "grid.gin").write_text(f"include '{base}'\n{GRID}")
    return folder / "grid.gin"


def arguments(grid, *more):
    return [f"--gin_file={grid}", f"--gin.Ablation.directory={str(grid.parent / 'runs')!r}", *more]


def command(grid):
    return [sys.executable, "-m", "rl.ablate", *arguments(grid)]


def test_a_grid_is_stopped_resumed_and_read(grid, capsys, monkeypatch):
    env, runs = tiny_run.environment(), grid.parent / "runs"
    with contextlib.ExitStack() as holding:
        holding.enter_context(held(grid, runs / "plain-0", 1))
        with subprocess.Popen(
            command(grid), cwd=tiny_run.ROOT, env=env, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            try:
                until_s = time.monotonic() + 300
                while not (runs / "plain-0" / "metrics.jsonl").exists():
                    assert process.poll() is None, process.communicate()[0]
                    assert time.monotonic() < until_s, "no step has ended"
                    time.sleep(0.05)
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C tells all
                holding.close()
                output, _ = process.communicate(timeout=300)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, output
    assert "the same command resumes it" in output
    for name, value in env.items():  # of the runs that it starts
        monkeypatch.setenv(name, value)
    assert call_main(ablate.main, *arguments(grid)) == 0
    capsys.readouterr()
    with (runs / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["plain", "full"]
    plain, full = rows
    # an epoch is three steps: the fourth is taken over whole
    assert float(full["reused_fraction"]) == 1.0 and plain["reused_fraction"] == "nan"
    assert 0 < float(full["generated_tokens"]) < float(plain["generated_tokens"])
    assert (runs / "figure.png").exists() and "| full |" in (runs / "table.md").read_text()
    assert call_main(ablate.main, *arguments(grid)) == 0
    out = capsys.readouterr().out
    assert out.count("done before") == 2 and (runs / "table.md").read_text() in out
    assert call_main(ablate.main, *arguments(grid, "--table")) == 0
    assert call_main(ablate.main, *arguments(grid, "--dry_run")) == 0
    assert "full, seed 0: done" in capsys.readouterr().out
    assert call_main(ablate.main, *arguments(grid, "--gin.Run.steps=9")) == 2
    assert "another configuration" in capsys.readouterr().err


def test_errors_are_named_before_anything_runs(grid, capsys):
    assert call_main(ablate.main, *arguments(grid, "--gin.Ablation.seed=(1,)")) == 2
    assert "Did you mean Ablation.seeds?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        call_main(ablate.main)
    assert left.value.code == 2 and "expected a grid" in capsys.readouterr().err
