"""Questions of a custom loop: their order, their rewards, and evaluations as in `rl.train`."""

from __future__ import annotations

import json

import pytest
from command_runs import call_main

from reprise.rl.commands import evaluate
from reprise.rl.gin.loader import load
from reprise.rl.python.api import Policy
from reprise.rl.python.questions import Questions
from reprise.rl.settings.config import TrainConfig
from tests.support import tiny_run

EVAL = ("Eval.num_prompts=4", "Eval.samples=2", "Eval.temperature=1.0")


def open_policy(tiny, *settings):
    return Policy(load(TrainConfig, [tiny]).policy.directory, *settings, files=[str(tiny)])


@pytest.fixture(scope="module")
def policy(tiny):
    task = tiny.parent / "task.jsonl"
    return open_policy(tiny, *EVAL, f"Eval.sets=('own=jsonl:{task}',)")


@pytest.fixture(scope="module")
def questions(policy):
    with Questions(policy) as questions:
        yield questions


def test_batches_are_the_epochs_of_a_run_in_pieces(policy, questions):
    assert len(questions) == len(tiny_run.PROMPTS)
    epochs = [questions.batch(0, 6), questions.batch(1, 6)]
    for epoch in epochs:
        texts = [policy.tokenizer.decode(question.prompt) for question in epoch]
        assert sorted(texts) == sorted(tiny_run.PROMPTS)
    both = [question.example_id for epoch in epochs for question in epoch]
    assert both[:6] != both[6:], "each epoch has an order of its own"
    pieces = [question.example_id for step in range(3) for question in questions.batch(step, 4)]
    assert pieces == both
    assert questions.batch(2, 4)[0].answer == epochs[1][2].answer


def test_rewards_are_those_of_the_function(questions, policy):
    batch = questions.batch(0, 3)
    groups = policy.sample([question.prompt for question in batch], n=4, seed=0)
    wanted = [[sum(c.isdigit() for c in s.text) / max(1, len(s.text)) for s in g] for g in groups]
    assert questions.rewards(batch, groups) == [pytest.approx(row) for row in wanted]
    assert questions.failures() == {"rewards/digits/failures": 0.0}
    with pytest.raises(ValueError, match="a group of samples for each of 3 questions, got 2"):
        questions.rewards(batch, groups[:2])
    with pytest.raises(ValueError, match="a step of 0 or more and a size above 0, got -1, 4"):
        questions.batch(-1, 4)


def test_a_function_may_score_groups_and_fail(tiny):
    policy = open_policy(
        tiny, tiny_run.rewarded(tiny, "always"), "Reward.on_failure='skip'", "Reward.per='group'"
    )
    with Questions(policy) as questions:
        batch = questions.batch(0, 2)
        groups = policy.sample([question.prompt for question in batch], n=3, seed=0)
        assert questions.rewards(batch, groups) == [[None] * 3] * 2
        assert questions.failures()["rewards/always/failures"] == 6.0
        with pytest.raises(ValueError, match=r"no set to evaluate: Eval.num_prompts is 0"):
            questions.evaluate(policy)


def test_a_set_that_is_missing_is_named(tiny, capsys):
    policy = open_policy(tiny, "Eval.num_prompts=4")  # of a file, without a set
    questions = Questions(policy)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluation: ") and "Eval.sets" in line
    with pytest.raises(ValueError, match="no set to evaluate: .*Eval.sets"):
        questions.evaluate(policy)


def test_prompts_of_data_that_are_not_checked_before_are_left_out_if_too_long(tiny):
    settings = "Task.stream_above_examples=1", "Rollout.max_prompt_tokens=4"
    questions = Questions(open_policy(tiny, *settings))
    assert len(questions) == len(tiny_run.PROMPTS), "none is looked at before"
    epoch = questions.batch(0, 6)
    short = [prompt for prompt in tiny_run.PROMPTS if len(prompt) <= 4]
    assert len(epoch) == len(short) < 6
    assert all(len(question.prompt) <= 4 for question in epoch)


def test_an_evaluation_is_that_of_the_command(tiny, policy, questions, tmp_path):
    output = tmp_path / "found.json"
    flags = [f"--gin.{setting}" for setting in EVAL]
    flags += [f"--gin.Eval.sets=('own=jsonl:{tiny.parent / 'task.jsonl'}',)"]
    folder = policy.config.policy.directory
    command = f"--policy={folder}", f"--gin_file={tiny}", *flags, f"--output={output}"
    assert call_main(evaluate.main, *command) == 0
    wanted = json.loads(output.read_text())["sets"]["own"]
    found = questions.evaluate(policy)
    for figure in ("mean_reward", "pass@2", "mean_length"):
        assert found[f"eval/own/{figure}"] == wanted[figure], figure
    assert questions.evaluate(policy.sampler()) == found, "the noise does not change"
