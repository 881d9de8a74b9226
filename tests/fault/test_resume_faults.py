"""Killed, stopped, resumed: the same bits as the run that never was.

The run trains a drafter besides, which is saved after every one of its steps.
`python -m benchmarks.soak kill` does the same at twenty random points.
"""

from __future__ import annotations

import random
import signal

import pytest
from command_runs import call_main

from benchmarks.soak import runs
from benchmarks.soak.runs import KillPoint
from reprise.rl.commands import train
from reprise.rl.metrics.writer import read_metrics
from tests.support import tiny_run

pytestmark = [pytest.mark.fault, pytest.mark.slow]

STEPS = 16
LEARNED = """
Speculation.budget = "fixed:1"
Speculation.sources = ("own", "learned")
Drafter.spot = False
Drafter.steps_after_rollout = 32
Drafter.micro_batches = 1
Drafter.batch_rows = 1
Drafter.row_tokens = 32
Drafter.max_depth = 1
Drafter.top_k = 1
"""
EQUAL = {
    "parameters_equal": True,
    "optimizer_equal": True,
    "metrics_equal": True,
    "samples_equal": True,
    "policy_equal": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = tiny_run.make_inputs(tmp_path_factory.mktemp("resume"))
    config.with_name("reward.py").write_text(runs.REWARD)
    config.write_text(config.read_text() + f"Run.steps = {STEPS}\n" + LEARNED)
    return config


@pytest.fixture(scope="module")
def env():
    """Steps take seconds, so that a signal meets one of them, however late it is sent."""
    return tiny_run.environment() | {runs.SLOW_S: "0.1"}


@pytest.fixture(scope="module")
def never_killed(tiny):
    folder = tiny.parent / "never_killed"
    with tiny_run.keep_every_program():
        assert call_main(train.main, f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'") == 0
    return folder


def drafter_of(run):
    return (run / "drafter_model/model.safetensors").read_bytes()


def test_killed_at_a_random_point_stopped_by_sigterm_and_resumed(tiny, env, never_killed, tmp_path):
    run, rng = tmp_path / "run", random.Random()
    point = KillPoint(rng.randrange(3), rng.uniform(0, 0.25))
    life = runs.run_until(tiny, run, env, point)
    assert life.killed, life

    every = tiny.with_name("at_the_end.gin")  # so that the stop has to save
    every.write_text(tiny.read_text() + "Checkpoint.every_steps = 0\n")
    life = runs.run_until(every, run, env, KillPoint(1, 0.0), signal.SIGTERM)
    saved = len(read_metrics(run))
    assert life.killed and 1 <= life.steps <= saved < STEPS  # exit code 75
    log = run.with_name("run.log").read_text()
    assert "stopping: saving the last whole step" in log
    words = f"stopped and saved; step {saved} is the last that is saved; go on: "
    assert f"{words}python -m rl.train --resume --gin.Run.directory={run}" in log
    assert runs.final_state(run)[0] == saved

    with tiny_run.keep_every_program():
        there = f"--gin.Run.directory='{run}'"
        assert call_main(train.main, "--resume", there) == 0
    assert runs.compare(run, never_killed) == EQUAL, point
    assert drafter_of(run) == drafter_of(never_killed), point
