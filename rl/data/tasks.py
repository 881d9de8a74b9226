"""Tasks by name: a spec string selects examples with prompts and answers.

    reasoning_gym:gcd?max_numbers=2&max_value=99     a seeded generator and its verifier
    jsonl:PATH?prompt=question&answer=solution       files, folders, globs: docs/data.md
    NAME=jsonl:PATH                                  any of these, under a name

Invariant: a task is a pure sequence; `task[i]` depends only on (spec, seed, i).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from reprise.models.text.chat_template import check_variables
from reprise.rl.data import files, reasoning_gym_tasks
from reprise.rl.data.columns import PUBLISHED, check_query, find_layout, read_row
from reprise.rl.data.conversations import Message
from reprise.rl.data.rows import open_rows
from reprise.rl.data.specs import MAX_PROMPT_CHARACTERS, Spec, check_text, parse_spec

MAX_EXAMPLES = 1_000_000  # of a generated task
MAX_VARIABLES = 32  # of a chat template
MAX_ADDED_CHARACTERS = 100_000  # to every prompt, by the configuration


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One prompt and the data that scores a response to it.

    `example_id` is the same in every epoch and every resumed run. `columns` is JSON-able:
    `metadata` of reasoning-gym, or the other columns of the data file; reward functions receive
    these columns with `answer` and `task` added. `task` is a name; `spec` opens the task (empty:
    `task` does).
    """

    example_id: str
    prompt: str | tuple[Message, ...]
    answer: str | None
    columns: Mapping[str, Any]
    task: str
    spec: str = ""


class Task(Protocol):
    """A finite sequence of examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Section `Task`: the examples to train on, and how they become prompts."""

    specs: tuple[str, ...] = ("reasoning_gym:gcd",)
    """The tasks: `kind:target?key=value`, or `NAME=kind:…` to name one (docs/data.md)."""
    weights: tuple[float, ...] = ()
    """One weight per spec: each position of the mixture draws its task with that probability.
    Empty: the mixture holds every example of every task once."""
    size: int = 1000
    """The number of generated examples of each procedural task."""
    system_prompt: str | None = None
    """A system message before every conversation; None adds none."""
    prompt_suffix: str = ""
    """Text after each question, such as the format of the answer."""
    stream_above_examples: int = 20_000
    """More examples than this are read, checked and tokenized during the run, not before it."""
    chat: Literal["all", "messages", "none"] = "all"
    """Prompts that get the tokenizer's chat template, if it has one: `all` (a text becomes a user
    message), only `messages` (texts stay unchanged), or `none`."""
    chat_template: str = ""
    """A file with another chat template, which the exported policy keeps. Empty: the template of
    the policy."""
    chat_template_kwargs: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    """Arguments of the template, such as (("enable_thinking", False),)."""
    date: str = ""
    """The date that the template prints, YYYY-MM-DD. Empty: the day of the start, in UTC."""

    def uses_template(self, *, is_plain: bool) -> bool:
        """Return whether a prompt, plain text or messages, is rendered by a chat template."""
        return self.chat == "all" or (self.chat == "messages" and not is_plain)

    def __post_init__(self) -> None:
        if not self.specs:
            raise ValueError("Task.specs is empty; name a task, for example reasoning_gym:gcd")
        if self.weights and len(self.weights) != len(self.specs):
            raise ValueError(
                f"Task.weights: expected one per spec ({len(self.specs)}), got {len(self.weights)}"
            )
        if any(not 0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"Task.weights must be positive and finite, got {self.weights}")
        if not 1 <= self.size <= MAX_EXAMPLES:
            raise ValueError(
                f"Task.size must be 1 to {MAX_EXAMPLES:,} examples of each task, got {self.size}"
            )
        if self.chat not in ("all", "messages", "none"):
            raise ValueError(f"Task.chat: expected all, messages or none, got {self.chat!r}")
        if self.date and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise ValueError(f"Task.date: expected a day as YYYY-MM-DD, got {self.date[:40]!r}")
        if (above := self.stream_above_examples) < 0:
            raise ValueError(f"Task.stream_above_examples: expected 0 or more, got {above}")
        _check_variables(self.chat_template_kwargs)
        for field in ("system_prompt", "prompt_suffix"):
            check_text(getattr(self, field) or "", f"Task.{field}", MAX_ADDED_CHARACTERS)
        names = [parse_spec(spec).name for spec in self.specs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"Task.specs: expected different names, got {min(twice)!r} twice; write one of "
                "them OTHER_NAME=kind:…, or weigh a task with Task.weights"
            )


def open_task(spec: str, seed: int, size: int = 1000) -> Task:
    """Open one task. Raises ValueError or FileNotFoundError, which name spec, file and line."""
    parsed = parse_spec(spec)
    if parsed.kind == "reasoning_gym":
        return _ProceduralTask(parsed, seed, size)
    return _FileTask(parsed)


