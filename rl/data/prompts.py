"""The examples that a step trains on, a pure function of (seed, cursor), and their tokens."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from models.tokenizer import Tokenizer
from rl.data.tasks import Example, Task, TaskConfig

MAX_PASSED_OVER = 1000  # prompts in a row that are too long: hardly any would fit


class UnreadableExample(RuntimeError):
    """An example that cannot be read, or encoded, during a run: its file has changed, perhaps."""


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
            cursor, count = cursor + len(pieces[-1]), count - len(pieces[-1])
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


def encode_prompt(tokenizer: Tokenizer, example: Example, config: TaskConfig) -> tuple[int, ...]:
    """Return the token ids of an example's prompt.

    System prompt (unless the example has one) and messages, the last one ending with the suffix
    once: in the tokenizer's chat template if `Task.chat` says so, else joined by blank lines after
    the tokens that the tokenizer puts before a text.
    Raises ValueError, which names the example, for a prompt without tokens, one that cannot be
    encoded, and for assistant turns without a template.
    """
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
            variables = dict(config.chat_template_kwargs)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
        else:
            ids = _encode_plainly(tokenizer, messages)
        if not ids:
            raise ValueError("the prompt encodes to no tokens")
    except ValueError as error:
        raise ValueError(f"{example.example_id}: {error}") from error
    return tuple(int(token) for token in ids)


def _encode_plainly(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    if any(message["role"] not in ("system", "user") for message in messages):
        raise ValueError(
            "the prompt has assistant turns, but no chat template to mark them: expected a "
            'tokenizer with one and Task.chat other than "none", or text prompts'
        )
    return tokenizer.encode_prompt("\n\n".join(message["content"] for message in messages))
