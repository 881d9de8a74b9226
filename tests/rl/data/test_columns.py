"""Rows to prompts and answers: verl's and TRL's layouts, nested columns, GSM8K and MATH."""

import json

import pytest

from reprise.rl.data.columns import find_layout, math_answer, read_row
from reprise.rl.data.specs import parse_spec
from reprise.rl.data.tasks import open_task


def read(row, query="", kind="jsonl", first=None):
    layout = find_layout(parse_spec(f"{kind}:x{query}"), first or row)
    return read_row(layout, row, "x:1")


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


VERL = {  # as examples/data_preprocess/gsm8k.py of verl writes it
    "data_source": "openai/gsm8k",
    "prompt": [turn("user", "2+2?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0, "answer": "2+2=4\n#### 4"},
}


def test_verls_layout_needs_no_key():
    prompt, answer, columns = read(VERL)
    assert (prompt, answer) == ((turn("user", "2+2?"),), "4")
    assert columns == {key: value for key, value in VERL.items() if key != "prompt"}
    _, answer, _ = read(VERL, "?answer=extra_info.answer&answer_extract=hash")
    assert answer == "4"


def test_a_column_whose_name_has_a_dot_comes_before_a_path():
    row = {"prompt": "q", "a.b": "flat", "a": {"b": "nested"}}
    assert read(row, "?answer=a.b")[1:] == ("flat", {"a": {"b": "nested"}})


@pytest.mark.parametrize(
    ("row", "query", "wanted"),
    [
        ({"messages": [turn("user", "q")], "answer": "a"}, "", ((turn("user", "q"),), "a")),
        (  # as for supervised training: the last turn is the answer
            {"messages": [turn("system", "s"), turn("user", "q"), turn("assistant", "x #### a")]},
            "?answer_extract=hash",
            ((turn("system", "s"), turn("user", "q")), "a"),
        ),
        (
            {"prompt": [turn("user", [{"type": "text", "text": t} for t in "ab"])], "answer": 1},
            "",
            ((turn("user", "ab"),), "1"),
        ),
        (  # Arrow fills what other rows have with None
            {"prompt": [turn("user", "q", tool_calls=None, name=None)], "answer": None},
            "",
            ((turn("user", "q"),), None),
        ),
        ({"prompt": "q", "messages": "other", "answer": "a"}, "", ("q", "a")),
    ],
)
def test_conversations(row, query, wanted):
    assert read(row, query)[:2] == wanted


@pytest.mark.parametrize(
    ("row", "query", "message"),
    [
        (
            {"prompt": [turn("user", "q"), turn("assistant", "a")], "answer": "a"},
            "",
            "turn of the assistant: leave",
        ),
        (
            {"messages": [turn("assistant", "a")]},
            "",
            "messages that end with the assistant's answer",
        ),
        ({"prompt": [turn("user", None, tool_calls=[{}])], "answer": ""}, "", "holds tool_calls"),
        ({"prompt": [turn("tool", "4")], "answer": ""}, "", "role 'tool'; tools are not"),
        (
            {"prompt": [turn("user", [{"type": "image"}])], "answer": ""},
            "",
            "type 'image'; only text",
        ),
        ({"prompt": [turn("user", None)], "answer": ""}, "", "messages, got {.role.: .user."),
        (
            {"question": "q", "final": {"answer": "a"}},
            "",
            "it has 'question', 'final', 'final.answer'",
        ),
        ({"question": "q", "answer": "a"}, "", r"no column 'prompt'.*perhaps \?prompt=question"),
        ({"prompt": "q", "solution": "a"}, "", r"no column 'answer'.*perhaps \?answer=solution"),
        ({"prompt": "q", "x": {"truth": "a"}}, "?answer=x.thruth", r"perhaps \?answer=x.truth"),
        ({"prompt": "q", "answer": {"value": 1}}, "", r"got dict; perhaps \?answer=answer.value"),
    ],
)
def test_what_is_missing_or_no_text_is_said(row, query, message):
    with pytest.raises(ValueError, match=f"^x:1: .*{message}"):
        read(row, query)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"so \fbox{7} it is", "7"),
        (r"we get $x = \boxed 2.$", "2"),
        (r"first \boxed{1}, then \boxed{3}", "3"),
        ("no box", None),
    ],
)
def test_answers_of_math(solution, answer):
    assert math_answer(solution) == answer


GSM8K = [
    {
        "question": "Of 2,000 eggs half break. How many are left?",
        "answer": "2000/2=1000\n#### 1,000",
    },
    {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
]
MATH = [
    {"problem": "1/2?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{0.5}$."}
]


def test_gsm8k_as_published(tmp_path):
    for name, rows in (("train", GSM8K), ("test", GSM8K[1:])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    task = open_task(f"gsm8k:{tmp_path}", seed=0)
    assert [(e.prompt, e.answer) for e in task] == [
        (GSM8K[0]["question"], "1000"),
        ("2+2?", "4"),
    ]
    assert [e.prompt for e in open_task(f"test=gsm8k:{tmp_path}?split=test", seed=0)] == ["2+2?"]
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "q", "answer": "#### 4"}))
    with pytest.raises(ValueError, match="no column 'question'.*gsm8k: reads the published col"):
        open_task(f"gsm8k:{tmp_path / 'other.jsonl'}", seed=0)
    with pytest.raises(ValueError, match="unknown key 'prompt', expected split"):
        open_task(f"gsm8k:{tmp_path}?prompt=question", seed=0)


def test_math_as_published(tmp_path):
    from pyarrow import Table, parquet

    archive = tmp_path / "archive" / "MATH" / "train" / "algebra"
    archive.mkdir(parents=True)
    (archive / "1.json").write_text(json.dumps(MATH[0]))
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    parquet.write_table(Table.from_pylist(MATH), hub / "train-00000-of-00001.parquet")
    for place in ("archive", "hub"):
        (example,) = list(open_task(f"math:{tmp_path / place}", seed=0))
        assert (example.prompt, example.answer) == ("1/2?", "0.5")
        assert example.columns == {"level": "Level 1", "type": "Algebra"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.0, "5"), (-0.0, "0"), (5.5, "5.5"), (2.0**53, "9007199254740992.0"), (1e300, "1e+300")]
    + [(1e-7, "0.0000001"), (1.5e-5, "0.000015"), (-1e-300, "-1e-300")]
    + [(7, "7"), (2**60, str(2**60)), (True, "True"), ("5.0", "5.0"), (None, None)],
)
def test_answers_that_are_numbers(value, text):
    """Whole floats are integers: a hole in a column makes it one of floats."""
    row = {"prompt": "q", "answer": value}
    layout = find_layout(parse_spec("jsonl:x.jsonl"), row)
    assert read_row(layout, row, "x")[1] == text
