"""Run folders that somebody else has prepared: links in every place, foreign files, odd paths.

Each case ends with an exit code and a sentence; nothing outside of the folder changes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command_runs import call_main

from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.commands import report, train
from reprise.rl.runtime.run_files import OWN_NAMES
from tests.support import tiny_run

SPILLS = ("Speculation.budget='fixed:1'", "Speculation.sources=('history',)")
# What a run writes, beyond the names of its own at the top: (place, whether it is a folder).
INNER_PLACES = {
    ".config.gin.tmp": False,
    "config.gin.tmp": False,
    ".metrics.jsonl.tmp": False,
    ".timeline.json.tmp": False,
    ".newest_checkpoint.tmp": False,
    f".policy.partial-{os.getpid()}": True,
    f".policy.old-{os.getpid()}": True,
    "config.1.gin": False,
    "checkpoints/.lock": False,
    "checkpoints/.working-step_00000002": True,
    "checkpoints/.working-step_00000009": True,
    "checkpoints/.replaced-step_00000001": True,
    "checkpoints/.trash-step_00000000": True,
    "checkpoints/step_00000002": True,
    "checkpoints/step_00000009": True,
    "policy/config.json": False,
    "policy/model.safetensors": False,
    "policy/tokenizer.json": False,
    "policy/tokenizer": True,
}
FOLDERS_AT_THE_TOP = {
    *("wandb", "tensorboard", "report", "checkpoints", "rollouts", "policy"),
    *("drafter", "drafter_model"),
}
PLACES = INNER_PLACES | {name: name in FOLDERS_AT_THE_TOP for name in OWN_NAMES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_run.make_inputs(tmp_path_factory.mktemp("hostile_folder"))


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory):
    """A run of one step out of two, with the policy of an earlier end."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert call(f"--gin_file={tiny}", where(folder), "--gin.Run.steps=1") == 0
    return folder


