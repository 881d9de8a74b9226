"""Worked solutions: right answers, true lines, a stream that its seed fixes."""

import itertools
import math
import re

import pytest

from benchmarks.warmstart import solutions
from rl.data import tasks
from rl.data.answers import extract_answer

NUM_ENTRIES = 200


def entries(task):
    source = solutions.dataset(task, seed=7, size=NUM_ENTRIES)
    return source, [source[i] for i in range(NUM_ENTRIES)]


@pytest.mark.parametrize("task", solutions.TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("style", ["worked", "direct"])
def test_both_styles_earn_full_marks(task, style):
    source, all_entries = entries(task)
    for entry in all_entries:
        answer = extract_answer("hash", solutions.response(task.name, entry, style))
        assert answer == entry["answer"]
        assert source.score_answer(answer, entry) == 1.0


@pytest.mark.parametrize("task", solutions.TASKS, ids=lambda task: task.name)
def test_spec_is_one_that_rl_opens_with_the_same_questions(task):
    opened = tasks.open_task(task.spec, seed=3, size=4)
    start = solutions.dataset(task, 7, 1)[0]["question"][:20]
    for index in range(4):
        question = opened[index].prompt
        assert question.startswith(start)
        assert len(question + solutions.PROMPT_SUFFIX) <= 128  # what the warm start leaves room for


def test_gcd_lines_are_true_and_keep_the_divisor():
    _, all_entries = entries(solutions.TASKS[0])
    for entry in all_entries:
        for line in solutions.gcd_steps(entry):
            high, low, rest = map(int, re.fullmatch(r"(\d+)-(\d+)=(\d+)", line).groups())
            assert high - low == rest and high >= low
            assert math.gcd(high, low) == int(entry["answer"])


def test_gcd_by_hand():
    entry = {"metadata": {"numbers": [18, 48]}, "answer": "6"}
    assert solutions.response("gcd", entry, "worked") == (
        "48-18=30\n30-18=12\n18-12=6\n12-6=6\n6-6=0\n#### 6"
    )
    assert solutions.response("gcd", entry, "direct") == "#### 6"
    assert solutions.gcd_steps({"metadata": {"numbers": [5, 2]}}) == ["5-2=3", "3-2=1"]


def test_chain_sum_lines_all_have_the_answer_as_their_value():
    _, all_entries = entries(solutions.TASKS[1])
    for entry in all_entries:
        lines = solutions.chain_sum_steps(entry)
        assert len(lines) == entry["metadata"]["num_terms"] - 1
        for line in lines:
            assert re.fullmatch(r"-?\d+([+-]\d+)+", line)
            assert sum(map(int, re.findall(r"[+-]?\d+", line))) == int(entry["answer"])


def test_chain_sum_by_hand():
    entry = {"metadata": {"expression": "4 - 1 - 7 + 20"}}
    assert solutions.chain_sum_steps(entry) == ["4-1-7+20", "3-7+20", "-4+20"]


def test_count_bits_lines_are_true():
    _, all_entries = entries(solutions.TASKS[2])
    for entry in all_entries:
        seen = 0
        for line in solutions.count_bits_steps(entry):
            n, half, bit, count = map(
                int, re.fullmatch(r"(\d+)=2\*(\d+)\+([01]) (\d+)", line).groups()
            )
            seen += bit
            assert n == 2 * half + bit and count == seen


def test_count_bits_by_hand():
    lines = solutions.count_bits_steps({"metadata": {"number": 5}})
    assert lines == ["5=2*2+1 1", "2=2*1+0 1", "1=2*0+1 2"]


def test_spell_backward_lines_hold_the_word():
    _, all_entries = entries(solutions.TASKS[3])
    for entry in all_entries:
        word = entry["metadata"]["word"]
        lines = solutions.spell_backward_steps(entry)
        assert len(lines) == len(word) - 1
        for line in lines:
            rest, moved = line.split(" ")
            assert rest + moved[::-1] == word


def test_spell_backward_by_hand():
    assert solutions.spell_backward_steps({"metadata": {"word": "word"}}) == [
        "wor d",
        "wo dr",
        "w dro",
    ]


def test_task_without_a_writer_is_named():
    with pytest.raises(ValueError, match="'lcm'.*chain_sum"):
        solutions.response("lcm", {"answer": "1"}, "worked")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("gcd", r"\d+, \d+\.\n"),
        ("chain_sum", r"\d+( [+-] \d+)+ =\n"),
        ("count_bits", r"\d+\?\n"),
        ("spell_backward", r"\w+\n"),
    ],
)
def test_stem_is_the_problem_alone(name, stem):
    stems = [e.stem for e in take(0, 0.0) if e.task_name == name]
    assert stems and all(re.fullmatch(stem, found) for found in stems)


def take(seed, direct_fraction, count=300):
    return list(itertools.islice(solutions.examples(solutions.TASKS, seed, direct_fraction), count))


def test_stream_is_a_function_of_its_seed():
    texts = [[(e.prompt, e.response) for e in take(seed, 0.3)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_stream_mixes_tasks_and_styles():
    stream = take(0, 0.3)
    assert {e.task_name for e in stream} == {task.name for task in solutions.TASKS}
    # A few worked gcd responses (the smaller number is 1) have no lines; the range is wide.
    direct = sum(e.response.startswith("####") for e in stream) / len(stream)
    assert 0.2 < direct < 0.4
    assert not any(e.response.startswith("####") for e in take(0, 0.0) if e.task_name != "gcd")
    assert all(e.response.startswith("####") for e in take(0, 1.0))


def test_seeds_lie_above_every_seed_that_rl_can_draw(monkeypatch):
    seen = []
    real = solutions.dataset
    monkeypatch.setattr(
        solutions, "dataset", lambda task, seed, size: seen.append(seed) or real(task, seed, size)
    )
    next(solutions.examples(solutions.TASKS, 0, 0.3))
    assert len(seen) == len(solutions.TASKS)
    assert min(seen) >= solutions.FIRST_SEED + 1_000_000  # the first million measure
    assert solutions.FIRST_SEED > 2**32 + 1_000_000  # RL: a hash below 2**32, plus an index
