"""Countdown: true equations, questions apart, the reward by hand; grown policies are the same."""

import dataclasses
import json
import random
import re
from collections import Counter

import jax
import numpy as np
import pytest

from configs.rewards.countdown import OPERATIONS, reaches, score
from models import hf, tokenizer, transformer
from models.config import ModelConfig, num_params
from policies.make import countdown, grow

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
    assert score([text], [[3, 5, 7]], ["22"], prompts=["x"]) == [reward]


def test_a_response_is_true_tries_until_one_reaches_the_target():
    rng, lengths = random.Random(0), Counter()
    for _ in range(200):
        *lines, last = countdown.response(QUESTION, rng).split("\n")
        for equation in " ".join(lines).split():
            first, sign, second, result = re.findall(r"\d+|[-+*]", equation)
            assert OPERATIONS[sign](int(first), int(second)) == int(result)
        assert [reaches(line, (3, 5, 7), 22) for line in lines] == [False] * (len(lines) - 1) + [
            True
        ]
        assert last == f"#### {lines[-1]}"
        lengths[len(lines)] += 1
    # two of the 42 tries reach it: 21 tries are the mean, with a standard error of 1.5
    assert 15 < sum(n * count for n, count in lengths.items()) / 200 < 27


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
        assert question.target in {one.value for one in countdown.tries(question.numbers)}


def test_the_recipe_writes_a_policy_and_its_questions(tmp_path):
    countdown.make(tmp_path, TINY)
    model, _ = hf.load_pretrained(tmp_path)
    tok = tokenizer.load(tmp_path)
    tokenizer.check_vocabulary(tok, model)
    for name, wanted in zip(("train", "test"), countdown.questions(), strict=True):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        found = [countdown.Question(int(r["answer"]), tuple(r["numbers"])) for r in rows]
        assert found == wanted and [r["prompt"] for r in rows] == [q.prompt for q in wanted]
        assert all(tok.decode(tok.encode(r["prompt"])) == r["prompt"] for r in rows[:20])
    report = json.loads((tmp_path / "warmstart.json").read_text())
    assert report["reward"] == 0 and report["longest_tokens"] == TINY.max_new_tokens


SHAPE = ModelConfig("qwen3", 50, 32, 2, 4, 2, 8, 48, qk_norm=True, tied_embeddings=True)
UNTIED = dataclasses.replace(SHAPE, architecture="qwen2", qkv_bias=True, qk_norm=False)


@pytest.mark.parametrize("model", [SHAPE, dataclasses.replace(UNTIED, tied_embeddings=False)])
def test_a_grown_policy_has_the_same_logits_and_other_gradients(model):
    params = transformer.init(model, jax.random.key(0))
    larger = grow.grown(model, params, 3, 4, jax.random.key(1))
    shape = grow.grown_config(model, 3, 4)
    assert num_params(shape) == sum(x.size for x in jax.tree.leaves(larger))
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 50)
    expected = transformer.logits(model, params, tokens)
    np.testing.assert_allclose(transformer.logits(shape, larger, tokens), expected, atol=2e-5)
    loss = lambda p: transformer.logits(shape, p, tokens)[..., 3].sum()  # noqa: E731
    grads = jax.grad(loss)(larger).layers[0].gate_FD.reshape(3, 48, 96)
    assert not np.allclose(grads[0], grads[1], rtol=1e-2)
    with pytest.raises(ValueError, match="at least 2 layers, got 1"):
        grow.grown(model, params, 3, 1, jax.random.key(1))
