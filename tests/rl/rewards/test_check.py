"""Rewards on trial: what would train on zeros is refused, or said, before a run."""

import json
from pathlib import Path

import pytest

from rl import train
from rl.data.answers import EXTRACTORS, expected_answer, extract_answer, with_marker
from rl.data.tasks import open_task
from rl.rewards.check import check_rewards
from rl.rewards.config import RewardConfig

PLUGINS = Path(__file__).parent / "plugins"
GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = 72 clips.\n#### {}"


def file_task(path, *answers, query=""):
    rows = [{"prompt": f"question {i}", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_task(f"jsonl:{path}{query}", seed=0)


def patient(**fields):
    """What a busy machine takes for an import inside a function is no failure of it."""
    return RewardConfig(**{"deadline_s": 300.0} | fields)


def reward_file(path, body):
    path.write_text(f"import time\n{body}\n")
    deadline_s = 0.5 if "while True" in body else 300.0
    return patient(functions=(f"{path}:score",), deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def score(response): return [1.0]", "score/raised: TypeError.*missing 1 required"),
        ("def score(completions, **columns): return 'good'", "score/not_a_list: expected a list"),
        ("def score(completions, **columns): return ['good']", "score/not_a_number"),
        ("def score(completions, **columns):\n    while True: pass", "score/deadline: no result"),
        ("import absent_module\ndef score(**columns): return [1.0]", "absent_module"),
        ("def score(:", "SyntaxError"),
        ("def scores(**columns): return [1.0]", "'score'; did you mean 'scores'"),
    ],
)
def test_functions_that_fail_are_refused_before_a_run(tmp_path, body, message):
    config = reward_file(tmp_path / "mine.py", body)
    with pytest.raises(ValueError, match=f"Reward.functions.*{message}"):
        check_rewards(config, file_task(tmp_path / "a.jsonl", "4"))


def test_a_function_of_the_users_is_called_once(tmp_path):
    calls = tmp_path / "calls"
    body = (
        f"def score(completions, **columns):\n    open({str(calls)!r}, 'a').write(completions[0])"
    )
    config = reward_file(tmp_path / "mine.py", body + "\n    return [0.0]")
    assert check_rewards(config, file_task(tmp_path / "a.jsonl", "4", "5", "6")) == []
    assert calls.read_text() == "#### 4"


def test_gsm8k_as_everyone_has_it_is_read_by_the_default(tmp_path):
    task = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), GSM8K.format("6"))
    every = patient(functions=("task", "exact_match", "math_verify"), weights=(1.0,) * 3)
    assert check_rewards(every, task) == []


def test_answers_that_nothing_could_meet_are_refused(tmp_path):
    task = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), GSM8K.format("6"))
    boxed = patient(functions=("exact_match",), extract="boxed")
    with pytest.raises(ValueError, match=r"2 of the first 2 .*\?answer_extract=hash"):
        check_rewards(boxed, task)
    mended = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), query="?answer_extract=hash")
    assert check_rewards(boxed, mended) == []
    lines = file_task(tmp_path / "b.jsonl", "one\ntwo")
    with pytest.raises(ValueError, match="Reward.extract='hash' reads 'one' of the answer"):
        check_rewards(patient(), lines)
    with pytest.raises(ValueError, match="cannot read the expected answer"):
        by_math = patient(functions=("math_verify",), extract="boxed")
        check_rewards(by_math, file_task(tmp_path / "c.jsonl", "~"))


def test_some_answers_that_cannot_be_met_are_a_warning(tmp_path):
    task = file_task(tmp_path / "a.jsonl", "1", "two\nlines", None, "4")
    missing, warning = check_rewards(patient(), task)
    assert missing.startswith("1 of the first 4 questions have no answer")
    assert warning.startswith("1 of the first 3 answers cannot be met")
    assert "a.jsonl#1" in warning


def test_questions_without_any_answer_are_refused_unless_a_function_needs_none(tmp_path):
    task = file_task(tmp_path / "a.jsonl", None, None)
    with pytest.raises(ValueError, match=r"2 of the first 2 .* no answer.* name the column"):
        check_rewards(patient(), task)
    own = reward_file(tmp_path / "mine.py", "def score(completions, **columns): return [1.0]")
    both = patient(functions=("exact_match", *own.functions))
    (warning,) = check_rewards(both, task)
    assert "2 of the first 2 questions have no answer" in warning


def test_shipped_tasks_can_be_met():
    task = open_task("reasoning_gym:knights_knaves", seed=0, size=16)
    assert check_rewards(patient(), task) == []


@pytest.mark.parametrize("name", EXTRACTORS)
def test_markers_and_extractors_are_inverse(name):
    for answer in ("4", "-1.5") if name == "last_number" else ("4", r"\frac{1}{2}", "a b"):
        assert extract_answer(name, with_marker(name, answer)) == answer
        assert expected_answer(name, with_marker(name, answer)) == answer
        assert expected_answer(name, answer) == answer


def test_a_failing_reward_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    (tmp_path / "mine.py").write_text("def score(response): return [1.0]\n")
    code = train.main(["--dry_run", f"--gin.Reward.functions=('{tmp_path}/mine.py:score',)"])
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and error[-1].startswith("error: Reward.functions: called on the first")
    assert "TypeError" in error[-1]
