"""The whole step beside others: its rewards, its figures, and our own system at a tiny size."""

import argparse
import json
import sys

import pytest

from benchmarks.child import Child
from benchmarks.end_to_end import __main__ as end_to_end
from benchmarks.end_to_end import reward, tasks
from benchmarks.environment import ROOT
from reprise.models.formats import hf
from reprise.rl.answers.answers import extract_answer

TEXTS = ["2+3\n#### 5", "####", "#### 4 #### 5 ", "5", "#### 5\nor 6", "#### 15"]

SMALL = """
Engine.slots = 8
Engine.min_slots = 8
Engine.max_nodes = 2
Rollout.max_prompt_tokens = 128
Trainer.micro_batch_tokens = 768
"""


def test_rewards_by_hand():
    assert reward.exact(TEXTS, ["5"] * len(TEXTS)) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert reward.brief(["it is -5", "6"], ["-5", "5"]) == [1 - 0.03, -0.01]


def test_the_reward_reads_answers_as_the_built_in_one_does():
    for text in TEXTS:
        assert (reward.after_mark(text) or None) == extract_answer("hash", text)


def answer(step_s, rollout_s, tokens):
    seconds = {"step_s": step_s, "rollout_s": rollout_s, "update_s": 1.0, "rest_s": 0.5}
    return seconds | {"tokens": tokens, "reward": 0.5, "updates": 4}


def test_ratios_are_taken_turn_by_turn():
    ours = [answer(2.0, 0.5, 100), answer(4.0, 2.5, 200), answer(2.0, 0.5, 100)]
    theirs = [answer(6.0, 4.5, 100), answer(4.0, 2.5, 100), answer(8.0, 6.5, 100)]
    found = end_to_end.ratios({"reprise": ours, "peer": theirs})
    assert found["peer"]["step"] == {"median": 3.0, "least": 1.0, "most": 4.0}
    assert found["peer"]["rollout"]["median"] == 9.0 and found["peer"]["update"]["median"] == 1.0
    assert found["peer"]["per_token"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    figures = end_to_end.figures(ours)
    assert (figures["step_s"], figures["tokens_per_s"], figures["updates"]) == (2.0, 50.0, 4)


def test_peers_keep_the_variants_that_an_earlier_result_chose(tmp_path):
    tried = {"variants_s": {"a": 2.0, "b": 1.0}, "cannot": {}, "versions": {"trl": "1"}}
    systems = {"trl": {"variant": "b", "step_s": 1.0} | tried}
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"policy": "policies/tiny", "steps": {"systems": systems}}))
    sizes = dict.fromkeys(end_to_end.SIZES)
    given = {"trl_python": "x", "tunix_python": None, "chosen": earlier, "work": ""} | sizes
    bench = end_to_end.Bench(argparse.Namespace(policy="policies/tiny", **given), tmp_path)
    assert bench.chosen("trl") == {"variant": "b"} | tried and bench.variants == {"trl": "b"}
    assert bench.chosen(end_to_end.OURS) is None
    given["policy"] = "downloads/smollm2"
    with pytest.raises(SystemExit, match="expected a result of downloads/smollm2"):
        end_to_end.Bench(argparse.Namespace(**given), tmp_path)


def test_the_first_evaluation_at_the_target_counts():
    rewards = (0.4, 0.5, 0.45, 0.6)
    curve = [{"step": 5 * i, "s": 2.0 * i, "reward": r} for i, r in enumerate(rewards, start=1)]
    found = end_to_end.reached(curve, 0.5)
    assert (found["seconds"], found["step"], found["best_reward"]) == (4.0, 10, 0.6)
    assert end_to_end.reached(curve, 0.7)["seconds"] is None


def test_seconds_to_the_target_are_compared_seed_by_seed():
    rows = [
        {"seed": seed, "system": system, "start_s": start_s, "seconds": seconds}
        for seed, system, start_s, seconds in (
            *((0, "reprise", 6.0, 10.0), (0, "trl", 2.0, 30.0), (0, "tunix", 2.0, None)),
            *((1, "reprise", 6.0, 4.0), (1, "trl", 0.0, 20.0), (1, "tunix", 0.0, 8.0)),
            *((2, "reprise", 6.0, None), (2, "trl", 0.0, 20.0)),
        )
    ]
    assert end_to_end.learning_ratios(rows) == {
        "trl": {"steps": [3.0, 5.0], "all": [2.0, 2.0]},
        "tunix": {"steps": [2.0], "all": [0.8]},
    }


@pytest.mark.slow
def test_our_system_takes_steps_on_command_and_saves_what_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TRAIN", 16)
    work, questions = tasks.WORK["policies/tiny"], tmp_path / "train.jsonl"
    small = tmp_path / "small.gin"
    small.write_text(SMALL, encoding="utf-8")
    tasks.write_questions(work, 0, questions)
    rows = questions.read_text("utf-8").splitlines()
    assert len(rows) == tasks.TRAIN and json.loads(rows[0])["prompt"].endswith("\n")
    given = {
        **{"policy": "policies/tiny", "config": str(small), "reward": work.reward},
        **{"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 32, "updates_per_step": 1},
        **{"learning_rate": 1e-4, "seed": 0, "variant": "as shipped"},
        **{"task": str(questions), "scratch": str(tmp_path)},
    }
    child = Child("reprise", [sys.executable, "-m", "benchmarks.baselines.reprise_grpo"], ROOT)
    try:
        assert child.answer()["variants"] == ["as shipped"]
        assert child.ask(do="prepare", **given) == {}
        for _ in range(2):
            step = child.ask(do="step")
            assert 0 < step["tokens"] <= 8 * 32 and 0 <= step["reward"] <= 1
            assert step["rollout_s"] > 0 and step["update_s"] > 0
        assert child.ask(do="save", folder=str(tmp_path / "saved")) == {}
        assert child.ask(do="memory")["peak_mib"] > 0
    finally:
        child.close()
    assert hf.load_pretrained(tmp_path / "saved")[0] == hf.load_pretrained("policies/tiny")[0]
    asked = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").open(encoding="utf-8")]
    prompts = {row["prompt"] for row in asked if row["step"] == 1}
    assert prompts <= {json.loads(row)["prompt"] for row in rows[:2]}
