"""An environment of a user, in its process: its calls, and checks of its results.

Two kinds of environments share this protocol:

    class Calculator:                                # tools, as TRL's environment_factory
        def reset(self, **columns) -> str | None: ...    # text to append to the question
        def add(self, a: int, b: int) -> int:            # every other public method is a tool
            '''Add two numbers.  (Google style, with Args)'''
        def get_reward(self) -> float: ...               # or the attribute `reward`

    class Guess:                                     # turns
        def reset(self, answer, **columns) -> list[Message] | str | None: ...
        def step(self, completion) -> list[Message] | str | Mapping | None: ...
        def get_reward(self) -> float: ...

`reset` gets the columns of the example that it names, or all with `**columns`; a parameter `row` is
the whole row. A text from `reset` is appended to the last message of the prompt, messages follow
it. After a turn with calls of tools, each tool is called, and its result is a message of the role
tool: `str(result)`, or `{'error': …}` if the tool raised. A turn without a call goes to `step`, or
ends the episode if there is no `step`. `step` returns messages or a text, which is a message of the
user; None ends the episode. A mapping can have `messages`, the `reward` of the turn, and `done`.

All functions may be async.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from reprise.models.text.tool_calls import ToolCall, read_calls
from reprise.rl.rewards.worker import read_value

Message = dict[str, str]  # role, content, and the name of a tool
NOT_TOOLS = frozenset(("reset", "step", "get_reward", "close"))
ROLES = ("user", "tool", "system")
ANSWER = frozenset(("messages", "reward", "done"))
MAX_MESSAGES = 256  # of an answer
MAX_CHARACTERS = 2**20  # of the messages of an answer
MAX_REWARDS = 64  # names of an episode
_SHOWN = 80


class WrongAnswer(ValueError):
    """An environment has returned a value that is none of the expected values."""


class UserEnvironment:
    """One object of a user's factory, for one episode."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._object = factory()
        kind = type(self._object).__name__
        if not callable(getattr(self._object, "reset", None)):
            raise WrongAnswer(f"expected an environment with reset(…), got a {kind} without it")
        self._tools = tools_of(self._object)
        self._step = getattr(self._object, "step", None)
        if self._step is None and not self._tools:
            raise WrongAnswer(f"expected {kind} to have step(completion), or a tool")

    def describe(self) -> dict[str, Any]:
        """Return the JSON schemas of the tools.

        Raises the errors of transformers for tools without types or descriptions.
        """
        if not self._tools:
            return {"tools": []}
        from transformers.utils.chat_template_utils import get_json_schema

        return {"tools": [get_json_schema(tool) for tool in self._tools.values()]}

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the episode of a row; return its messages, or the text to append to the prompt."""
        arguments = _wanted(self._object.reset, row)
        value = resolved(self._object.reset(**arguments))
        if isinstance(value, str):
            return {"messages": [], "text": _checked_text(value)}
        return {"messages": [] if value is None else _messages(value), "text": ""}

    def step(self, completion: str) -> dict[str, Any]:
        """Answer a turn of the policy; an answer that is done includes the reward."""
        calls = read_calls(completion) if self._tools else []
        failed = 0
        answer: dict[str, Any]
        if calls:
            results = [self._call(call) for call in calls]
            failed = sum(is_failed for _, is_failed in results)
            answer = _answer([message for message, _ in results])
        elif self._step is None:
            answer = _answer(None)
        else:
            answer = _answer(resolved(self._step(completion)))
        answer |= {"calls": len(calls), "failed_calls": failed}
        return answer | (self.score() if answer["done"] else {})

    def score(self) -> dict[str, Any]:
        """Return the reward of the episode by name; None if the environment has no reward."""
        if callable(getattr(self._object, "get_reward", None)):
            value = resolved(self._object.get_reward())
        else:
            value = getattr(self._object, "reward", None)
        values = dict(value) if isinstance(value, Mapping) else {"": value}
        if len(values) > MAX_REWARDS or not all(isinstance(name, str) for name in values):
            raise WrongAnswer(
                f"expected at most {MAX_REWARDS} rewards by name, got {_shown(value)}"
            )
        return {"rewards": {name: _number(x) for name, x in values.items()}}

    def _call(self, call: ToolCall) -> tuple[Message, bool]:
        """Return the message with the result of a tool, and whether the call has failed."""
        result: Any = None
        error = call.error
        if error is None and call.name not in self._tools:
            error = f"Tool {call.name} not found."
        if error is None:
            try:
                result = resolved(self._tools[call.name](**call.arguments))
            except Exception as raised:  # the policy sees the error, and learns from it
                error = str(raised)
        content = str(result) if error is None else str({"error": error})
        return {"role": "tool", "name": call.name, "content": content}, error is not None


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods that are tools, by name, in alphabetical order as TRL has them."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    return {
        name: method
        for name, method in methods
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def resolved(value: Any) -> Any:
    """Return the result of an async function, or any other value unchanged."""
    return _event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, shared by clients that an environment keeps."""
    return asyncio.new_event_loop()


def _wanted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a row that a function takes."""
    parameters = inspect.signature(function).parameters
    values = {"row": dict(row), **row}
    names = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names |= set(row)
    return {name: value for name, value in values.items() if name in names}


def _answer(value: Any) -> dict[str, Any]:
    """Return a value of `step` as messages, reward and done. Raises WrongAnswer."""
    if not isinstance(value, Mapping):
        value = {"messages": value}
    if not value.keys() <= ANSWER or not value:
        expected = ", ".join(sorted(ANSWER))
        raise WrongAnswer(f"expected a mapping with {expected}, got {_shown(dict(value))}")
    messages = value.get("messages")
    done = value.get("done", messages is None)
    if not isinstance(done, bool):
        raise WrongAnswer(f"expected done as True or False, got {_shown(done)}")
    if messages is None and not done:
        raise WrongAnswer("expected messages in an answer that is not done")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {
        "messages": [] if messages is None else _messages(messages),
        "reward": _number(value.get("reward")),
        "done": done,
    }


def _messages(value: Any) -> list[Message]:
    """Return messages with their known fields. Raises WrongAnswer."""
    if not isinstance(value, list | tuple):
        raise WrongAnswer(f"expected a text, a list of messages or None, got {_shown(value)}")
    if len(value) > MAX_MESSAGES:
        raise WrongAnswer(f"expected at most {MAX_MESSAGES} messages, got {len(value)}")
    messages = [_message(one) for one in value]
    _checked_text("".join(message["content"] for message in messages))
    return messages


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping) or not {"role", "content"} <= value.keys():
        raise WrongAnswer(f'expected {{"role": …, "content": …}}, got {_shown(value)}')
    if value["role"] not in ROLES:
        raise WrongAnswer(f"expected a role of {', '.join(ROLES)}, got {_shown(value['role'])}")
    fields = {name: value[name] for name in ("role", "content", "name") if name in value}
    if not all(isinstance(x, str) for x in fields.values()):
        raise WrongAnswer(f"expected a message of texts, got {_shown(dict(value))}")
    return fields


def _checked_text(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise WrongAnswer(f"expected at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    if any("\ud800" <= character <= "\udfff" for character in set(text)):
        raise WrongAnswer("expected whole characters, got half of a surrogate pair")
    return text


def _number(value: Any) -> float | None:
    number, kind, message = read_value(value)
    if kind is not None:
        raise WrongAnswer(f"a reward: {message}")
    return number


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:_SHOWN]!r}"
