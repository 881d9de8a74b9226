"""Counts of a real policy's benchmark: planted differences are found, and nothing else is."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.environment import ROOT
from benchmarks.real_policy import acceptance, one_update, parity, questions
from benchmarks.real_policy.ground import Ground, Sizes
from reprise.models.formats import hf
from reprise.models.text import tokenizer

SIZES = Sizes(questions=2, group_size=2, new_tokens=12, slots=8)


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A policy of one layer with the shipped tokenizer, asked a few of the shipped questions."""
    folder = tmp_path_factory.mktemp("real_policy")
    model, params = workloads.random_policy(99, 1, 32, 32, 256)
    model = dataclasses.replace(model, eos_token_ids=(1,), pad_token_id=0)
    hf.save_pretrained(folder / "policy", model, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "policies" / "tiny" / name, folder / "policy")
    return Ground(folder / "policy", "tiny", SIZES)


def test_an_update_at_a_tiny_rate_leaves_the_responses_and_a_large_one_does_not(
    ground, monkeypatch
):
    monkeypatch.setattr(ground, "_reward", lambda t: float(t.sample_index))
    done = ground.responses()
    assert ground.responses() is done, "generated once"
    assert ground.update[1]["responses"] == len(done)

    def num_equal(rate):
        after = ground.responses(rate=rate)
        return sum(
            a.response_ids.tolist() == b.response_ids.tolist()
            for a, b in zip(done, after, strict=True)
        )

    assert num_equal(1e-12) == len(done) > num_equal(1.0)


def test_a_policy_agrees_with_itself_and_another_one_does_not(ground):
    done = ground.responses()
    found = one_update.verify(ground, ground.params, done, "cdf")
    row = one_update.coupled(ground, found)
    assert row["agreement"]["value"] == row["kept"]["value"] == 1.0
    assert row["agreement"]["of"] == sum(t.num_tokens for t in done)
    assert one_update.lenient(ground, found, "lenient:1")["value"] > 0.99
    # one token of the last response drawn otherwise: what is behind it is lost too
    last = max(found)
    drawn = found[last].drawn.copy()
    drawn[4] += 1
    planted = one_update.coupled(ground, found | {last: found[last]._replace(drawn=drawn)})
    n = row["agreement"]["of"]
    assert planted["agreement"]["value"] == pytest.approx(1 - 1 / n, abs=1e-5)
    assert planted["kept"]["value"] == pytest.approx(1 - (len(drawn) - 4) / n, abs=1e-5)
    moved = jax.tree.map(lambda p: 1.5 * p, ground.params)
    other = one_update.coupled(ground, one_update.verify(ground, moved, done, "cdf"))
    assert other["kept"]["value"] < 1 and other["mean_logprob_difference"] > 1e-3


def test_greedy_tokens_that_differ_are_measured_by_their_logits(ground):
    ids = [list(q.prompt_ids) for q in ground.questions[:2]]
    answers = []
    for tokens in ids:
        text = list(tokens)
        for _ in range(4):
            text.append(int(parity.logits_of(ground, text)[-1].argmax()))
        answers.append(text[len(tokens) :])
    same = parity.compare_greedy(ground, ids, answers, 4)
    assert (same["greedy_equal"], same["greedy_gaps"]) == (2, [])
    worst = int(parity.logits_of(ground, ids[0] + answers[0][:2])[-1].argmin())
    planted = [answers[0][:2] + [worst, 0], answers[1]]
    found = parity.compare_greedy(ground, ids, planted, 4)
    logits_V = parity.logits_of(ground, ids[0] + answers[0][:2])[-1]
    assert found["greedy_equal"] == 1 and found["greedy_unexplained"] == 1
    assert found["greedy_gaps"] == [pytest.approx(float(logits_V.max() - logits_V.min()))]


def test_ends_of_greedy_responses():
    assert parity.until_end([5, 1, 0, 0], (1,)) == [5, 1]
    assert parity.until_end([5, 6, 7], (1,)) == [5, 6, 7]


def test_accepted_tokens_by_depth():
    found = acceptance.summary([np.array([0, 2]), np.array([1, 1, 3, 0])])
    assert found["value"] == pytest.approx(7 / 6, abs=1e-4) and found["of"] == 6
    assert found["by_depth"][:4] == [0.6667, 0.3333, 0.1667, 0.0]
    low, high = found["interval"]
    assert low == pytest.approx(1.0) and high == pytest.approx(1.25)


def test_drafts_of_the_same_text_are_right_and_of_another_are_not(ground):
    done = ground.by_question(ground.responses())[0]
    group, past = acceptance.as_group(done), [t.response_ids for t in done]
    right = acceptance.accepted_tokens(group, acceptance.makers(group, past)["last"])
    wrong = acceptance.accepted_tokens(
        group, acceptance.makers(group, [p * 0 + 98 for p in past])["last"]
    )
    assert right.sum() == sum(len(p) - 1 for p in past) > 0  # the first token is given
    assert wrong.sum() <= sum((p == 98).sum() for p in past)


def test_a_ratio_and_its_interval():
    found = acceptance.ratio([1, 1, 1], [2, 2, 2])
    assert found == {"value": 0.5, "interval": [0.5, 0.5], "of": 6}
    assert acceptance.ratio([0], [0])["value"] is None


@pytest.mark.parametrize("kind", questions.KINDS)
def test_questions_are_the_same_every_time_and_all_different(kind):
    words = tokenizer.load(ROOT / "policies" / "tiny")
    first, again = (questions.ask(kind, words, 8) for _ in range(2))
    assert [q.prompt_ids for q in first] == [q.prompt_ids for q in again]
    assert len({q.asked for q in first}) == len(first) == 8 * len(questions.KINDS[kind])


def test_the_files_of_questions_hold_questions():
    for name in ("code_questions", "writing_questions"):
        lines = (ROOT / "benchmarks" / "data" / f"{name}.jsonl").read_text().splitlines()
        assert len({json.loads(line)["prompt"] for line in lines}) == 24
