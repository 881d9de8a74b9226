"""Rewards on trial: what would train on zeros is refused, or said, before a run."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from reprise.rl.answers.answers import EXTRACTORS, expected_answer, extract_answer, with_marker
from reprise.rl.commands import train
from reprise.rl.data.tasks import open_task
from reprise.rl.rewards import check
from reprise.rl.rewards.check import check_rewards
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.settings.inputs import Inputs, open_policy
from reprise.spec.config import SamplingConfig

ROOT = Path(__file__).resolve().parents[3]
NUM_ROWS = 16  # of each file with planted faults
GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = 72 clips.\n#### {}"


def file_task(path, *answers, query="", **columns):
    rows = [
        {"prompt": f"question {i}", "answer": answer}
        | {name: values[i] for name, values in columns.items()}
        for i, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_task(f"jsonl:{path}{query}", seed=0)


def patient(**fields):
    """What a busy machine takes for an import inside a function is no failure of it."""
    return RewardConfig(**{"deadline_s": 300.0} | fields)


def reward_file(path, body):
    path.write_text(f"import time\n{body}\n")
    deadline_s = 0.5 if "while True" in body else 300.0
    return patient(functions=(f"{path}:score",), deadline_s=deadline_s)


@pytest.fixture(scope="module")
def inputs():
    model, tokenizer = open_policy(str(ROOT / "policies/tiny"))[1:]
    return Inputs(ROOT / "policies/tiny", model, tokenizer, (), 0)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    monkeypatch.setattr(check, "_LIMIT_S", 300.0)


@pytest.fixture
def checked(inputs):
    """The lines of the check, with the shipped policy's tokenizer."""

    def lines(config, task, sampling=None, **options):
        sampling = sampling or SamplingConfig()
        read = lambda text, name: inputs.read(text, sampling)  # noqa: E731
        return check_rewards(config, task, read, **options)

    return lines


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def score(response): return [1.0]",
            r"score/raised: score has the parameter 'response', which is no column of the data: "
            r"expected answer, completion_ids, completions, prompts, task; the signature is "
            r"score\(prompts, completions, completion_ids, \*\*columns\), each a list, as TRL's$",
        ),
        (
            "def score(completion, answer): return [1.0]",
            "the parameter 'completion', .*; did you mean 'completions'",
        ),
        ("def score(completions, key=1, *rest, only): return [1.0]", "the parameter 'only',"),
        ("score = 3", "mine.py: expected score as a function or class, got int"),
        ("def score(completions, **columns): return 'good'", "score/not_a_list: expected a list"),
        ("def score(completions, **columns): return ['good']", "score/not_a_number"),
        ("def score(completions, **columns):\n    while True: pass", "score/deadline: no result"),
        ("import absent_module\ndef score(**columns): return [1.0]", "absent_module"),
        ("def score(:", "SyntaxError"),
        ("def scores(**columns): return [1.0]", "'score'; did you mean 'scores'"),
    ],
)
def test_functions_that_fail_are_refused_before_a_run(checked, tmp_path, body, message):
    config = reward_file(tmp_path / "mine.py", body)
    with pytest.raises(ValueError, match=f"Reward.functions.*{message}"):
        checked(config, file_task(tmp_path / "a.jsonl", "4"))


def test_gsm8k_as_everyone_has_it_is_read_by_the_default(checked, tmp_path):
    task = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), GSM8K.format("6"))
    every = patient(functions=("task", "exact_match", "math_verify"), weights=(1.0,) * 3)
    assert checked(every, task) == []


def test_answers_that_nothing_could_meet_are_refused(checked, tmp_path):
    task = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), GSM8K.format("6"))
    boxed = patient(functions=("exact_match",), extract="boxed")
    with pytest.raises(ValueError, match=r"2 of 2 answers, .*\?answer_extract=hash"):
        checked(boxed, task)
    mended = file_task(tmp_path / "a.jsonl", GSM8K.format("72"), query="?answer_extract=hash")
    assert checked(boxed, mended) == []
    solutions = [rf"We add, so the answer is $\boxed{{{n}}}$." for n in (16, 17)]
    with pytest.raises(ValueError, match=r"2 of 2 answers, .*\?answer_extract=boxed"):
        checked(patient(), file_task(tmp_path / "m.jsonl", *solutions))
    lines = file_task(tmp_path / "b.jsonl", "one\ntwo")
    with pytest.raises(ValueError, match="Reward.extract='hash' reads 'one' of the answer"):
        checked(patient(), lines)
    with pytest.raises(ValueError, match="cannot read the expected answer"):
        by_math = patient(functions=("math_verify",), extract="boxed")
        checked(by_math, file_task(tmp_path / "c.jsonl", "~"))
    with pytest.raises(ValueError, match="1 of 1 examples have no answer"):
        checked(patient(), file_task(tmp_path / "d.jsonl", None))


