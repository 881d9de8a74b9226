"""The command on folders and runs."""

from __future__ import annotations

import json
import shutil

import pytest

from policies.make.characters import save_character_tokenizer
from reprise.models.formats import hf
from reprise.rl.checkpoint.best import read_best
from reprise.rl.commands import evaluate
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.weights.gathering import host_copy
from tests.support import tiny_run


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A finished run of two steps, evaluated as it trained, with its policy exported."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.gin").write_text(tiny.read_text())
    asked = ("Eval.num_prompts=3", f"Eval.sets=('own=jsonl:{tiny.parent / 'task.jsonl'}',)")
    state = tiny_run.train(tiny, folder, "Run.steps=2", *asked, "Eval.every_steps=1")
    hf.save_pretrained(folder / "policy", tiny_run.MODEL, host_copy(state.params))
    save_character_tokenizer(folder / "policy", tiny_run.CHARACTERS)
    return folder


# --- the command ------------------------------------------------------------------------

SMALL = ("--gin.Eval.num_prompts=6", "--gin.Eval.samples=2", "--gin.Eval.temperature=0.8")


def figures(capsys, *arguments):
    assert evaluate.main([*arguments, *SMALL, "--json"]) == 0
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_a_run_and_the_policy_that_it_exported_give_the_same_figures(run, tiny, tmp_path, capsys):
    output = tmp_path / "figures.json"
    of_run, out = figures(capsys, "--run", str(run), "--output", str(output))
    assert json.loads(output.read_text()) == of_run
    assert of_run["checkpoint_step"] == 2
    assert of_run["policy"] == str(run)
    assert of_run["sampling"]["max_new_tokens"] == 8  # the run's own
    assert of_run["sampling"]["temperature"] == 0.8  # the command's
    ((name, row),) = of_run["sets"].items()
    assert name in out and "pass@2" in out and f"{row['mean_reward']:.3f} ± " in out
    assert row["mean_reward_low"] < row["mean_reward"] < row["mean_reward_high"]
    assert (row["questions"], row["seen_in_training"]) == (6, 6)
    assert "TRAINING SAW 6 of 6 of task" in out

    of_policy, _ = figures(capsys, "--run", str(run), "--policy", str(run / "policy"))
    assert of_policy["checkpoint_step"] is None
    assert of_policy["overall"] == of_run["overall"]
    at_the_start, _ = figures(capsys, "--run", str(run), "--policy", str(tiny.parent / "policy"))
    assert at_the_start["overall"] != of_run["overall"]


def test_any_kept_step_is_evaluated_as_it_was_in_the_run(run, tiny, capsys):
    """The same questions, weights and noise give the figures that the run wrote down."""
    rows = {row["step"]: row for row in read_metrics(run)}
    best = read_best(run).step
    asked = f"--gin.Eval.sets=('own=jsonl:{tiny.parent / 'task.jsonl'}',)"
    for step, wanted in (("1", 1), ("2", 2), ("best", best)):
        arguments = ["--run", str(run), "--step", step, asked, "--gin.Eval.num_prompts=3", "--json"]
        assert evaluate.main(arguments) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["checkpoint_step"] == wanted
        for name, value in found["overall"].items():
            assert rows[wanted][f"eval/{name}"] == value


def test_the_newest_checkpoint_damaged(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").rglob("manifest.json"):
        file.unlink()
    assert evaluate.main(["--run", str(tmp_path / "run"), SMALL[0]]) == 2
    assert "expected a whole checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --policy DIR (a Hugging Face folder) or --run RUN, got neither"),
        (["--run", "no/such/run"], "found no config.gin in no/such/run"),
        (["--policy", "no/such/policy"], "no/such/policy"),
        (["--policy", "policies/tiny", "--output", "no/such/folder/x.json"], "no folder"),
        (["--policy", "policies/tiny", "--gin.Eval.num_prompts=0"], "which evaluates nothing"),
        (["--policy", "policies/tiny", "--step", "best"], "--step: expected a --run"),
    ],
)
def test_errors_are_said_before_any_work(arguments, message, capsys):
    assert evaluate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_reward_that_cannot_be_called_is_found_before_weights_are_loaded(
    run, tiny, monkeypatch, capsys
):
    monkeypatch.setattr(evaluate, "_weights", lambda *_: pytest.fail("they were loaded"))
    wrong = f"--gin.Reward.functions=('{tiny.parent / 'reward.py'}:digit',)"
    assert evaluate.main(["--run", str(run), *SMALL, wrong]) == 2
    assert "digits" in capsys.readouterr().err
