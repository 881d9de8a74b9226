"""Environments of users without a process: calls, results, schemas, and answers that are wrong."""

import json
from pathlib import Path

import pytest

from reprise.rl.environments.user_environment import UserEnvironment, WrongAnswer
from reprise.rl.runtime.user_files import load_user_name

PLUGINS = Path(__file__).parent / "plugins"
FAULTY = f"{PLUGINS / 'faults.py'}:Faulty"


def environment(name, file="games.py"):
    return UserEnvironment(load_user_name(f"{PLUGINS / file}:{name}"))


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_tools_have_the_schemas_of_transformers():
    described = environment("Calculator").describe()
    add, later = (tool["function"] for tool in described["tools"])
    assert (add["name"], later["name"]) == ("add", "later")
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a", "b"]
    first = {"type": "integer", "description": "The first number"}
    assert add["parameters"]["properties"]["a"] == first
    assert environment("Guess").describe() == {"tools": []}


def test_tools_are_called_and_their_results_are_messages():
    one = environment("Calculator")
    text = one.reset({"answer": "5", "question": "2+3"})["text"]
    assert text.startswith(" Use a tool.")
    answer = one.step(call("add", a=2, b=3) + call("later", a=5))
    assert answer["messages"] == [
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "later", "content": "5"},
    ]
    assert (answer["done"], answer["calls"], answer["failed_calls"]) == (False, 2, 0)
    last = one.step("It is 5.")
    assert last["done"] and last["rewards"] == {"": 1.0}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("subtract", a=1), "{'error': 'Tool subtract not found.'}"),
        (call("_hidden"), "{'error': 'Tool _hidden not found.'}"),
        (call("reset"), "{'error': 'Tool reset not found.'}"),
        (call("add", a=1), "missing 1 required positional argument: 'b'"),
        (call("add", a=1, b="x"), "unsupported operand"),
        ("<tool_call>add", "{'error': 'Expecting value"),
    ],
)
def test_a_call_that_fails_is_a_message_with_the_error(text, error):
    one = environment("Calculator")
    one.reset({"answer": "5"})
    answer = one.step(text)
    [message] = answer["messages"]
    assert error in message["content"] and message["content"].startswith("{'error': ")
    assert (answer["done"], answer["calls"], answer["failed_calls"]) == (False, 1, 1)


def test_a_game_in_turns_has_rewards_of_turns_and_of_the_episode():
    one = UserEnvironment(load_user_name(f"{PLUGINS / 'games.py'}:make_guess"))
    start = one.reset({"answer": "4"})
    assert start == {"messages": [{"role": "user", "content": "Guess a number."}], "text": ""}
    low = one.step("3")
    assert low["messages"] == [{"role": "user", "content": "\nhigher\n"}]
    assert (low["reward"], low["done"]) == (-0.1, False)
    found = one.step("4")
    assert found["done"] and found["messages"] == [] and found["rewards"] == {"": 1.0}
    assert found["reward"] is None


def test_rewards_may_have_names():
    one = environment("Dice")
    one.reset({})
    rewards = one.score()["rewards"]
    assert set(rewards) == {"luck", "none"} and rewards["none"] is None


def test_an_environment_gets_the_columns_that_it_takes():
    class Some:
        def reset(self, answer, row, size=3):
            self.seen = answer, row, size

        def step(self, completion):
            return None

    class All:
        def reset(self, **columns):
            self.seen = columns

        def step(self, completion):
            return None

    row = {"answer": "1", "size": 2, "other": [1]}
    seen = []
    for kind in (Some, All):
        made = kind()
        UserEnvironment(lambda made=made: made).reset(row)
        seen.append(made.seen)
    assert seen == [("1", row, 2), row]


@pytest.mark.parametrize(
    "text",
    [
        *("number", "bytes", "roles", "content", "no content", "surrogate", "long", "many"),
        *("unknown", "empty", "not done", "done", "reward", "nan"),
    ],
)
def test_a_wrong_answer_is_refused(text):
    one = UserEnvironment(load_user_name(FAULTY))
    one.reset({"answer": "a"})
    with pytest.raises(WrongAnswer, match="expected"):
        one.step(text)


def test_a_reward_that_is_no_number_is_refused():
    one = UserEnvironment(load_user_name(FAULTY))
    one.reset({"answer": "later: text reward"})
    with pytest.raises(WrongAnswer, match="a reward: expected a number"):
        one.step("end")


@pytest.mark.parametrize(
    ("name", "message"),
    [("NoReset", "reset"), ("NoStep", r"step\(completion\), or a tool")],
)
def test_an_object_that_is_no_environment_is_refused(name, message):
    with pytest.raises(WrongAnswer, match=message):
        environment(name, "faults.py")


def test_tools_without_types_have_no_schema():
    with pytest.raises(Exception, match="missing a type hint"):
        environment("Untyped", "faults.py").describe()


def test_an_error_of_the_environment_passes():
    one = UserEnvironment(load_user_name(FAULTY))
    with pytest.raises(RuntimeError, match="environment bug"):
        one.reset({"answer": "raise"})
    with pytest.raises(SystemExit):
        one.step("sys_exit")
