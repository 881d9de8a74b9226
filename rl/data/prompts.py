"""The examples that a step trains on, and the tokens of their prompts.

Invariant: the order is a pure function of (seed, cursor). The cursor counts the examples
consumed so far; a checkpoint saves nothing else of the data.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from models.tokenizer import Tokenizer
from rl.data.tasks import Example, Task, TaskConfig

MOST_PASSED_OVER = 1000  # prompts in a row that are too long: hardly any would fit


@dataclasses.dataclass(frozen=True)
class DataOrder:
    """A new permutation of all examples in every epoch.

    Position c of the sequence is example π_e(c mod n) with e = c // n, and π_e drawn
    from (seed, e). Batches run over epoch ends without dropping or repeating.
    """

    num_examples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(
                f"the data set is empty: expected 1 example or more, got {self.num_examples}"
            )
        if self.seed < 0:
            raise ValueError(f"the data seed must be 0 or more, got {self.seed}")

    def indices(self, cursor: int, count: int) -> np.ndarray:
        """Return the example indices at positions cursor … cursor+count−1, int64 [count].

        Raises ValueError for a negative cursor or count.
        """
        if cursor < 0 or count < 0:
            raise ValueError(f"cursor and count must be 0 or more, got {cursor} and {count}")
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
    """Return the `count` examples of the step at `cursor`; the next cursor is cursor + count.

    Raises ValueError if the order is of another number of examples.
    """
    if len(task) != order.num_examples:
        raise ValueError(
            f"the task has {len(task)} examples but its order was made for {order.num_examples}; "
            "a resumed run needs the same data files and Task.size"
        )
    return tuple(task[int(index)] for index in order.indices(cursor, count))


def encode_prompt(tokenizer: Tokenizer, example: Example, config: TaskConfig) -> tuple[int, ...]:
    """Return the token ids of an example's prompt.

    They are the system prompt (unless the example has one) and the example's messages, the
    last one ending with the suffix once: in the tokenizer's chat template if `Task.chat` says
    so, else joined by blank lines. Raises ValueError, which names the example, for a prompt
    that encodes to nothing or cannot be encoded, and for assistant turns without a template.
    """
    messages = _messages(example, config.system_prompt, config.prompt_suffix)
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
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def _messages(example: Example, system_prompt: str | None, suffix: str) -> list[dict[str, str]]:
    if isinstance(example.prompt, str):
        messages = [{"role": "user", "content": example.prompt}]
    else:
        messages = [dict(message) for message in example.prompt]
    if not messages[-1]["content"].endswith(suffix):  # many data files include the suffix
        messages[-1]["content"] += suffix
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
