"""Lines of traces become sequences; a share of the prompts is held out."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.make.characters import save_character_tokenizer
from reprise.models.text import tokenizer
from reprise.rl.drafter_training.traces import hold_out, num_tokens, read
from reprise.rl.records.packing import Response
from tests.support import tiny_run

MODEL = tiny_run.MODEL
EOS = MODEL.eos_token_ids[0]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    save_character_tokenizer(folder, tiny_run.CHARACTERS)
    return tokenizer.load(folder)


def write(path, *rows, end="\n"):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + end)
    return path


def ids(prompt, response):
    return {"prompt_ids": prompt, "response_ids": response}


def pairs(trace):
    return [(r.prompt_ids.tolist(), r.tokens.tolist()) for r in trace.responses]


def test_tokens_are_taken_as_they_are_and_prompts_numbered(tmp_path, words):
    rows = [ids([3, 4], [5, EOS]), ids([7], [8, 9]), ids([3, 4], [6])]
    first = write(tmp_path / "a.jsonl", *rows[:2])
    second = write(tmp_path / "b.jsonl", rows[2])
    trace = read([first, second], MODEL, words)
    assert pairs(trace) == [([3, 4], [5, EOS]), ([7], [8, 9]), ([3, 4], [6])]
    assert [r.group_id for r in trace.responses] == [0, 1, 0]
    assert [r.name for r in trace.responses] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    assert {a.dtype for r in trace.responses for a in (r.prompt_ids, r.tokens)} == {np.dtype("i4")}
    assert trace.num_texts == 0 and list(map(num_tokens, trace.responses)) == [4, 3, 3]


def test_texts_are_tokenized_with_the_end_that_they_have_lost(tmp_path, words):
    write(
        tmp_path / "samples.jsonl",
        {"step": 1, "prompt": "1+1=", "completion": "2", "finish_reason": "stop"},
        {"step": 1, "prompt": "<eos>7=", "completion": "77", "finish_reason": "length"},
        {"prompt": "7=", "completion": "33", "finish_reason": "stop", "num_tokens": 2},
        ids([3], [4, 5]),
    )
    trace = read([tmp_path], MODEL, words)
    assert trace.num_texts == 3
    assert pairs(trace) == [
        (words.encode("1+1="), [*words.encode("2"), EOS]),
        ([EOS, *words.encode("7=")], words.encode("77")),
        (words.encode("7="), words.encode("33")),
        ([3], [4, 5]),
    ]


def test_a_torn_last_line_is_passed_over(tmp_path, words):
    path = write(tmp_path / "a.jsonl", ids([3], [4, 5]), "", '{"prompt_ids": [1', end="")
    assert pairs(read([path], MODEL, words)) == [([3], [4, 5])]
    write(path, ids([3], [4, 5]), '{"prompt_ids": [1')  # not the writer's doing
    with pytest.raises(ValueError, match=r"a.jsonl:2: not JSON"):
        read([path], MODEL, words)


def test_unusable_sequences_are_counted(tmp_path, words):
    n = MODEL.max_positions
    path = write(
        tmp_path / "a.jsonl",
        ids([3] * (n - 1), [4]),
        ids([3] * n, [4]),
        ids([3], [4]),
        ids([], [4, 5, 6]),
        ids([3, 4, 5], []),
    )
    trace = read([path], MODEL, words)
    assert (len(trace.responses), trace.too_long, trace.too_short) == (1, 1, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1, 2]", "expected an object"),
        ({"prompt": "1", "answer": "2"}, "expected prompt_ids as a list of tokens"),
        (ids([1], "text"), "expected response_ids as a list"),
        (ids([1], [1.0]), "expected response_ids as a list"),
        (ids([1, MODEL.vocab_size], [1]), "0 … 23, got 24 in prompt_ids"),
        (ids([1], [2, -1]), "got -1 in response_ids"),
        ({"prompt": ["1"], "completion": "2"}, "expected prompt and completion as texts, got list"),
        (ids([1], [1]), "nothing to learn from"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, words, row, message):
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(ValueError, match=message) as raised:
        read([path], MODEL, words)
    assert str(path) in str(raised.value)


def test_a_trace_that_is_not_there(tmp_path, words):
    with pytest.raises(FileNotFoundError, match="run folder with a samples.jsonl"):
        read([tmp_path], MODEL, words)
    with pytest.raises(FileNotFoundError, match="a file or a run folder, found none"):
        read([tmp_path / "none.jsonl"], MODEL, words)


def responses_of(groups):
    arrays = (np.zeros(2, np.int32), np.zeros(3, np.int32))
    return [Response(str(i), group, *arrays) for i, group in enumerate(groups)]


@given(
    groups=st.lists(st.integers(0, 5), min_size=2, max_size=20),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 3),
)
def test_whole_prompts_are_held_out_as_many_as_asked_for(groups, share, seed):
    responses = responses_of(groups)
    kept, held = hold_out(responses, share, seed)
    assert sorted([*kept, *held], key=responses.index) == responses
    for part in (kept, held):
        assert part and [responses.index(r) for r in part] == sorted(map(responses.index, part))
    names = [r.group_id if len(set(groups)) > 1 else r.name for r in responses]
    sides = [{names[responses.index(r)] for r in part} for part in (kept, held)]
    assert not sides[0] & sides[1]
    enough = sum(map(num_tokens, held)) >= share * sum(map(num_tokens, responses))
    assert enough or len(sides[0]) == 1  # one prompt is left to learn from
    again = hold_out(responses, share, seed)
    assert [r.name for r in again[1]] == [r.name for r in held]


def test_no_more_is_held_out_than_asked_for():
    kept, held = hold_out(responses_of(range(20)), 0.1, 0)
    assert (len(kept), len(held)) == (18, 2)
    other = hold_out(responses_of(range(20)), 0.1, 1)[1]
    assert [r.name for r in other] != [r.name for r in held]


def test_nothing_is_held_out_where_none_is_asked_for():
    responses = responses_of([0])
    assert hold_out(responses, 0.0, 0) == (responses, [])
    with pytest.raises(ValueError, match="two sequences or more"):
        hold_out(responses, 0.1, 0)


def test_texts_of_a_policy_without_an_end_token_get_none(tmp_path, words):
    path = write(tmp_path / "a.jsonl", {"prompt": "1+", "completion": "2", "finish_reason": "stop"})
    endless = dataclasses.replace(MODEL, eos_token_ids=())
    assert pairs(read([path], endless, words)) == [(words.encode("1+"), words.encode("2"))]
