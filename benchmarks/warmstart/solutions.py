"""Worked solutions, written out step by step, for the tasks of the shipped base policy.

A response is some lines of working, `#### ANSWER`, and (added by the tokenizer's
user) the end token. Every line of working is true on its own and depends only on
the question and the line before, so that a model of characters can learn it.
`direct` responses leave the working out: a policy that has seen both styles starts
out answering rashly part of the time, which is the easiest thing for RL to mend.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

Style = Literal["worked", "direct"]
Entry = Mapping[str, Any]  # a reasoning-gym entry: question, answer, metadata

PROMPT_SUFFIX = "\n"  # between question and response; RL's `Task.prompt_suffix` must equal it
ANSWER_MARK = "#### "

# reasoning-gym draws entry i of a data set from Random(seed + i). The seeds of RL's
# tasks are hashes below 2**32 (rl/data/reasoning_gym_tasks.py); all of ours are above: the
# first million for measuring the base policy, the others for making it.
FIRST_SEED = 2**33


@dataclasses.dataclass(frozen=True)
class WorkedTask:
    """A reasoning-gym task that has a writer of worked solutions; `options` are its settings.

    `weight` is its share of the warm start's examples, relative to the others.
    """

    name: str
    options: tuple[tuple[str, int], ...]
    weight: int = 1

    @property
    def spec(self) -> str:
        """The task as RL's configuration names it, `reasoning_gym:NAME?key=value&…`."""
        return f"reasoning_gym:{self.name}?" + "&".join(f"{k}={v}" for k, v in self.options)


TASKS: tuple[WorkedTask, ...] = (
    WorkedTask(
        "gcd", (("min_numbers", 2), ("max_numbers", 2), ("min_value", 2), ("max_value", 99))
    ),
    WorkedTask(
        "chain_sum", (("min_terms", 2), ("max_terms", 4), ("min_digits", 1), ("max_digits", 1)), 2
    ),
    WorkedTask("count_bits", (("min_n", 1), ("max_n", 127))),
    WorkedTask("spell_backward", (("min_word_len", 3), ("max_word_len", 7))),
)


def gcd_steps(entry: Entry) -> list[str]:
    """Subtract as Euclid did: `a-b=c` with a ≥ b, then the same with b and c.

    Ends with c = 0 (the answer is b) or c = 1 (the answer is 1). The number of
    lines is the sum of the partial quotients, hence the long tail.
    """
    first, second = entry["metadata"]["numbers"]
    high, low = max(first, second), min(first, second)
    lines = []
    while low > 1:
        rest = high - low
        lines.append(f"{high}-{low}={rest}")
        high, low = max(low, rest), min(low, rest)
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


WRITERS: dict[str, Callable[[Entry], list[str]]] = {
    "gcd": gcd_steps,
    "chain_sum": chain_sum_steps,
    "count_bits": count_bits_steps,
    "spell_backward": spell_backward_steps,
}


def response(task_name: str, entry: Entry, style: Style) -> str:
    """Return the worked or direct response to an entry, without an end token.

    Raises ValueError for a task that has no writer.
    """
    if task_name not in WRITERS:
        raise ValueError(
            f"no worked solutions for task {task_name!r}: expected one of {sorted(WRITERS)}; "
            "add a writer to benchmarks/warmstart/solutions.py"
        )
    steps = WRITERS[task_name](entry) if style == "worked" else []
    return "\n".join([*steps, f"{ANSWER_MARK}{entry['answer']}"])


@dataclasses.dataclass(frozen=True, eq=False)
class SolvedExample:
    """A prompt (question and suffix), its response, and the entry that scores it.

    `stem` is the prompt cut down to the problem itself: `98, 58.` of a gcd question.
    """

    task_name: str
    stem: str
    prompt: str
    response: str
    entry: Entry


def stem(prompt: str) -> str:
    """Return the bare problem of a question of `TASKS`, without the sentences around it."""
    problem = re.split(r": (?=\d|\w+\n$)|the number ", prompt)[-1]
    return problem.replace(" Give only the GCD as your final answer.", "")


def dataset(task: WorkedTask, seed: int, size: int) -> Any:
    """Return the reasoning-gym data set of `task`: entries and `score_answer`."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task.name, seed=seed, size=size, **dict(task.options))


def examples(
    tasks: Sequence[WorkedTask], seed: int, direct_fraction: float
) -> Iterator[SolvedExample]:
    """Yield examples, a function of the arguments alone.

    Tasks are drawn by their weights, and each response is direct with probability
    `direct_fraction`. Two seeds share no reasoning-gym seed; a stream ends after a
    million examples.
    """
    rng = random.Random(seed)
    weights = [task.weight for task in tasks]
    size = 1_000_000
    sources = [dataset(task, FIRST_SEED + (1 + seed) * size, size) for task in tasks]
    for index in range(size):
        (which,) = rng.choices(range(len(tasks)), weights)
        style: Style = "direct" if rng.random() < direct_fraction else "worked"
        entry, name = sources[which][index], tasks[which].name
        prompt = entry["question"] + PROMPT_SUFFIX
        yield SolvedExample(name, stem(prompt), prompt, response(name, entry, style), entry)