def test_some_answers_that_cannot_be_met_are_warnings(checked, tmp_path):
    task = file_task(tmp_path / "a.jsonl", "1", "two\nlines", None, "4")
    first, second = checked(patient(), task)
    assert first.startswith("1 of 3 answers, first ") and "a.jsonl#1: no response can" in first
    assert second.startswith("1 of 4 examples have no answer") and second.endswith("a.jsonl#2")


RIGHT = """
def score(completions, answer, **columns):
    return [float(c.split("####")[-1].strip() == a.split("####")[-1].strip())
            for c, a in zip(completions, answer)]
def form(completions, **columns):
    return [float("####" in c) for c in completions]
def short(completions, **columns):
    return [-len(c) / 100 for c in completions]
"""
HEAD = "def score(completions, answer, **columns):\n    return [float({})]"
ENDS = HEAD.format("completions[0].endswith(answer[0])")
WHOLE = HEAD.format("completions[0] == answer[0][:9]")
WITHIN = HEAD.format("answer[0] in completions[0]")
MULTIPLE = [f"{n}" for n in (12, 7, 30)]


@pytest.mark.parametrize(
    ("body", "answers", "patterns"),
    [
        (RIGHT, [GSM8K.format(n) for n in (72, 6, 11)], []),
        (ENDS, MULTIPLE, [r"3 of 3 .*score pays 1 for the wrong response '(#### )?1,012', 1,012"]),
        (WITHIN, MULTIPLE, ["3 of 3 .*score pays 1 for the wrong response"]),
        (WHOLE, [GSM8K.format(n) for n in (72, 6)], [r"2 of 2 .*\?answer_extract=hash"]),
        (
            WHOLE,
            ["a long answer", "another one"],
            ["2 of 2 .*rewards pay nothing .* any of 5 forms"],
        ),
        ("def score(completions, **columns): return [1.0]", MULTIPLE, ["no more than for another"]),
        ("def score(completions, **columns): return [None]", MULTIPLE, ["all return None"]),
    ],
)
def test_functions_of_the_users(checked, tmp_path, body, answers, patterns):
    lines = checked(reward_file(tmp_path / "mine.py", body), file_task(tmp_path / "a", *answers))
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, line)


def test_functions_that_judge_no_answer_are_left_alone_beside_one_that_does(checked, tmp_path):
    names = ("score", "form", "short")
    config = reward_file(tmp_path / "mine.py", RIGHT)
    functions = tuple(f"{tmp_path}/mine.py:{name}" for name in names)
    task = file_task(tmp_path / "a.jsonl", "12", "7", "7", "30")
    for per in ("response", "group"):
        assert checked(dataclasses.replace(config, functions=functions, per=per), task) == []
    (line,) = checked(dataclasses.replace(config, functions=functions[1:]), task)
    assert "form" in line and "no more than for another example's" in line
    idle = "def idle(completions, answer): return [0.0]"
    (tmp_path / "mine.py").write_text(f"{RIGHT}\n{idle}\n")
    both = dataclasses.replace(config, functions=(functions[0], f"{tmp_path}/mine.py:idle"))
    (line,) = checked(both, task)
    assert line.startswith("4 of 4 answers") and line.endswith(
        "idle pays nothing for the answer '12'"
    )


CODE = """
def score(completions, answer, checker, **columns):
    text = completions[0].split("####")[-1].replace("```", "").strip()
    return [float({"in": answer[0] in text, "equal": text == answer[0]}[checker[0]])]
def number(completions, answer, **columns):
    found = completions[0].rpartition("####")[2].strip().lstrip("$")
    right = float(answer[0].rpartition("####")[2])
    return [float(found.replace(".", "", 1).isdecimal() and float(found) == right)]
"""


def gsm8k(count):
    answers = [GSM8K.format(100 + 3 * i) for i in range(count)]
    answers[3] = "Natalia sold 72 clips."  # it has no number to read
    answers[7], answers[8] = GSM8K.format(""), GSM8K.format("twelve")
    return answers


