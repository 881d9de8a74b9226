"""Messages of an environment as token ids, appended to the ids of an episode.

An episode is never decoded and encoded again: the ids of a turn stay as the policy drew them, and
only new messages are rendered. The new text is the part that the chat template prints after a turn:

    template(user "?", assistant SENTINEL, messages, with the start of the next turn)
        = … SENTINEL <|im_end|>\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n
                     └ closes the turn; left out if the policy has drawn it

Without a template, texts are appended as they are. `check` refuses templates if their text after
a turn depends on the turn, or if they print earlier turns in another way once a message follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from reprise.models.formats.hf_files import shown
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.prompts import encode_prompt
from reprise.rl.data.tasks import Example, TaskConfig

Message = Mapping[str, str]
SENTINEL = "reprise-turn-of-the-policy"
_OTHER = "reprise-other-turn"
_PASSES = 4  # of replacing a mark
_QUESTION = {"role": "user", "content": "?"}
_FIX = (
    "set Task.chat_template to a template that always prints a turn in the same way, or "
    'Environment.history = "append" to accept the difference'
)


@dataclasses.dataclass(frozen=True, eq=False)
class TurnRenderer:
    """Renders the prompt and the later messages of episodes; `tools` are JSON schemas."""

    tokenizer: Tokenizer
    task: TaskConfig
    tools: Sequence[Mapping[str, Any]] = ()

    def uses_template(self, example: Example) -> bool:
        """Return whether the chat template renders the episodes of an example."""
        is_plain = isinstance(example.prompt, str)
        return self.tokenizer.has_chat_template and self.task.uses_template(is_plain=is_plain)

    def prompt(
        self, example: Example, messages: Sequence[Message] = (), text: str = ""
    ) -> tuple[int, ...]:
        """Return the ids of the prompt of an example, with the messages and text of `reset`.

        The text continues the last message of the example. Raises ValueError as `encode_prompt`.
        """
        safe = [self._safe(message) for message in messages]
        text = self._safe_text(text)
        if not self.uses_template(example):
            text += "".join(message["content"] for message in safe)
            safe = []
        return encode_prompt(self.tokenizer, with_reset(example, safe, text), self.task, self.tools)

    def after(
        self, turn_ids: Sequence[int], messages: Sequence[Message], *, uses_template: bool
    ) -> list[int]:
        """Return the ids that follow a turn of the policy: its close, and new messages.

        Raises ValueError if the template cannot render the messages.
        """
        if not uses_template:
            return self.tokenizer.encode("".join(message["content"] for message in messages))
        text = self._text_after(SENTINEL, [self._safe(message) for message in messages])
        end = self._closing_end(text)
        ids = self._encoded_after_end(end, text)
        is_closed = bool(turn_ids) and end is not None and turn_ids[-1] == end
        return ids[1:] if is_closed else ids

    def check(self, example: Example, history: Literal["exact", "append"]) -> None:
        """Raise ValueError, with the reason, for a template that cannot append messages.

        With `history="append"`, earlier turns may be printed in another way.
        """
        if not self.uses_template(example):
            return
        kinds = [[{"role": "user", "content": "a"}]]
        if self.tools:
            kinds.append([{"role": "tool", "name": "a", "content": "a"}])
        for messages in kinds:
            role = messages[0]["role"]
            text = self._text_after(SENTINEL, messages)
            if text != self._text_after(_OTHER, messages):
                raise ValueError(
                    f"the chat template prints a message of the role {role} in a way that depends "
                    "on the turn before it, so that it cannot be appended to a turn: set "
                    "Task.chat_template to another template"
                )
            end = self._closing_end(text)
            if end is None:
                raise ValueError(
                    "the chat template closes a turn with "
                    f"{shown(text[:20])}, which is none of the end tokens of the policy: set "
                    "Task.chat_template to a template that closes turns with an end token"
                )
            self._encoded_after_end(end, text)
            if history == "exact":
                self._check_history(messages)

    def _check_history(self, messages: Sequence[Message]) -> None:
        """Raise ValueError unless each rendering starts with the shorter renderings."""
        turn = {"role": "assistant", "content": SENTINEL}
        asked = self._render([_QUESTION], is_open=True)
        answered = self._render([_QUESTION, turn], is_open=False)
        followed = self._render([_QUESTION, turn, *messages], is_open=True)
        for before, after, what in (
            (asked + SENTINEL, answered, "a turn of the policy"),
            (answered, followed, f"a message of the role {messages[0]['role']}"),
        ):
            if not after.startswith(before):
                at = next(
                    (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                    min(len(before), len(after)),
                )
                raise ValueError(
                    f"the chat template prints a dialogue in another way once {what} follows: "
                    f"expected {shown(before[at : at + 40])}, got {shown(after[at : at + 40])}; "
                    f"fix: {_FIX}"
                )

    def _text_after(self, turn: str, messages: Sequence[Message]) -> str:
        """Return the text that the template prints after a turn, with new messages."""
        assistant = {"role": "assistant", "content": turn}
        text = self._render([_QUESTION, assistant, *messages], is_open=True)
        _, *rest = text.split(turn)
        if len(rest) != 1:
            raise ValueError(
                f"expected a chat template that prints a turn of the policy once, got one that "
                f"prints it {len(rest)} times: set Task.chat_template to another template"
            )
        return rest[0]

    def _render(self, messages: Sequence[Message], *, is_open: bool) -> str:
        return self.tokenizer.render_chat_template(
            messages,
            add_generation_prompt=is_open,
            tools=self.tools,
            **dict(self.task.chat_template_kwargs),
        )

    def _closing_end(self, text: str) -> int | None:
        """Return the end token of the policy that a text starts with, if any; the longest."""
        ends = [(self._end_text(end), end) for end in self.tokenizer.eos_token_ids]
        found = [(len(word), end) for word, end in ends if word and text.startswith(word)]
        return max(found)[1] if found else None

    def _end_text(self, end: int) -> str:
        return self.tokenizer.decode([end], skip_ends=False)

    def _encoded_after_end(self, end: int | None, text: str) -> list[int]:
        """Return the ids of a text that starts with an end token. Raises ValueError.

        A tokenizer may treat the first word of a text in another way, so the end token is encoded
        with the text.
        """
        ids = self.tokenizer.encode(text)
        if end is not None and (not ids or ids[0] != end):
            raise ValueError(
                f"expected the tokenizer to encode {shown(self._end_text(end))} before a text as "
                f"the token {end}, got {ids[:3]}: no turn could be appended"
            )
        return ids

    def _safe(self, message: Message) -> dict[str, str]:
        return {name: self._safe_text(value) for name, value in message.items()}

    def _safe_text(self, text: str) -> str:
        """Return a text without marks of the template, which would close its message."""
        return without_marks(text, self.tokenizer.chat_marks)


def without_marks(text: str, marks: Collection[str]) -> str:
    """Return a text without marks: a space breaks up each of these.

    A policy may write a mark, and an environment may repeat the words of the policy.
    """
    for mark in sorted(marks, key=len, reverse=True):
        for _ in range(_PASSES):  # a mark may overlap itself
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        while mark in text:  # a mark with spaces
            text = text.replace(mark, "")
    return text


def with_reset(example: Example, messages: Sequence[Message], text: str) -> Example:
    """Return an example with the messages and the text of `reset` after its prompt."""
    prompt: Any = example.prompt
    if text and isinstance(prompt, str):
        prompt = prompt + text
    elif text:
        last = dict(prompt[-1])
        prompt = (*prompt[:-1], last | {"content": last["content"] + text})
    if messages:
        first = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        prompt = (*first, *messages)
    return dataclasses.replace(example, prompt=prompt)
