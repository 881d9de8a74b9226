"""The examples that a step trains on, a pure function of (seed, cursor), and their tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.tasks import Example, Task, TaskConfig

MAX_PASSED_OVER = 1000  # consecutive prompts that are too long: hardly any would fit


class UnreadableExample(RuntimeError):
    """An example that cannot be read or encoded during a run, perhaps because its file changed."""


@dataclasses.dataclass(frozen=True)
class DataOrder:
    """A new permutation of all examples in every epoch e, drawn from (seed, e), without gaps."""

    num_examples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"the data set is empty: expected an example, got {self.num_examples}")
        if self.seed < 0:
            raise ValueError(f"the data seed must be 0 or more, got {self.seed}")

    def indices(self, cursor: int, count: int) -> np.ndarray:
        """Return the example indices at positions cursor … cursor+count−1, int64 [count]."""
        assert cursor >= 0 and count >= 0
        pieces = [np.empty(0, np.int64)]
        while count:
            epoch, start = divmod(cursor, self.num_examples)
            pieces.append(_permutation(self.num_examples, self.seed, epoch)[start : start + count])
            cursor = cursor + len(pieces[-1])
            count = count - len(pieces[-1])
        return np.concatenate(pieces)


@functools.lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy promises its bit streams across releases, not Generator.permutation: sort raw
    # 64-bit bits (ties are practically impossible, and the sort is stable).
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_examples)
    order = np.argsort(bits, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def prompts_for_step(task: Task, order: DataOrder, cursor: int, count: int) -> tuple[Example, ...]:
    """Return the `count` examples of the step at `cursor`; the next cursor is cursor + count."""
    assert len(task) == order.num_examples
    return tuple(task[int(index)] for index in order.indices(cursor, count))


def encode_prompt(
    tokenizer: Tokenizer,
    example: Example,
    config: TaskConfig,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Return the token ids of the prompt of an example; `tools` are shown by the chat template.

    The prompt is the system prompt (unless the example has one) and the messages, with the suffix
    once at the end of the last message. These are rendered by the chat template of the tokenizer if
    `Task.chat` says so, else joined by blank lines after the tokens that the tokenizer puts before
    a text. A text that is already in the template is encoded unchanged. Raises ValueError, which
    names the example, for a prompt without tokens, a prompt that cannot be encoded, assistant turns
    without a template, and messages with marks of the template.
    """
    if is_rendered(tokenizer, example, config):
        return tuple(_encode_plainly(tokenizer, [{"role": "user", "content": str(example.prompt)}]))
    if isinstance(example.prompt, str):
        messages = [{"role": "user", "content": example.prompt}]
    else:
        messages = [dict(message) for message in example.prompt]
    if not messages[-1]["content"].endswith(config.prompt_suffix):  # many data files include it
        messages[-1]["content"] += config.prompt_suffix
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    uses_template = config.uses_template(is_plain=isinstance(example.prompt, str))
    try:
        if tokenizer.has_chat_template and uses_template:
            _check_marks(tokenizer, messages)
            variables: dict[str, Any] = dict(config.chat_template_kwargs)
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tools=tools, **variables
            )
        else:
            ids = _encode_plainly(tokenizer, messages)
        if not ids:
            raise ValueError("the prompt encodes to no tokens")
    except ValueError as error:
        raise ValueError(f"{example.example_id}: {error}") from error
    return tuple(map(int, ids))


def is_rendered(tokenizer: Tokenizer, example: Example, config: TaskConfig) -> bool:
    """Return whether a prompt is a text that is in the chat template already.

    Raises ValueError, which names the example, if settings would add to the text.
    """
    text = example.prompt
    uses_template = tokenizer.has_chat_template and config.uses_template(is_plain=True)
    if not (isinstance(text, str) and uses_template and tokenizer.is_rendered(text)):
        return False
    added = {
        "system_prompt": config.system_prompt is not None,
        "prompt_suffix": bool(config.prompt_suffix),
        "chat_template_kwargs": bool(config.chat_template_kwargs),
    }
    if names := [name for name, is_set in added.items() if is_set]:
        raise ValueError(
            f"{example.example_id}: the text is in the chat template already, and Task.{names[0]} "
            "cannot be added: expected the question alone, or no such setting"
        )
    return True


def _check_marks(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
    """Raise ValueError for a message that would close its turn."""
    for message in messages:
        if marks := sorted(mark for mark in tokenizer.chat_marks if mark in message["content"]):
            raise ValueError(
                f"a message of the role {message['role']} holds {marks[0]!r}, which marks turns in "
                "the chat template, so that it would end its turn: expected the message alone; "
                'texts that are rendered already need Task.chat="messages"'
            )


def _encode_plainly(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    if any(message["role"] not in ("system", "user") for message in messages):
        raise ValueError(
            "the prompt has assistant turns, but no chat template to mark them: expected a "
            'tokenizer with one and Task.chat other than "none", or text prompts'
        )
    return tokenizer.encode_prompt("\n\n".join(message["content"] for message in messages))
