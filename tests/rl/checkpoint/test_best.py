"""The best step: recorded once its checkpoint is whole, and read with suspicion."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import pytest
from whole_steps import whole_steps

from reprise.models.folder import Folder
from reprise.rl.checkpoint import folders, reader
from reprise.rl.checkpoint.best import Best, BestRecord, chosen_step, read_best
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.config import CheckpointConfig


@pytest.fixture
def run(tmp_path):
    """A run folder with (empty) checkpoints of steps 2, 4 and 6."""
    for step in (2, 4, 6):
        folders.step_folder(tmp_path / "checkpoints", step).mkdir(parents=True)
    return tmp_path


def best(step, value):
    return Best(step, "eval/mean_reward", value)


def test_a_step_is_the_best_once_its_checkpoint_is_whole(run):
    record = BestRecord(Folder(run), "same")
    assert not record.begin(0, [])
    assert read_best(run) is None
    record.found(best(8, 0.5))
    assert record.best == best(8, 0.5) and read_best(run) is None and record.spared() == {8}
    record.committed(7)
    assert read_best(run) is None
    record.committed(8)
    assert read_best(run) == best(8, 0.5)
    record.found(best(9, 0.75))
    assert record.spared() == {8, 9}, "the former one stays until the new one is whole"
    record.committed(9)
    assert record.spared() == {9} and read_best(run) == best(9, 0.75)


def test_a_resumed_run_takes_the_best_that_stands_and_none_of_other_questions(run):
    BestRecord(Folder(run), "same").begin(0, [])
    evaluated = [best(2, 0.25), best(3, 0.875), best(4, 0.5), best(6, 0.75)]
    record = BestRecord(Folder(run), "same")
    assert record.begin(5, evaluated)  # step 3 has no checkpoint, step 6 will be done again
    assert record.best == read_best(run) == best(4, 0.5)
    other = BestRecord(Folder(run), "other")
    assert not other.begin(5, evaluated)
    assert other.best is None and read_best(run) is None and other.spared() == set()


def test_of_equal_steps_the_first_is_the_best(run):
    BestRecord(Folder(run), "same").begin(0, [])
    record = BestRecord(Folder(run), "same")
    record.begin(6, [best(2, 0.5), best(4, 0.5)])
    assert record.best == best(2, 0.5)


def test_the_best_step_is_not_pruned(run):
    BestRecord(Folder(run), "same").begin(0, [])
    folder = Folder(run / "checkpoints")
    folders.retire(folder, 1, spared={2})
    assert folders.list_steps(folder) == [6, 2]


def test_a_best_step_that_is_older_keeps_the_policy_alone(tmp_path):
    def arrays(step):
        return {"params": jnp.full(3, float(step)), "opt": {"mu": jnp.full(5, float(step))}}

    light = {"spared": lambda: {1, 3}, "light": ("['opt']",)}
    with Checkpointer(tmp_path, CheckpointConfig(keep=1), **light) as saver:
        for step in (1, 2, 3):
            saver.save(step, arrays(step))
        saver.wait()
        assert whole_steps(tmp_path) == [3], "a state that can be resumed"
    policy = reader.restore(tmp_path, {"params": jnp.zeros(3)}, 1, subset=True)
    assert policy.arrays["params"].tolist() == [1.0] * 3
    left = [path.name for path in (tmp_path / "step_00000001" / "arrays").iterdir()]
    assert not any("opt" in name for name in left)
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(reader.NoWholeCheckpointError, match="the policy alone, kept as the best"):
        reader.restore(tmp_path, arrays(0))
    (tmp_path / "step_00000001" / "arrays" / "['opt']_of_a_kill").write_text("x")
    assert reader.problems_of(tmp_path, 1, subset=True) == ([], []), "not deleted yet"


def test_steps_are_chosen_by_number_and_by_name(run):
    assert chosen_step(run, "newest") is None
    assert chosen_step(run, "4") == 4
    with pytest.raises(ValueError, match="records no best step"):
        chosen_step(run, "best")
    record = BestRecord(Folder(run), "same")
    record.begin(6, [])
    record.found(best(4, 0.5))
    assert chosen_step(run, "best") == 4
    for wrong, message in (("5", r"expected one of \[6, 4, 2\]"), ("last", "newest or best")):
        with pytest.raises(ValueError, match=message):
            chosen_step(run, wrong)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"best": null}',
        '{"asked": "x", "best": 4}',
        '{"asked": "x", "best": {"step": "../..", "metric": "m", "value": 1}}',
        '{"asked": "x", "best": {"step": -1, "metric": "m", "value": 1}}',
        '{"asked": "x", "best": {"step": true, "metric": "m", "value": 1}}',
        '{"asked": "x", "best": {"step": 4, "metric": "m", "value": NaN}}',
        json.dumps({"asked": "x", "best": {"step": 4, "metric": "m", "value": 1, "more": 2}}),
    ],
)
def test_a_record_that_no_run_writes_is_one_error(run, content):
    (run / "evaluation.json").write_text(content)
    with pytest.raises(ValueError, match=r"evaluation\.json.*delete the file"):
        read_best(run)