def math(count):
    forms = (
        r"\frac{{{0}}}{{7}}",
        "{0}",
        r"x^{{{0}}}+1",
        r"({0}, \infty)",
        r"{0}\%",
        r"\text{{yes{1}}}",
    )
    answers = [
        rf"So it is $\boxed{{{forms[i % 6].format(i + 2, chr(97 + i % 26))}}}$."
        for i in range(count)
    ]
    answers[2] = "We add them.\n#### 7"
    answers[5], answers[8] = r"So it is $\boxed{}$.", r"So it is $\boxed{~}$."
    return answers


def deepscaler(count):
    answers = [str(1000 - 7 * i) if i % 2 else rf"\frac{{{i}}}{{11}}" for i in range(count)]
    answers[1], answers[4], answers[9] = "café", "1" * 300, "a\n\nb"
    return answers


def code(count):
    answers = [f"{i}\n{i + 1}" if i % 3 else f"[{i}, {2 * i}]" for i in range(count)]
    answers[6], answers[10] = " 6\n7\n", "5"
    return answers


FILES = {
    "gsm8k": (gsm8k, {"functions": ("number",)}, ["3 .*#3: number/raised"]),
    "math": (
        math,
        {"functions": ("math_verify",), "extract": "boxed"},
        [
            r"1 .*#2: .*\?answer_extract=hash",
            "1 .*#5: .*Reward.extract='boxed' reads '' of",
            "1 .*#8: .*cannot read the expected answer",
        ],
    ),
    "deepscaler": (
        deepscaler,
        {"functions": ("task",), "extract": "boxed"},
        ["1 .*#1: .*tokenizer", "1 .*#4: .*max_new_tokens=256", "1 .*#9: .*Sampling.stop"],
    ),
    "code": (
        code,
        {"functions": ("score",)},
        [
            "1 .*#2: score/raised: KeyError: 'regex'",
            "1 .*#6: .*pay nothing",
            "1 .*#10: .*wrong response",
        ],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_twelve_planted_faults_are_found_and_nothing_else(checked, tmp_path, name):
    """Three in each of four files; every other row has an answer that is right."""
    make, fields, patterns = FILES[name]
    (tmp_path / "mine.py").write_text(CODE)
    own = {"score", "number"}
    functions = [f"{tmp_path}/mine.py:{f}" if f in own else f for f in fields["functions"]]
    answers = make(NUM_ROWS)
    kinds = [{2: "regex", 10: "in"}.get(i, "equal") for i in range(len(answers))]
    task = file_task(tmp_path / "a.jsonl", *answers, checker=kinds)
    config = patient(**fields | {"functions": tuple(functions), "workers": 2})
    lines = checked(config, task, SamplingConfig(stop=("\n\n",)))
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, line), line


def test_shipped_tasks_can_be_met(checked):
    task = open_task("reasoning_gym:knights_knaves", seed=0, size=16)
    assert checked(patient(), task) == []


def test_a_response_as_rewards_read_it(inputs):
    def read(text, **sampling):
        return inputs.read(text, SamplingConfig(**sampling))

    assert read("#### 4") == ("#### 4", "")
    assert read("caf\u00e9")[1].startswith("tokenizer: it reads 'café' back as 'caf<unk>'")
    assert read("4 <eos> 5").text == "4 "
    cut = read("12345", max_new_tokens=3)
    assert cut.text == "123" and cut.change.startswith("Sampling.max_new_tokens=3: it takes 5")
    assert read("a. b", stop=(".",)).text == "a." and read("a.", stop=(".",)) == ("a.", "")


@pytest.mark.parametrize("name", EXTRACTORS)
def test_markers_and_extractors_are_inverse(name):
    for answer in ("4", "-1.5") if name == "last_number" else ("4", r"\frac{1}{2}", "a b"):
        assert extract_answer(name, with_marker(name, answer)) == answer
        assert expected_answer(name, with_marker(name, answer)) == answer
        assert expected_answer(name, answer) == answer


def test_a_failing_reward_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.py").write_text("def score(response): return [1.0]\n")
    code = train.main(["--dry_run", f"--gin.Reward.functions=('{tmp_path}/mine.py:score',)"])
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and error[-1].startswith("error: Reward.functions: called on the first")
    assert "which is no column of the data" in error[-1]
