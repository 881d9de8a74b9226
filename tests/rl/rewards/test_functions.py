"""Answer extraction, the built-in functions, and the checks before any worker starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reprise.rl.answers.answers import extract_answer
from reprise.rl.data.tasks import Example
from reprise.rl.rewards.config import RewardConfig, validate
from reprise.rl.rewards.functions import exact_match, load, math_verify, task_reward
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import ScoreJob
from reprise.rl.rewards.worker import read_result

PLUGINS = Path(__file__).parent / "plugins"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("whole", "  4 \n", "4"),
        ("whole", " \n", None),
        ("last_line", "one\ntwo \n\n", "two"),
        ("last_line", "\n \n", None),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}} done", r"\{1, 2\}"),
        ("boxed", r"\boxed{cut \frac{1}{2}", None),
        ("boxed", "no marker", None),
        ("boxed", r"\boxed{}", None),
        ("answer_tag", "<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("last_number", "3 - 2 is 1. Or 1,250.50 apples?", "1250.5"),
        ("last_number", "3-2", "2"),
        ("last_number", "so x = -2!", "-2"),
        ("last_number", "1,2345", None),  # 2345, or a decimal comma
        ("last_number", "That leaves -$5.", "-5"),
        ("last_number", "so \u22121 000.50", "-1000.5"),
        ("last_number", "a quarter is .25", "0.25"),
        ("last_number", r"6.02 \times 10^{2} of them", "602"),
        ("last_number", "none", None),
        ("answer_tag", "1</answer>", None),
        ("hash", "6 = 3*2\n#### 3\n#### 42 \nbye", "42"),
        ("hash", "42", None),
        ("hash", "####", None),
    ],
)
def test_extraction(name, text, expected):
    assert extract_answer(name, text) == expected


def test_exact_match_ignores_case_and_spacing_only():
    assert exact_match("#### New  york", "new York", "hash") == 1.0
    assert exact_match("#### New York City", "New York", "hash") == 0.0
    assert exact_match("New York", "New York", "hash") == 0.0
    assert exact_match("#### x", None, "hash") is None


def test_exact_match_of_last_numbers_is_by_value():
    assert exact_match("It costs $1,250.50.", "1250.5", "last_number") == 1.0
    assert exact_match("about 1.5e3 m", "1,500", "last_number") == 1.0
    assert exact_match("That leaves -$5.", "5", "last_number") == 0.0
    assert exact_match("so \u22125", "5", "last_number") == 0.0
    assert exact_match("a quarter is .25", "25", "last_number") == 0.0


def test_expected_answers_with_the_marker_are_read_as_completions_are():
    gold = "48/2 = 24\n#### 24"
    assert exact_match("so\n#### 24", gold, "hash") == 1.0
    assert exact_match("so\n#### 48", gold, "hash") == 0.0
    assert math_verify("#### 24.0", gold, "hash") == 1.0
    assert exact_match(r"\boxed{2}", r"It is \boxed{2}.", "boxed") == 1.0


def test_task_reward_uses_the_verifier_or_exact_match():
    def paid(completion, spec):
        return task_reward(completion, {"answer": "1000", "metadata": {}}, spec, "hash")

    # chain_sum compares numbers; a data file compares text; no marker is no answer.
    assert paid("#### 1,000.0", "reasoning_gym:chain_sum") == 1.0
    assert paid("#### 999", "reasoning_gym:chain_sum") == 0.0
    assert paid("1000", "reasoning_gym:chain_sum") == 0.0
    assert paid("#### 1,000.0", "jsonl:x.jsonl") == 0.0


def test_results_of_arrays_and_scalars_count_as_numbers():
    for result, number in (
        (np.array([0.25]), 0.25),
        ([np.float32(0.5)], 0.5),
        ((1,), 1.0),
        ([np.array([1.0, 2.0]).sum()], 3.0),
    ):
        assert read_result(result, 1) == [(number, None, None)]
    assert read_result("1", 1)[0][1] == "not_a_list"
    assert read_result([[1.0]], 1)[0][1] == "not_a_number"
    # of a group: a call fails for all, a value for its own response
    values = read_result(np.array([0.5, np.nan, 1.0]), 3)
    assert [kind for _, kind, _ in values] == [None, "not_finite", None]
    assert [kind for _, kind, _ in read_result([1.0, 2.0], 3)] == ["length"] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"functions": ()}, "empty"),
        ({"functions": ("exactmatch",)}, "did you mean 'exact_match'"),
        ({"functions": ("mine.py",)}, "PATH.py:function"),
        ({"functions": ("task", "task")}, "twice"),
        ({"weights": (1.0, 2.0)}, r"one per function \(1\), got 2"),
        ({"weights": (float("nan"),)}, "finite"),
        ({"extract": "boxd"}, "did you mean 'boxed'"),
        ({"on_failure": "ignore"}, "zero, skip, got 'ignore'"),
        ({"per": "grup"}, "did you mean 'group'"),
        ({"deadline_s": 0.0}, "above 0"),
        ({"workers": 0}, "must be 1 to"),
        ({"memory_limit_mib": 1}, "must be 64"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes)


def test_an_unknown_home_directory_is_named():
    with pytest.raises(ValueError, match="Reward.functions: ~nosuchuser/x.py:f: .*home"):
        validate(RewardConfig(functions=("~nosuchuser/x.py:f",)))


def test_workers_have_a_memory_limit_that_math_and_arrays_fit_into(tmp_path):
    file = tmp_path / "mine.py"
    body = "import numpy\ndef norm(completions, **columns):\n"
    file.write_text(body + "    return [float(numpy.linalg.norm(numpy.ones((9, 9))))]\n")
    config = RewardConfig(functions=("math_verify", f"{file}:norm"), extract="whole", workers=1)
    config = dataclasses.replace(config, deadline_s=300.0)
    assert config.memory_limit_mib is not None
    example = Example("x#0", "q", "1/2", {}, "jsonl:x")
    with RewardPool(config) as pool:
        assert pool.submit(ScoreJob(example, "0.5")).result(timeout=300).total == 10.0
    too_little = dataclasses.replace(config, memory_limit_mib=64)
    with pytest.raises(RewardWorkerError, match="memory_limit_mib is 64: raise it|could not start"):
        with RewardPool(too_little):
            pass


def test_user_files_are_checked_without_running_them(tmp_path):
    def check(path, name):
        validate(RewardConfig(functions=(f"{path}:{name}",)))

    check(PLUGINS / "faults.py", "faulty")
    check(PLUGINS / "broken_import.py", "score")  # would raise if it were executed
    with pytest.raises(FileNotFoundError, match="no file"):
        check(tmp_path / "absent.py", "f")


def test_functions_that_a_file_lacks_are_refused_when_it_is_loaded():
    with pytest.raises(ValueError, match="no function or class 'fauly'; did you mean 'faulty'"):
        load(f"{PLUGINS / 'faults.py'}:fauly", "hash")


def test_the_worker_imports_nothing_heavy():
    code = (
        "import sys, rl.rewards.worker, rl.rewards.functions; "
        "print(sorted(m for m in ('jax', 'numpy', 'reasoning_gym', 'math_verify', 'sympy', "
        "'transformers', 'multiprocessing', 'pickle') if m in sys.modules))"
    )
    root = Path(__file__).resolve().parents[3]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"
