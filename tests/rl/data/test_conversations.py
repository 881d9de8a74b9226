"""Conversations of data files: roles of all kinds, and no answer in a prompt."""

import json

import pytest

from reprise.rl.data.columns import find_layout, read_row
from reprise.rl.data.conversations import prompt_key
from reprise.rl.data.specs import parse_spec

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "x #### a"}
SYSTEM = {"role": "system", "content": "s"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x #### a"}]


def read(row, query=""):
    layout = find_layout(parse_spec(f"jsonl:x{query}"), row)
    return read_row(layout, row, "x:1")[:2]


def named(asker, answerer):
    return [{"role": asker, "content": "q"}, {"role": answerer, "content": "x #### a"}]


@pytest.mark.parametrize(
    "turns",
    [
        [USER, ANSWER],
        SHAREGPT,
        named("human", "gpt"),
        named("Human", "chatgpt"),
        named("prompter", "bot"),
        named("user", "model"),
        [{**turn, "role": None, "content": None} for turn in SHAREGPT],  # as Arrow fills it
        json.dumps([USER, ANSWER]),
        f" {json.dumps(SHAREGPT)}\n",
    ],
    ids=str,
)
def test_an_answer_is_an_answer_under_each_name_of_its_role(turns):
    for column in ("messages", "conversations", "conversation", "prompt"):
        assert read({column: turns}, "?answer_extract=hash") == ((USER,), "a")
        with pytest.raises(ValueError, match=r"^x:1: the prompt ends with a turn of the assistant"):
            read({column: turns, "answer": "a"})
        with pytest.raises(ValueError, match=r"^x:1: the prompt ends with a turn of the assistant"):
            read({column: turns}, "?answer=")


@pytest.mark.parametrize(
    "turns",
    [
        [SYSTEM, USER],
        [{"from": "system", "value": "s"}, SHAREGPT[0]],
        [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}],
        json.dumps([SYSTEM, USER]),
    ],
    ids=str,
)
def test_turns_are_in_the_roles_of_templates(turns):
    assert read({"prompt": turns, "answer": "a"}) == ((SYSTEM, USER), "a")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([SYSTEM], "ends with the user's turn, got a turn of the system"),
        ([USER, SYSTEM], "ends with the user's turn, got a turn of the system"),
        ([{"role": "user", "content": " "}], "role 'user' is empty"),
        ([USER, {"from": "gpt", "value": ""}, USER], "role 'gpt' is empty"),
        ([{"role": "user", "content": []}], "role 'user' is empty"),
        (named("critic", "gpt"), "role 'critic'; expected one of system, developer, user"),
        ([{"from": "observation", "value": "4"}], "role 'observation'; tools are not"),
        ([USER, {"role": "tool_response", "content": "4"}], "role 'tool_response'; tools are not"),
        ([{"role": 1, "content": "q"}], "messages, got"),
        (" ", "the prompt must be text"),
        (str([USER]), "expected a conversation as a list"),  # as Python prints it
        (json.dumps({"messages": [USER]}), "expected a conversation as a list"),
        (json.dumps(USER), "expected a conversation as a list"),
        (json.dumps([SYSTEM]), "ends with the user's turn, got a turn of the system"),
        ("[" * 100_000 + '"role": "content":' + "]", "expected a conversation as a list"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_conversations_are_refused(turns, message):
    with pytest.raises(ValueError, match=f"^x:1: .*{message}"):
        read({"prompt": turns, "answer": "a"})


def test_answers_without_a_question_are_refused():
    with pytest.raises(ValueError, match=r"user's turn, got a turn of the system"):
        read({"messages": [SYSTEM, ANSWER]})
    with pytest.raises(ValueError, match=r"messages that end with the assistant's answer"):
        read({"messages": [ANSWER]})


@pytest.mark.parametrize(
    "text",
    [
        'Of [{"role": "a", "content": "b"}], which is the role?',
        "[1, 2, 3]",
        '{"role": "a"}',
        "Print the content: of every role.",
    ],
)
def test_questions_about_json_stay_texts(text):
    assert read({"prompt": text, "answer": "a"}) == (text, "a")


def test_a_key_is_the_same_for_the_same_question():
    chat = (SYSTEM, {"role": "user", "content": "What  is\n2+2?"})
    assert prompt_key(chat) == prompt_key("what is 2+2? ") != prompt_key("what is 2+3?")
