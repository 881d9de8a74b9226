"""What may start or go on in a folder, and what is written down of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.metrics.writer import MetricsConfig, MetricsWriter
from reprise.rl.runtime.run_files import CHECKPOINTS, CONFIG_FILE, MARKER_FILE, NEWEST_FILE
from reprise.rl.settings import run_folder
from reprise.rl.settings.config import TrainConfig
from reprise.spec.round_times import RoundTimes
from tests.support import tiny_run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_run.make_inputs(tmp_path_factory.mktemp("run_start"))


@pytest.fixture
def config(tiny, tmp_path):
    return load(TrainConfig, [tiny], [f"Run.directory={str(tmp_path / 'run')!r}"])


@pytest.fixture
def run(config, tmp_path):
    """A run's folder after two steps, with a checkpoint of the second."""
    folder = tmp_path / "run"
    run_folder.begin(config, None).close()
    with MetricsWriter(folder, MetricsConfig(tensorboard=False)) as metrics:
        for step in (1, 2):
            metrics.write_samples(step, [{"prompt": "p"}])
            metrics.write(step, {"reward": 0.5})
    with Checkpointer(folder / CHECKPOINTS) as saver:
        saver.save(2, {"x": jnp.ones(2)})
    (folder / NEWEST_FILE).write_text("2\n")
    return folder


def files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def changed(config: TrainConfig, section: str, **fields) -> TrainConfig:
    part = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: part})


EXPERIMENT = [
    ("run", {"seed": 1}),
    ("task", {"specs": ("reasoning_gym:gcd",)}),
    ("reward", {"functions": ("exact_match",)}),
    ("policy", {"directory": "policies/tiny"}),
    ("algorithm", {"name": "rloo"}),
    ("sampling", {"temperature": 0.5}),
    ("reuse", {"mode": "coupled"}),
    ("rollout", {"group_size": 2}),
    ("sched", {"mode": "pipeline"}),
]
HOW = [
    ("run", {"steps": 9}),
    ("reward", {"workers": 4}),
    ("optimizer", {"learning_rate": 1e-3}),
    ("rollout", {"cache_bytes": 100}),
    ("speculation", {"budget": "fixed:2"}),
    ("engine", {"slots": 16}),
    ("checkpoint", {"keep": 5}),
]


@pytest.mark.parametrize(("section", "fields"), EXPERIMENT)
def test_another_experiment_is_refused_unless_told(config, section, fields):
    (field,) = fields
    found = run_folder.changes(config, changed(config, section, **fields))
    assert [change.field for change in found] == [f"{section.title()}.{field}"]
    with pytest.raises(ConfigError, match=rf"another experiment.*{field}: .* → .*allow_changes"):
        run_folder.refuse_another_experiment(found, allow=False)
    run_folder.refuse_another_experiment(found, allow=True)


@pytest.mark.parametrize(("section", "fields"), HOW)
def test_other_changes_are_named_and_may_be(config, section, fields):
    found = run_folder.changes(config, changed(config, section, **fields))
    assert [change.field for change in found] == [f"{section.title()}.{f}" for f in fields]
    run_folder.refuse_another_experiment(found, allow=False)


def test_the_folder_is_no_change(config):
    assert run_folder.changes(config, changed(config, "run", directory="elsewhere")) == []


def test_the_configuration_of_each_leg_is_kept(config, run):
    second = changed(config, "run", steps=5)
    third = changed(second, "optimizer", learning_rate=1e-3)
    for before, now in ((config, second), (second, second), (second, third)):
        run_folder.begin(now, before).close()
        assert load(TrainConfig, [run / CONFIG_FILE]) == now
    assert sorted(p.name for p in run.glob("*.gin")) == [
        "config.1.gin",
        "config.2.gin",
        "config.gin",
    ]
    assert load(TrainConfig, [run / "config.1.gin"]) == config
    assert load(TrainConfig, [run / "config.2.gin"]) == second
    assert (run / "config.1.gin").read_text().startswith("# Leg 1 of this run; its steps: up to 2")


def test_a_schedule_that_other_steps_stretch_is_named(config):
    linear = changed(config, "optimizer", schedule="linear")
    more = changed(linear, "run", steps=9)
    [text] = run_folder.remarks(run_folder.changes(linear, more), more)
    assert "Optimizer.schedule='linear' now ends at step 9" in text
    constant = changed(more, "optimizer", schedule="constant")
    assert run_folder.remarks(run_folder.changes(more, constant), constant) == []
    assert run_folder.remarks(run_folder.changes(config, constant), constant) == []


# --- folders ----------------------------------------------------------------------------


def test_a_new_folder_an_empty_one_and_a_run_without_a_step_may_start(config, tmp_path):
    for prepare in (lambda: None, lambda: (tmp_path / "run").mkdir(exist_ok=True)):
        prepare()
        assert run_folder.check(config, resume=False) == tmp_path / "run"
    for _ in range(2):
        run_folder.begin(config, None).close()
    assert sorted(files(tmp_path / "run")) == [MARKER_FILE, CONFIG_FILE]