@pytest.fixture
def victim(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    return outside


def call(*arguments: object) -> int:
    return call_main(train.main, *arguments)


def where(folder: Path) -> str:
    return f"--gin.Run.directory={str(folder)!r}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def one_line(text: str) -> bool:
    return "Traceback" not in text and text.count("error: ") == 1


def put_link(run: Path, place: str, target: Path) -> None:
    path = run / place
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("missing", [False, True], ids=["", "to_nothing"])
@pytest.mark.parametrize("place", [*OWN_NAMES, "checkpoints/.lock"])
def test_a_link_in_place_of_a_runs_own_is_one_line(
    stopped, victim, tmp_path, capfd, place, missing
):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    target = victim if PLACES[place] else victim / "file"
    put_link(run, place, victim / "nothing" if missing else target)
    before = contents(run)
    code = call("--resume", where(run), "--gin.Run.steps=2")
    text = capfd.readouterr().err
    assert contents(victim) == {"file": b"precious"}
    assert sorted(p.name for p in victim.iterdir()) == ["file"]
    # of config.gin the content is looked at first
    assert one_line(text) and ("a link" in text or place == "config.gin")
    assert code == (2 if place in OWN_NAMES else 1)
    if code == 2:
        assert contents(run) == before


@pytest.mark.parametrize("missing", [False, True], ids=["", "to_nothing"])
def test_a_resumed_run_writes_through_no_link_within(stopped, tmp_path, missing):
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(stopped, run)
    victims = {}
    for number, place in enumerate(sorted(INNER_PLACES.keys() - {"checkpoints/.lock"})):
        victims[place] = outside / str(number)
        victims[place].mkdir(parents=True)
        (victims[place] / "file").write_text("precious")
        target = victims[place] if PLACES[place] else victims[place] / "file"
        put_link(run, place, victims[place] / "nothing" if missing else target)
    # another learning rate, so that the leg's configuration is kept as well
    changes = "--gin.Run.steps=2", "--gin.Optimizer.learning_rate=0.02"
    assert call("--resume", where(run), *changes) == 0
    harmed = [p for p, v in victims.items() if contents(v) != {"file": b"precious"}]
    harmed += [p for p, v in victims.items() if [x.name for x in v.iterdir()] != ["file"]]
    assert harmed == []
    assert (run / "policy" / "model.safetensors").is_file()


def test_spilled_rollouts_are_written_through_no_link(tiny, victim, tmp_path):
    run = tmp_path / "run"
    options = [f"--gin.{o}" for o in (*SPILLS, "Rollout.cache_bytes=1", "Run.steps=3")]
    assert call(f"--gin_file={tiny}", where(run), *options) == 0
    spilled = sorted((run / "rollouts").iterdir())
    assert spilled and all(p.is_file() for p in spilled)
    for path in spilled:
        path.unlink()
        path.symlink_to(victim / "file")
    assert call("--resume", where(run), "--gin.Run.steps=5") == 0
    assert contents(victim) == {"file": b"precious"}
    assert not any(p.is_symlink() for p in (run / "rollouts").iterdir())


def test_a_report_is_written_through_no_link(stopped, victim, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    (run / "report").mkdir(exist_ok=True)
    for name in ("index.html", "report.png", ".index.html.tmp"):
        (run / "report" / name).unlink(missing_ok=True)
        (run / "report" / name).symlink_to(victim / "file")
    assert report.main([str(run)]) == 0
    assert contents(victim) == {"file": b"precious"}
    assert (run / "report" / "index.html").read_text().startswith("<!")


def test_a_drafters_checkpoints_are_written_through_no_link(victim, tmp_path):
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    for name in (".working-step_00000001", ".trash-x", ".replaced-x"):
        (tmp_path / "run" / "drafter" / name).symlink_to(victim)
    import jax.numpy as jnp

    with Checkpointer(tmp_path / "run" / "drafter") as saver:
        saver.save(1, {"x": jnp.ones(2)})
    assert contents(victim) == {"file": b"precious"}
    assert {"drafter", "drafter_model"} <= set(OWN_NAMES)


# --- folders that are no run's ----------------------------------------------------------


def test_a_folder_of_the_users_own_is_refused_and_stays_as_it_is(tiny, tmp_path, capsys):
    own = tmp_path / "own"
    (own / "policy").mkdir(parents=True)
    (own / "checkpoints" / "step_00000000").mkdir(parents=True)
    (own / "checkpoints" / ".working-x").write_text("mine")
    (own / "config.gin").write_text(tiny.read_text())
    (own / "policy" / "model-extra.safetensors").write_text("mine")
    before = contents(own)
    for arguments in (
        (f"--gin_file={tiny}",),
        (f"--gin_file={own / 'config.gin'}",),
        (f"--gin_file={tiny}", "--dry_run"),
    ):
        assert call(*arguments, where(own)) == 2
        assert one_line(capsys.readouterr().err)
    assert contents(own) == before
    for path in ("checkpoints/step_00000000", "checkpoints"):
        shutil.rmtree(own / path)
    assert call(f"--gin_file={tiny}", where(own)) == 2
    assert "holds what is no run's (config.gin, policy)" in capsys.readouterr().err
    assert call("--resume", where(own)) == 2
    assert "holds a config.gin, but no run" in capsys.readouterr().err


def test_a_policy_inside_the_run_is_refused(tiny, stopped, tmp_path, capsys):
    run = tmp_path / "run"
    policy = f"--gin.Policy.directory={str(run / 'policy')!r}"
    shutil.copytree(tiny.parent / "policy", run / "policy")
    before = contents(run)
    assert call(f"--gin_file={tiny}", where(run), policy) == 2
    assert "lies in the run's own folder" in capsys.readouterr().err
    assert contents(run) == before


ODD_DIRECTORIES = {
    "a file": ("file", "is a file"),
    "under a file": ("file/run", "is a file"),
    "NUL": ("a\0b", "NUL"),
    "a bucket": ("gs://bucket/run", "mounted file system"),
    "a link to nothing": ("dangling", "a link to nothing"),
    "a name too long": ("x" * 300, "too long"),
}


@pytest.mark.parametrize("dry", [(), ("--dry_run",)], ids=["", "dry_run"])
@pytest.mark.parametrize("case", ODD_DIRECTORIES)
def test_an_impossible_directory_is_one_line(tiny, tmp_path, capsys, monkeypatch, case, dry):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    directory, message = ODD_DIRECTORIES[case]
    assert call(f"--gin_file={tiny}", f"--gin.Run.directory={directory!r}", *dry) == 2
    text = capsys.readouterr().err
    assert message in text and one_line(text)
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("dry", [(), ("--dry_run",)], ids=["", "dry_run"])
def test_a_folder_that_cannot_be_written_is_one_line(tiny, tmp_path, capsys, monkeypatch, dry):
    # root may write anywhere, so that permissions alone would not show it
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert call(f"--gin_file={tiny}", where(tmp_path / "run"), *dry) == 2
    text = capsys.readouterr().err
    assert "cannot be written to" in text and one_line(text)
    assert not (tmp_path / "run").exists()
