"""Any value of an environment, and any turn with calls of tools, is an answer or an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.rl.environments.pool import Answer, read_answer
from reprise.rl.environments.server import EpisodeFailed
from reprise.rl.environments.user_environment import MAX_CHARACTERS, UserEnvironment, WrongAnswer

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.sampled_from(["messages", "reward", "done", "role", "content", "name"]) | st.text()
VALUES = st.recursive(
    SCALARS
    | st.just("a" * (MAX_CHARACTERS + 1))
    | st.just([{"role": "user", "content": ""}] * 300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
CALLS = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', "{", "}"])
TURNS = st.lists(CALLS | st.text(max_size=8) | VALUES.map(repr), max_size=12).map("".join)


class Answers:
    """An environment that returns the values that it is given."""

    def __init__(self, value):
        self.value = value

    def reset(self):
        return self.value

    def step(self, completion):
        return self.value

    def get_reward(self):
        return self.value


class Adds:
    def reset(self):
        return None

    def add(self, a: int, b: int):
        return a + b


def check(answer):
    """An answer is JSON, and the pool can read it."""
    read = read_answer(json.loads(json.dumps(answer, allow_nan=False)), 0.0)
    assert isinstance(read, Answer)
    assert all(set(message) <= {"role", "content", "name"} for message in read.messages)


@settings(max_examples=500, deadline=None)
@given(VALUES)
def test_any_value_is_an_answer_or_wrong(value):
    environment = UserEnvironment(lambda: Answers(value))
    for call in (lambda: environment.reset({}), lambda: environment.step("a"), environment.score):
        try:
            answer = call()
        except WrongAnswer as error:
            assert len(str(error)) < 1000
        else:
            check(answer)


@settings(max_examples=500, deadline=None)
@given(TURNS)
def test_any_turn_has_an_answer(text):
    check(UserEnvironment(Adds).step(text))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "done", "reward", "calls", "text"]), VALUES))
def test_any_line_of_a_process_is_an_answer_or_breaks_the_protocol(answer):
    try:
        read_answer(answer, 0.0)
    except EpisodeFailed as failed:
        assert failed.kind == "protocol"


@pytest.mark.parametrize("depth", [65, 10_000, 100_000])
def test_nested_arguments_are_an_error(depth):
    value = "[" * depth + "]" * depth
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    answer = UserEnvironment(Adds).step(text)
    assert answer["failed_calls"] == 1 and "levels" in answer["messages"][0]["content"]