def open_tasks(config: TaskConfig, seed: int) -> Task:
    """Open all tasks of a section, mixed in a seeded order."""
    tasks = [open_task(spec, seed, config.size) for spec in config.specs]
    return tasks[0] if len(tasks) == 1 else Mixture(tasks, config.weights, seed)


def data_files(spec: str) -> tuple[Path, ...]:
    """Return the files that a task is read from; a generated task has no files."""
    parsed = parse_spec(spec)
    return () if parsed.kind == "reasoning_gym" else _find(parsed)[1]


def data_digest(config: TaskConfig) -> str:
    """Return a hash of the names, sizes and contents of the data files."""
    digests = (files.digest(data_files(spec)) for spec in config.specs)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


class Mixture:
    """Several tasks as one, in an order fixed by the seed; a task that is used up starts again."""

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        # Python promises the same draws in every version only for random() itself.
        rng = random.Random(f"reprise mixture {seed}")
        lengths = [len(task) for task in tasks]
        draws = np.array([rng.random() for _ in range(sum(lengths))])
        if weights:
            bounds = list(itertools.accumulate(weights))
            order = np.searchsorted(bounds, draws * bounds[-1], "right").clip(max=len(tasks) - 1)
        else:
            order = np.repeat(np.arange(len(tasks)), lengths)[np.argsort(draws, kind="stable")]
        self._tasks = list(tasks)
        self._numbers = order.astype(np.int32)
        self._inner = np.empty(len(order), np.int64)
        for number, length in enumerate(lengths):
            drawn = np.flatnonzero(order == number)
            self._inner[drawn] = np.arange(len(drawn)) % length

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:
        return self._tasks[self._numbers[index]][int(self._inner[index])]


class _ProceduralTask:
    def __init__(self, spec: Spec, seed: int, size: int) -> None:
        query = dict(spec.query)
        self._spec = spec
        self._seed = seed
        text = query.pop("size", str(size))
        if not (text.isdecimal() and len(text) < 20 and 1 <= int(text) <= MAX_EXAMPLES):
            raise ValueError(
                f"{spec.text[:200]}: size must be a whole number from 1 to {MAX_EXAMPLES:,}, "
                f"got {text[:20]!r}"
            )
        self._size = int(text)
        self._source = reasoning_gym_tasks.open_procedural(spec.target, query, seed, self._size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._size:
            raise IndexError(f"{self._spec.text} has {self._size} examples, not {index}")
        entry = self._source.entry(index)
        check_text(entry["question"], f"{self._spec.text} #{index}", MAX_PROMPT_CHARACTERS)
        return Example(
            example_id=f"{self._spec.text}@{self._seed}#{index}",
            prompt=entry["question"],
            answer=entry["answer"],
            columns={"metadata": entry["metadata"]},
            task=self._spec.name,
            spec=self._spec.text,
        )


def _check_variables(pairs: Sequence[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    try:
        if len(names) > MAX_VARIABLES:
            raise ValueError(f"expected at most {MAX_VARIABLES}, got {len(names)}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"expected each once, got {twice[0]!r} twice")
        check_variables(names)
        json.dumps(dict(pairs), allow_nan=False)
    except ValueError as error:
        raise ValueError(f"Task.chat_template_kwargs: {error}") from error
    for name, value in pairs:
        if isinstance(value, str):
            check_text(value, f"Task.chat_template_kwargs, {name}", MAX_ADDED_CHARACTERS)


class _FileTask:
    """Rows of data files, read on access."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._rows = open_rows(*_find(spec))
        if not len(self._rows):
            raise ValueError(f"{spec.text}: the data set is empty; expected at least one example")
        self._layout = find_layout(spec, self._rows[0])
        try:
            self[0]  # reports a wrong column immediately
        except ValueError as error:
            if spec.kind not in PUBLISHED:
                raise
            hint = f"{spec.kind}: reads the published columns; for others write jsonl: or parquet:"
            raise ValueError(f"{error} ({hint})") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"{self._spec.text} has {len(self._rows)} examples, not {index}")
        prompt_answer_columns = read_row(self._layout, self._rows[index], self._rows.where(index))
        text = self._spec.text
        return Example(f"{text}#{index}", *prompt_answer_columns, self._spec.name, text)


def _find(spec: Spec) -> files.Files:
    try:
        check_query(spec)
        split = spec.query.get("split")
        if spec.kind in PUBLISHED:  # GSM8K has a second edition, with questions in the answers
            return files.find(spec.target, split, files.FORMATS, skip="socratic")
        return files.find(spec.target, split, (spec.kind,))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{spec.text}: {error}") from error
    except (RuntimeError, ValueError) as error:  # RuntimeError for an unknown user
        raise ValueError(f"{spec.text}: {error}") from error