def test_checking_writes_nothing(config, tmp_path):
    run_folder.check(config, resume=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lost", [MARKER_FILE, "metrics.jsonl"])
def test_a_folder_that_holds_a_run_is_refused(config, run, lost):
    (run / lost).unlink()
    with pytest.raises(ConfigError, match="holds a run already.*--resume"):
        run_folder.check(config, resume=False)


def test_a_second_process_changes_nothing(config, run):
    before = files(run)
    script = (
        "import sys\nfrom reprise.rl.settings import run_folder\n"
        "from reprise.rl.gin.loader import load\n"
        "from reprise.rl.settings.config import TrainConfig\n"
        "config = load(TrainConfig, [sys.argv[1]])\n"
        "run_folder.begin(load(TrainConfig, [sys.argv[1]], ['Run.steps=9']), config)"
    )
    command = [sys.executable, "-c", script, str(run / CONFIG_FILE)]
    with run_folder.begin(config, config):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tiny_run.ROOT)
        assert "ConfigError: another process is running in" in done.stderr
        assert files(run) == before
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny_run.ROOT)
    assert done.returncode == 0, done.stderr
    assert "Run.steps = 9" in (run / CONFIG_FILE).read_text()


@pytest.mark.parametrize("lost", ["steps", "folder", "folder and note"])
def test_rows_are_not_given_up_where_checkpoints_are_gone(config, run, lost):
    (run / CHECKPOINTS).rename(run.parent / "unmounted")
    if lost == "steps":
        (run / CHECKPOINTS).mkdir()
    if lost == "folder and note":
        (run / NEWEST_FILE).unlink()
    before = files(run)
    with pytest.raises(
        ConfigError, match="metrics of 2 steps.*is gone.*bring it back.*again in an"
    ):
        run_folder.begin(config, config)
    assert files(run) == before
    (run / CHECKPOINTS).rmdir() if lost == "steps" else None
    (run.parent / "unmounted").rename(run / CHECKPOINTS)
    run_folder.begin(config, config).close()


def test_a_run_killed_before_its_first_checkpoint_counted_may_go_on(config, run):
    (run / NEWEST_FILE).unlink()
    with Checkpointer(run / CHECKPOINTS) as saver:
        saver._folder.remove("step_00000002")
    run_folder.begin(config, config).close()


def test_a_finished_run_is_known_by_what_it_left(config, run):
    assert not run_folder.is_finished(run, config)
    (run / "policy").mkdir()
    assert not run_folder.is_finished(run, config)  # 2 of 3 steps
    assert run_folder.is_finished(run, changed(config, "run", steps=2))
    (run / CHECKPOINTS / "step_00000002" / "manifest.json").unlink()
    assert not run_folder.is_finished(run, changed(config, "run", steps=2))


# --- files that a resumed run reads ------------------------------------------------------

MADE_FOR = {"workers": 1}
DAMAGED_TIMES = {
    "not JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "no rows": json.dumps({"made_for": MADE_FOR}),
    "NaN": [["packed round", 4, 1, 64, float("nan")]],
    "infinite": [["packed round", 4, 1, 64, float("inf")]],
    "zero": [["packed round", 4, 1, 64, 0.0]],
    "negative": [["packed round", 4, 1, 64, -1e-3]],
    "whole seconds": [["packed round", 4, 1, 64, 1]],
    "text": [["packed round", 4, 1, 64, "0.1"]],
    "too long": [["packed round", 4, 1, 64, 1e300]],
    "no count": [["packed round", True, 1, 64, 0.1]],
    "negative count": [["packed round", 4, -1, 64, 0.1]],
    "short row": [["packed round", 4, 1, 64]],
    "rows of nothing": [None],
}


@pytest.mark.parametrize("case", DAMAGED_TIMES)
def test_damaged_seconds_of_rounds_are_refused(config, run, case):
    content = DAMAGED_TIMES[case]
    if not isinstance(content, str):
        content = json.dumps({"made_for": MADE_FOR, "rows": content}).replace("Infinity", "1e999")
    (run / "round_times.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"round_times.json is damaged .*delete it to measure anew"
    ):
        run_folder.check(config, resume=True)
    good = RoundTimes({(4, 4, 64): 0.01}, {"learned": {(4, 1, 64): 0.02}})
    (run / "round_times.json").write_text(json.dumps({"made_for": MADE_FOR, "rows": good.rows()}))
    run_folder.check(config, resume=True)


def test_damaged_seconds_of_steps_are_refused(config, run):
    (run / "step_seconds.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"step_seconds.jsonl is not what a run wrote .*delete it"):
        run_folder.check(config, resume=True)
    (run / "step_seconds.jsonl").write_text("{")  # killed while it was written
    run_folder.check(config, resume=True)


@pytest.mark.parametrize("row", ["{", "[1]", '{"reward": 1}', '{"step": 1.5}', "[" * 100_000])
def test_a_damaged_row_is_named(config, run, row):
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([row, *rows[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1: damaged row"):
        run_folder.check(config, resume=True)


def test_the_configuration_is_read_as_it_was_written(config, run):
    assert (run / CONFIG_FILE).read_text() == dump(config)
