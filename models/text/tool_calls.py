"""Calls of tools in the text of a turn, in the form of Hermes and Qwen.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The text is the policy's, so any text is possible: a call that cannot be read is a call with an
error.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

START = "<tool_call>"
MAX_CALLS = 64  # of a turn
MAX_DEPTH = 64  # of lists and objects
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool by name, or the reason why it cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in order; beyond `MAX_CALLS`, the last is an error.

    A call without its closing tag extends to the end of the text.
    """
    calls = list[ToolCall]()
    for match in _CALL.finditer(text):
        if len(calls) == MAX_CALLS:
            calls.append(ToolCall(error=f"expected at most {MAX_CALLS} calls in a turn"))
            break
        calls.append(_read(match[1]))
    return calls


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text, parse_constant=_refuse)
        return _checked(call)
    except RecursionError:
        return ToolCall(error="expected a call with fewer levels of lists and objects")
    except ValueError as error:
        return ToolCall(error=str(error))


def _checked(call: Any) -> ToolCall:
    """Return a call from its JSON value. Raises ValueError."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f'expected {{"name": …, "arguments": {{…}}}}, got {_shown(call)}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some policies write the arguments as a JSON text
        arguments = json.loads(arguments, parse_constant=_refuse)
    if not isinstance(arguments, dict):
        raise ValueError(f"expected arguments as an object, got {_shown(arguments)}")
    check_depth(arguments)
    return ToolCall(call["name"], arguments)


def check_depth(value: Any) -> None:
    """Raise ValueError for a JSON value that is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [y for x in inner for y in x if isinstance(y, dict | list)]
    if level:
        raise ValueError(f"expected lists and objects of at most {MAX_DEPTH} levels")


def _refuse(name: str) -> None:
    raise ValueError(f"expected a finite number, got {name}")


def _shown(value: Any) -> str:
    return json.dumps(value)[:_SHOWN]
