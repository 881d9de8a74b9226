"""The disk that checkpoints need: what is counted, and when a run is warned."""

import dataclasses

import pytest

from reprise.models.config import num_params
from reprise.rl.gin.loader import load
from reprise.rl.run import disk_plan
from reprise.rl.runtime import disk
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from tests.support import tiny_run

WEIGHTS = 4 * num_params(tiny_run.MODEL)


@pytest.fixture
def plan(tiny, tmp_path):
    def planned(*overrides):
        config = load(TrainConfig, [tiny], overrides)
        return disk_plan.disk_plan(config, open_inputs(config), tmp_path / "new" / "run")

    return planned


def test_states_that_are_kept_the_one_in_the_making_and_the_best_policy_count(plan):
    steps = 3 * 4  # of training, and two in the optimizer's state
    one = plan("Checkpoint.keep=2")
    assert one.each_bytes == 3 * WEIGHTS + steps
    assert (one.total_bytes, one.held_bytes) == (3 * one.each_bytes, 0)
    evaluated = plan("Checkpoint.keep=2", "Eval.num_prompts=1")
    assert evaluated.total_bytes == one.total_bytes + WEIGHTS
    halved = plan("Optimizer.first_moment='bfloat16'")
    assert halved.each_bytes == 2.5 * WEIGHTS + steps


def test_a_warning_comes_before_the_disk_is_full(plan, tmp_path, monkeypatch):
    found = plan()
    assert found.free_bytes > 2**20 and found.warning is None
    full = dataclasses.replace(found, free_bytes=found.total_bytes - 1)
    assert full.warning.startswith("the disk will be full: checkpoints take up to ")
    assert "lower Checkpoint.keep" in full.warning
    kept = tmp_path / "new" / "run" / "checkpoints" / "step_00000001"
    kept.mkdir(parents=True)
    (kept / "x").write_bytes(b"x" * 10)  # of a run that is resumed
    monkeypatch.setattr(disk, "free_bytes", lambda folder: found.total_bytes - 10)
    assert plan().warning is None
