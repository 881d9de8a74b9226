"""Countdown: true equations, questions apart, and the reward by hand."""

import dataclasses
import json
import random
import re
from collections import Counter

import pytest

from configs.rewards.countdown import OPERATIONS, reaches, score
from policies.make import countdown
from reprise.models.formats import hf
from reprise.models.text import tokenizer

TINY = countdown.Settings(steps=2, drill_steps=1, step_examples=8, max_new_tokens=4)
TINY = dataclasses.replace(TINY, num_layers=1, d_model=64, d_ff=64)
QUESTION = countdown.Question(22, (3, 5, 7))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3*5=15 15+7=22\n#### 3*5=15 15+7=22", 1.0),
        ("#### 5*3=15 7+15=22", 1.0),
        ("3*5=15 15+7=22", 1.0),  # the mark is of use to a reader alone
        ("#### 3*5=15", 0.0),
        ("#### 3*5=16 16+7=23", 0.0),
        ("#### 3*5=15 15+7=23", 0.0),
        ("#### 3*7=21 21+1=22", 0.0),
        ("#### 15+7=22", 0.0),
        ("#### 3+7=10 10+5=15", 0.0),
        ("#### 22", 0.0),
        ("#### ", 0.0),
        ("#### 3*5=15 15+7=22 .", 0.0),
    ],
)
def test_the_reward_by_hand(text, reward):
    assert score([text], [[3, 5, 7]], [22], prompts=["x"]) == [reward]


def test_a_response_is_true_tries_until_one_reaches_the_target():
    rng, lengths = random.Random(0), Counter()
    for _ in range(200):
        *lines, last = countdown.response(QUESTION, rng).split("\n")
        *others, reached = lines
        assert reached.endswith("=22:22!") and all(line.endswith(":22") for line in others)
        tries = [line.removesuffix("!").removesuffix(":22") for line in lines]
        for equation in " ".join(tries).split():
            first, sign, second, result = re.findall(r"\d+|[-+*]", equation)
            assert OPERATIONS[sign](int(first), int(second)) == int(result)
        hits = [reaches(text, (3, 5, 7), 22) for text in tries]
        assert hits == [False] * len(others) + [True]
        assert last == f"#### {tries[-1]}"
        lengths[len(lines)] += 1
    # two of the 36 tries reach it: 18 tries are the mean, with a standard error of 1.24
    assert 13 < sum(n * count for n, count in lengths.items()) / 200 < 23


def test_chances_to_reach_and_to_give_up():
    rng = random.Random(0)
    certain = countdown.response(QUESTION, rng, hit=1.0)
    assert certain.count("\n") == 1 and reaches(certain, (3, 5, 7), 22)
    wrong = [countdown.response(QUESTION, rng, give_up=1.0) for _ in range(100)]
    assert all(text.count("\n") == 1 for text in wrong)
    assert sum(not reaches(text, (3, 5, 7), 22) for text in wrong) > 80


def test_every_question_has_an_answer_and_those_of_tests_are_others():
    train, test = countdown.questions()
    assert (train, test) == countdown.questions() and len(test) == countdown.NUM_TEST
    assert len({*train, *test}) == len(train) + len(test)
    for question in [*train, *test]:
        values = [one.value for one in countdown.tries(question.numbers)]
        assert values.count(question.target) >= 2 and max(values) <= 99


def test_the_recipe_writes_a_policy_and_its_questions(tmp_path):
    countdown.make(tmp_path, TINY)
    model, _ = hf.load_pretrained(tmp_path)
    tok = tokenizer.load(tmp_path)
    tokenizer.check_vocabulary(tok, model)
    train, test = countdown.questions()
    for name, wanted in {"train": train, "few": train[:16], "test": test}.items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        found = [countdown.Question(r["target"], tuple(r["numbers"])) for r in rows]
        answers = [r["answer"] for r in rows]
        given = [r["numbers"] for r in rows]
        assert all(score(answers, given, [r["target"] for r in rows]))
        assert found == wanted and [r["prompt"] for r in rows] == [q.prompt for q in wanted]
        assert all(tok.decode(tok.encode(r["prompt"])) == r["prompt"] for r in rows[:20])
    report = json.loads((tmp_path / "warmstart.json").read_text())
    assert report["reward"] == 0 and report["longest_tokens"] == TINY.max_new_tokens
