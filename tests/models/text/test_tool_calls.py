"""Calls in any text of a policy: read, or an error that it can learn from; never an exception."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.models.text.tool_calls import MAX_CALLS, MAX_DEPTH, ToolCall, read_calls


def written(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_calls_are_read_in_order():
    first = {"name": "add", "arguments": {"a": 1, "b": [2.5, None, "</tool>"]}}
    second = {"name": "now"}
    text = f"Let me see. {written(first)}{written(second)}<|im_end|>"
    assert read_calls(text) == [
        ToolCall("add", {"a": 1, "b": [2.5, None, "</tool>"]}),
        ToolCall("now", {}),
    ]
    assert read_calls("no call: {'name': 'add'}") == []


def test_a_call_may_lack_its_closing_tag():
    assert read_calls('<tool_call>{"name": "add"}') == [ToolCall("add")]


def test_arguments_may_be_a_json_text():
    call = {"name": "add", "arguments": '{"a": 1}'}
    assert read_calls(written(call)) == [ToolCall("add", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Expecting value"),
        ("add(1, 2)", "Expecting value"),
        ("[1]", 'expected {"name"'),
        ('{"name": 5}', 'expected {"name"'),
        ('{"arguments": {}}', 'expected {"name"'),
        ('{"name": "add", "arguments": [1]}', "expected arguments as an object"),
        ('{"name": "add", "arguments": "[1"}', "Expecting"),
        ('{"name": "add", "arguments": {"a": NaN}}', "finite"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "finite"),
        ('{"name": "add", "arguments": ' + "[" * 100_000, "levels"),
        (
            '{"name": "add", "arguments": {"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}",
            "levels",
        ),
    ],
    ids=[str(i) for i in range(11)],
)
def test_a_call_that_cannot_be_read_is_an_error(text, error):
    [call] = read_calls(f"<tool_call>{text}</tool_call>")
    assert error in call.error and not call.name


def test_a_turn_has_a_limit_of_calls():
    calls = read_calls(written({"name": "add"}) * (MAX_CALLS + 5))
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1].error == f"expected at most {MAX_CALLS} calls in a turn"


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "x", "1e999"]))
)
def test_any_text_is_read(pieces):
    for call in read_calls("".join(pieces)):
        assert (call.error is None) == bool(call.name)
