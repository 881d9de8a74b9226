"""pass@k against enumeration, the choice of questions, and the command on folders and runs."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import pytest

from benchmarks import tiny_run
from models import hf, tokenizer
from rl import evaluate
from rl.config.loader import load
from rl.data.tasks import Example
from rl.loop import evaluation
from rl.loop.evaluation import EvalResponse, EvaluateConfig, EvaluationConfig, pass_at_k, summarise
from rl.loop.experiment import Inputs, TrainConfig, open_inputs
from rl.loop.train_loop import policy_params


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A finished run of one step, with its policy exported."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.gin").write_text(tiny.read_text())
    state = tiny_run.train(tiny, folder, "Run.steps=1")
    hf.save_pretrained(folder / "policy", tiny_run.MODEL, policy_params(state))
    tokenizer.save_character_tokenizer(folder / "policy", tiny_run.CHARACTERS)
    return folder


# --- pass@k -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased():
    n, p = 5, 0.3
    for k in (1, 2, 5):
        mean = math.fsum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="expected 0 ≤ correct ≤ samples"):
        pass_at_k(n, c, k)


def test_the_powers_of_two_are_the_default_ks():
    assert EvaluateConfig(samples=8).all_ks == (1, 2, 4, 8)
    assert EvaluateConfig(samples=7).all_ks == (1, 2, 4)
    assert EvaluateConfig(samples=7, ks=(1, 7)).all_ks == (1, 7)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"num_prompts": 0}, {"seed": -1}, {"samples": 4, "ks": (1, 8)}]
)
def test_the_section_refuses_what_cannot_be(wrong):
    with pytest.raises(ValueError, match="must be"):
        EvaluateConfig(**wrong)


def test_a_summary_by_hand():
    responses = [
        EvalResponse("t", 0, 1.0, 4, False, False),
        EvalResponse("t", 0, 0.5, 8, True, False),
        EvalResponse("t", 1, 0.0, 6, False, False),
        EvalResponse("t", 1, None, 6, False, True),  # not scored: not correct, not in the mean
    ]
    assert summarise(responses, EvaluateConfig(samples=2)) == {
        "prompts": 2,
        "mean_reward": 0.5,
        "pass_at_k": {"1": 0.25, "2": 0.5},
        "mean_length_tokens": 6.0,
        "truncated_share": 0.25,
        "reward_failures": 1,
    }
    lower = summarise(responses, EvaluateConfig(samples=2, correct_at=0.5))
    assert lower["pass_at_k"] == {"1": 0.5, "2": 0.5}


# --- what is asked ----------------------------------------------------------------------


def example(task, prompt, i=0):
    return Example(f"{task}#{i}", prompt, None, {}, task)


def inputs_of(*examples):
    return Inputs(None, tiny_run.MODEL, None, examples, 0)


def test_questions_of_training_are_left_out_and_repeats_count_once(tiny):
    training = load(TrainConfig, [tiny])
    examples = [example("a", p) for p in ("1+1=", "9+9=", "9+9=", "8+8=", "7=", "6+6=")]
    found = evaluation.choose(inputs_of(*examples), EvaluateConfig(num_prompts=2), training)
    assert [e.prompt for e in found.examples] == ["9+9=", "8+8="]
    assert found.seen == {"a": 0}


def test_a_task_of_which_training_saw_all_is_asked_all_the_same_and_counted(tiny):
    training = load(TrainConfig, [tiny])
    examples = [example("small", "1+1="), example("large", "9="), example("large", "7=")]
    found = evaluation.choose(inputs_of(*examples), EvaluateConfig(), training)
    assert {(e.task, e.prompt) for e in found.examples} == {("small", "1+1="), ("large", "9=")}
    assert found.seen == {"large": 0, "small": 1}


def test_without_a_run_nothing_is_left_out(tiny):
    examples = [example("a", "1+1="), example("a", "7=")]
    assert len(evaluation.choose(inputs_of(*examples), EvaluateConfig(), None).examples) == 2


def test_generated_questions_come_from_another_seed_than_trainings(tiny):
    specs = ("Task.specs=('reasoning_gym:gcd',)", "Task.size=50")
    limits = ("Rollout.max_prompt_tokens=500", "Policy.directory='policies/tiny'")
    training = load(TrainConfig, [tiny], (*specs, *limits))
    config = load(EvaluationConfig, [tiny], (*specs, *limits, "Evaluate.num_prompts=40"))
    asked = evaluation.as_evaluation(config, "policies/tiny")
    found = evaluation.choose(open_inputs(asked), asked.evaluate, training)
    trained = {e.prompt for e in map(open_inputs(training).task.__getitem__, range(50))}
    assert len(found.examples) == 40
    assert not trained & {e.prompt for e in found.examples}


# --- the command ------------------------------------------------------------------------

SMALL = ("--gin.Evaluate.samples=2", "--gin.Sampling.temperature=0.8")


def figures(capsys, *arguments):
    assert evaluate.main([*arguments, *SMALL, "--json"]) == 0
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def test_a_run_and_the_policy_that_it_exported_give_the_same_figures(run, tiny, tmp_path, capsys):
    output = tmp_path / "figures.json"
    of_run, out = figures(capsys, "--run", str(run), "--output", str(output))
    assert json.loads(output.read_text()) == of_run
    assert of_run["checkpoint_step"] == 1
    assert of_run["policy"] == str(run)
    assert of_run["sampling"]["max_new_tokens"] == 8  # the run's own
    assert of_run["sampling"]["temperature"] == 0.8  # the command's
    ((task, row),) = of_run["tasks"].items()
    assert task in out and "pass@2" in out and f"{row['mean_reward']:.3f}" in out
    assert (row["prompts"], row["seen_in_training"]) == (6, 6)
    assert "TRAINING SAW all that there are of" in out

    of_policy, _ = figures(capsys, "--run", str(run), "--policy", str(run / "policy"))
    assert of_policy["checkpoint_step"] is None
    assert of_policy["overall"] == of_run["overall"]
    at_the_start, _ = figures(capsys, "--run", str(run), "--policy", str(tiny.parent / "policy"))
    assert at_the_start["overall"] != of_run["overall"]


def test_the_newest_checkpoint_damaged(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").rglob("manifest.json"):
        file.unlink()
    assert evaluate.main(["--run", str(tmp_path / "run")]) == 2
    assert "expected a whole checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --policy DIR (a Hugging Face folder) or --run RUN, got neither"),
        (["--run", "no/such/run"], "found no config.gin in no/such/run"),
        (["--policy", "no/such/policy"], "no/such/policy"),
        (["--policy", "policies/tiny", "--output", "no/such/folder/x.json"], "no folder"),
        (["--policy", "policies/tiny", "--gin.Evaluate.sample=3"], "Did you mean Evaluate.samples"),
        (["--policy", "policies/tiny", "--gin.Evaluate.ks=(64,)"], "raise samples"),
    ],
)
def test_errors_are_said_before_any_work(arguments, message, capsys):
    assert evaluate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_flag_has_its_nearest_match(capsys):
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--polcy", "x"])
    assert left.value.code == 2
    assert "--policy" in capsys.readouterr().err
