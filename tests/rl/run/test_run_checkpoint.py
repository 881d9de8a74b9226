"""Runs that go on with other settings: what may change, and what is begun anew."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from loop_runs import finish
from run_settings import TRAINED_AFTER

from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.checkpoint.reader import StructureMismatchError
from reprise.rl.gin.loader import load
from reprise.rl.run.run_checkpoint import RunCheckpointer, check_can_resume
from reprise.rl.runtime.run_files import CHECKPOINTS
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.steps.position import RunPosition
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device")

PIPELINE = ("Sched.mode='pipeline'", "Sched.chunk_tokens=3")
BEGINS = "the checkpoint holds no {}: it begins after step 2"


@pytest.fixture(scope="module")
def two_steps(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("two"), "Run.steps=2").folder


@pytest.fixture(scope="module")
def unchanged(tiny, two_steps, tmp_path_factory):
    return go_on(tiny, two_steps, tmp_path_factory.mktemp("unchanged"))


def go_on(tiny, before, folder, *overrides):
    shutil.copytree(before, folder, dirs_exist_ok=True)
    config = load(TrainConfig, [tiny], overrides)
    check_can_resume(config, open_inputs(config), folder / CHECKPOINTS)
    done = finish(tiny, folder, *overrides, "Run.steps=3")
    assert "resuming after step 2" in done.show.messages
    assert [row["step"] for row in done.rows] == [1, 2, 3]
    return done


@pytest.mark.parametrize(
    ("overrides", "lacking"),
    [(("Optimizer.first_moment='bfloat16'",), ()), (TRAINED_AFTER, ("drafter",))],
)
def test_the_same_tokens_by_other_means(tiny, two_steps, unchanged, tmp_path, overrides, lacking):
    done = go_on(tiny, two_steps, tmp_path, *overrides)
    assert [m for m in done.show.messages if m.startswith("the checkpoint holds no")] == [
        BEGINS.format(part) for part in lacking
    ]
    assert done.rows[2]["reward"] == unchanged.rows[2]["reward"]
    for one, other in zip(done.leaves, unchanged.leaves, strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), atol=1e-3)


@pytest.mark.parametrize(
    ("overrides", "lacking"), [(PIPELINE, "behind"), (("Algorithm.name='ppo'",), "critic")]
)
def test_what_a_checkpoint_lacks_begins_anew_and_is_left_out_again(
    tiny, two_steps, tmp_path, overrides, lacking
):
    done = go_on(tiny, two_steps, tmp_path / "there", *overrides)
    assert BEGINS.format(lacking) in done.show.messages
    shutil.copytree(done.folder, tmp_path / "back")
    back = finish(tiny, tmp_path / "back", "Run.steps=4")
    assert "resuming after step 3" in back.show.messages and len(back.rows) == 4


@pytest.mark.parametrize(
    ("config", "now_s", "others", "is_due"),
    [
        ({"every_minutes": 2.0}, 219.0, False, False),
        ({"every_minutes": 2.0}, 220.0, False, True),
        ({"every_minutes": 2.0}, 100.0, True, True),  # in another process
        ({"every_minutes": 0.0}, 1e9, True, False),
        ({"every_minutes": 2.0, "every_steps": 3}, 0.0, False, True),
    ],
)
def test_a_checkpoint_is_due_by_minutes_in_all_processes_alike(config, now_s, others, is_due):
    saver = RunCheckpointer.__new__(RunCheckpointer)
    saver._position, saver._clock, saver._saved_s = RunPosition(step=6), lambda: now_s, 100.0
    processes = SimpleNamespace(any=lambda what, own: own or others)
    settings = SimpleNamespace(checkpoint=CheckpointConfig(**({"every_steps": 0} | config)))
    saver._system = SimpleNamespace(config=settings, processes=processes)
    assert saver.is_due() == is_due


def test_another_shape_is_told_before_anything_is_made(tiny, two_steps):
    inputs = open_inputs(load(TrainConfig, [tiny]))
    config, checkpoints = load(TrainConfig, [tiny], TRAINED_AFTER), two_steps / CHECKPOINTS
    wider = dataclasses.replace(tiny_run.MODEL, d_ff=64)
    with pytest.raises(StructureMismatchError, match=r"up_FD: expected float32\[64, 16\]"):
        check_can_resume(config, dataclasses.replace(inputs, model=wider), checkpoints)
    check_can_resume(config, inputs, checkpoints)
    check_can_resume(config, inputs, two_steps / "none")  # restoring will say so
