"""A calculator that completes lines of working such as `65-5=`, for our system and for TRL.

A turn that ends with `=` calls the tool, any other turn ends the episode, in both systems. TRL's
part is a tokenizer that prints and parses such calls, since the policy has no chat template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

CALL = "="  # the end of a turn that calls the tool
_DIFFERENCE = re.compile(r"(\d{1,6})-(\d{1,6})=$")

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- message.content + '\n' -}}
{%- else -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- call.function.name + (call.function.arguments | tojson) -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""


def completed(text: str) -> str:
    """Return the rest of a line of working that ends with `=`, without its line break."""
    found = _DIFFERENCE.search(text)
    return str(int(found[1]) - int(found[2])) if found else "?"


class Calculator:
    """The environment of our system: `step` gets the text of a turn."""

    def reset(self, answer: str, **columns: Any) -> None:
        """Keep the answer of the row; the prompt is the question."""
        self.answer = answer.strip()
        self.is_right = False

    def step(self, completion: str) -> str | None:
        """Return the rest of the line; None ends the episode."""
        if completion.endswith(CALL):
            return completed(completion) + "\n"
        self.is_right = "####" in completion and (
            completion.rpartition("####")[2].split("\n", 1)[0].strip() == self.answer
        )
        return None

    def get_reward(self) -> float:
        """Return 1 if the answer after #### is right."""
        return float(self.is_right)


class Tool:
    """The environment of TRL: the same calculator as a tool."""

    def reset(self, **columns: Any) -> None:
        """Keep nothing: the reward reads the last turn."""

    def complete(self, line: str) -> str:
        """
        Complete a line of working.

        Args:
            line: The line up to its equals sign

        Returns:
            The rest of the line.
        """
        return completed(line)


def parsed(text: str) -> dict[str, Any]:
    """Return a turn as TRL's parsers return it: a call of the tool, or a text."""
    if not text.endswith(CALL):
        return {"role": "assistant", "content": text}
    function = {"name": Tool.complete.__name__, "arguments": {"line": text}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def last_turns(completions: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return the last turn of each dialogue of TRL, empty if it calls the tool."""
    return [messages[-1]["content"] if messages else "" for messages in completions]
