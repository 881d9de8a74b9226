"""Worked solutions for the tasks of the base policy.

A response is lines of working, `#### ANSWER`, and the end token that the caller adds. Each line
depends only on the question and the line before, so that a model of characters can learn it.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Entry = Mapping[str, Any]  # a reasoning-gym entry: question, answer, metadata

PROMPT_SUFFIX = "\n"  # between question and response; RL's `Task.prompt_suffix` must equal it
ANSWER_MARK = "#### "
# reasoning-gym draws entry i from Random(seed + i). RL's seeds are hashes below 2**32
# (rl/data/reasoning_gym_tasks.py); ours are above: the first million for evaluation, then one
# million a training stream.
EVAL_SEED = 2**33
STREAM_EXAMPLES = 1_000_000


def gcd_steps(entry: Entry) -> list[str]:
    """Subtract as Euclid did: `a-b=c` with a ≥ b, then the same with b and c, until c < 2."""
    low, high = sorted(entry["metadata"]["numbers"])
    lines = []
    while low > 1:
        rest = high - low
        lines.append(f"{high}-{low}={rest}")
        low, high = sorted((low, rest))
    return lines


def chain_sum_steps(entry: Entry) -> list[str]:
    """Rewrite the sum with its first two terms added: `4-1-7`, then `3-7`."""
    running, *rest = entry["metadata"]["expression"].split()
    lines = []
    while rest:
        lines.append(running + "".join(rest))
        sign, term, *rest = rest
        running = str(int(running) + int(sign + term))
    return lines


def count_bits_steps(entry: Entry) -> list[str]:
    """Halve repeatedly: `n=2*h+bit`, then the count of 1 bits so far after a blank."""
    number, count = entry["metadata"]["number"], 0
    lines = []
    while number:
        half, bit = divmod(number, 2)
        count += bit
        lines.append(f"{number}=2*{half}+{bit} {count}")
        number = half
    return lines


def spell_backward_steps(entry: Entry) -> list[str]:
    """Move the last letter over, one a line: `wor d`, `wo dr`, `w dro`."""
    word = entry["metadata"]["word"]
    return [f"{word[:-n]} {word[: -n - 1 : -1]}" for n in range(1, len(word))]


@dataclasses.dataclass(frozen=True)
class WorkedTask:
    """A reasoning-gym task and its settings, a writer of its working, its share of examples."""

    name: str
    options: Mapping[str, int]
    steps: Callable[[Entry], list[str]]
    weight: int = 1

    @property
    def spec(self) -> str:
        """The task as RL's configuration names it, `reasoning_gym:NAME?key=value&…`."""
        return f"reasoning_gym:{self.name}?" + "&".join(f"{k}={v}" for k, v in self.options.items())

    def dataset(self, seed: int, size: int) -> Any:
        """Return the reasoning-gym data set: entries, and `score_answer`."""
        import reasoning_gym

        return reasoning_gym.create_dataset(self.name, seed=seed, size=size, **self.options)

    def response(self, entry: Entry, *, is_worked: bool) -> str:
        """Return the worked or direct response to an entry, without an end token."""
        steps = self.steps(entry) if is_worked else []
        return "\n".join([*steps, f"{ANSWER_MARK}{entry['answer']}"])


TASKS: tuple[WorkedTask, ...] = (
    WorkedTask(
        "gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99}, gcd_steps
    ),
    WorkedTask(
        "chain_sum",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        chain_sum_steps,
        weight=2,
    ),
    WorkedTask("count_bits", {"min_n": 1, "max_n": 127}, count_bits_steps),
    WorkedTask("spell_backward", {"min_word_len": 3, "max_word_len": 7}, spell_backward_steps),
)


@dataclasses.dataclass(frozen=True)
class SolvedExample:
    """A prompt (question and suffix), the bare problem in it, and a response."""

    task: WorkedTask
    prompt: str
    stem: str
    response: str


def stem(prompt: str) -> str:
    """Return the bare problem of a question of `TASKS`: `98, 58.` of a gcd question."""
    problem = re.split(r": (?=\d|\w+\n$)|the number ", prompt)[-1]
    return problem.replace(" Give only the GCD as your final answer.", "")


def examples(stream: int, direct_fraction: float) -> Iterator[SolvedExample]:
    """Yield a million examples, a function of the arguments; streams share no question's seed.

    Tasks are drawn by weight; a response is direct with probability `direct_fraction`.
    """
    rng = random.Random(stream)
    seed = EVAL_SEED + (1 + stream) * STREAM_EXAMPLES
    datasets = {task.name: task.dataset(seed, STREAM_EXAMPLES) for task in TASKS}
    weights = [task.weight for task in TASKS]
    for index in range(STREAM_EXAMPLES):
        (task,) = rng.choices(TASKS, weights)
        is_worked = rng.random() >= direct_fraction
        entry = datasets[task.name][index]
        prompt = entry["question"] + PROMPT_SUFFIX
        response = task.response(entry, is_worked=is_worked)
        yield SolvedExample(task, prompt, stem(prompt), response)
