"""Tasks by name: a spec string in, examples with prompts and answers out.

    reasoning_gym:gcd?max_numbers=2&max_value=99     a seeded generator and its verifier
    jsonl:PATH?prompt=question&answer=solution       one JSON object a line
    parquet:PATH                                     the same, read by pyarrow
    NAME=jsonl:PATH                                  any of them, under a name

Invariant: a task is a pure sequence; `task[i]` depends on (spec, seed, i) alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote

from rl.data import reasoning_gym_tasks
from rl.data.answers import EXTRACTORS, extract_answer

Message = Mapping[str, str]  # {"role": ..., "content": ...}

MOST_EXAMPLES = 1_000_000  # of a generated task
MOST_SPEC_CHARACTERS = 10_000
MOST_ADDED_CHARACTERS = 100_000  # to every prompt, by the configuration
MOST_PROMPT_CHARACTERS = 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One prompt and what is needed to score a response to it.

    `example_id` is the same in every epoch and every resumed run. `prompt` is the
    question as text, or chat messages. `columns` is JSON-able: what the task's
    verifier needs (reasoning-gym's `metadata`) and the data file's other columns.
    Reward functions receive them with `answer` and `task` added over them. `task` is the
    task's name, by default its spec; `spec` opens it (empty: `task` does).
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
    """Section `Task`: what to train on.

    A spec is `kind:target?key=value`, or `NAME=kind:…` to have the task called NAME.
    `size` counts the generated examples of each procedural task. With `weights`,
    one per spec, each position of the mixture draws its task with that probability;
    without, the mixture holds every example of every task once. More than
    `stream_above_examples` examples are read, checked and tokenized as a run comes to them,
    not before it.
    """

    RETIRED: ClassVar = {"seed_offset": 0}

    specs: tuple[str, ...] = ("reasoning_gym:gcd",)
    weights: tuple[float, ...] = ()
    size: int = 1000
    system_prompt: str | None = None
    prompt_suffix: str = ""
    stream_above_examples: int = 20_000

    def __post_init__(self) -> None:
        if not self.specs:
            raise ValueError("Task.specs is empty; name a task, for example reasoning_gym:gcd")
        if self.weights and len(self.weights) != len(self.specs):
            raise ValueError(
                f"Task.weights: expected one per spec ({len(self.specs)}), got {len(self.weights)}"
            )
        if any(not 0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"Task.weights must be positive and finite, got {self.weights}")
        if not 1 <= self.size <= MOST_EXAMPLES:
            raise ValueError(
                f"Task.size must be 1 to {MOST_EXAMPLES:,} examples of each task, got {self.size}"
            )
        if self.stream_above_examples < 0:
            raise ValueError(
                f"Task.stream_above_examples: expected 0 or more, got {self.stream_above_examples}"
            )
        for field in ("system_prompt", "prompt_suffix"):
            _check_text(getattr(self, field) or "", f"Task.{field}", MOST_ADDED_CHARACTERS)
        names = [parse_spec(spec).name for spec in self.specs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"Task.specs: expected different names, got {min(twice)!r} twice; write one of "
                "them OTHER_NAME=kind:…, or weigh a task with Task.weights"
            )


_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The parts of a spec, `kind:target?key=value&...` or `name=kind:...`."""

    text: str  # all of it
    name: str  # by default the text
    kind: str
    target: str
    query: Mapping[str, str]


def parse_spec(text: str) -> Spec:
    """Parse a spec; raises ValueError for an unknown kind, a bad query or task name."""
    _check_text(text, "a task", MOST_SPEC_CHARACTERS)
    named = _NAMED.fullmatch(text)
    name, source = named.groups() if named else (text, text)
    head, _, tail = source.partition("?")
    kind, colon, target = head.partition(":")
    if not colon or kind not in _OPENERS or not target:
        close = difflib.get_close_matches(kind, _OPENERS, n=1)
        mend = f"did you mean {close[0]}:…?" if close else "for example reasoning_gym:gcd"
        raise ValueError(
            f"task {text!r}: expected one of {', '.join(_OPENERS)}, a colon and a "
            f"name or path; {mend}"
        )
    query: dict[str, str] = {}
    for part in tail.split("&") if tail else ():
        key, equals, value = part.partition("=")
        if not key or not equals or key in query:
            raise ValueError(f"task {text!r}: expected key=value once for each key, got {part!r}")
        query[key] = unquote(value)  # not unquote_plus: `operators=+,-` means a plus
    if kind == "reasoning_gym":
        reasoning_gym_tasks.check_name(target)
    return Spec(text, name, kind, target, query)


def open_task(spec: str, seed: int, size: int = 1000) -> Task:
    """Open one task; `seed` and `size` (in examples) matter to procedural tasks only.

    Raises ValueError or FileNotFoundError that names the spec, the file and the line.
    """
    parsed = parse_spec(spec)
    return _OPENERS[parsed.kind](parsed, seed, size)


def open_tasks(config: TaskConfig, seed: int) -> Task:
    """Open all tasks of a section, mixed in a seeded order."""
    tasks = [open_task(spec, seed, config.size) for spec in config.specs]
    return tasks[0] if len(tasks) == 1 else Mixture(tasks, config.weights, seed)


class Mixture:
    """Several tasks as one, in an order fixed by the seed.

    A task that is drawn more often than it is long starts again from its first example.
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int) -> None:
        # Only random() itself is promised to draw the same on every Python.
        rng = random.Random(f"reprise mixture {seed}")
        lengths = [len(task) for task in tasks]
        if weights:
            bounds = list(itertools.accumulate(weights))
            last = len(tasks) - 1
            order = [
                min(bisect.bisect_right(bounds, rng.random() * bounds[-1]), last)
                for _ in range(sum(lengths))
            ]
        else:
            order = [number for number, length in enumerate(lengths) for _ in range(length)]
            order.sort(key=lambda _: rng.random())
        drawn = [0] * len(tasks)
        self._tasks = list(tasks)
        self._order: list[tuple[int, int]] = []  # task, index in it
        for number in order:
            self._order.append((number, drawn[number] % lengths[number]))
            drawn[number] += 1

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Example:
        number, inner = self._order[index]
        return self._tasks[number][inner]


class _ProceduralTask:
    def __init__(self, spec: Spec, seed: int, size: int) -> None:
        query = dict(spec.query)
        self._spec, self._seed = spec, seed
        self._size = _num_examples(query.pop("size", str(size)), spec)
        self._source = reasoning_gym_tasks.open_procedural(spec.target, query, seed, self._size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._size:
            raise IndexError(f"{self._spec.text} has {self._size} examples, asked for {index}")
        entry = self._source.entry(index)
        _check_text(entry["question"], f"{self._spec.text} #{index}", MOST_PROMPT_CHARACTERS)
        return Example(
            # The seed is part of the name: another seed is another example.
            example_id=f"{self._spec.text}@{self._seed}#{index}",
            prompt=entry["question"],
            answer=entry["answer"],
            columns={"metadata": entry["metadata"]},
            task=self._spec.name,
            spec=self._spec.text,
        )


def _num_examples(text: str, spec: Spec) -> int:
    if not (text.isdecimal() and len(text) < 20 and 1 <= int(text) <= MOST_EXAMPLES):
        raise ValueError(
            f"{spec.text[:200]}: size must be a whole number from 1 to {MOST_EXAMPLES:,}, "
            f"got {text[:20]!r}"
        )
    return int(text)


def _check_text(text: str, where: str, most_characters: int) -> None:
    """Raise ValueError for text that is too long, or not Unicode."""
    if len(text) > most_characters:
        raise ValueError(
            f"{where}: expected at most {most_characters:,} characters, got {len(text):,}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: not Unicode: half of a surrogate pair, {text[error.start]!r}, stands at "
            f"character {error.start}"
        ) from error


# Names of arguments of reward functions, which a data column may not have.
_TAKEN_COLUMNS = ("prompts", "completions", "completion_ids", "task")
_FILE_KEYS = ("prompt", "answer", "answer_extract")


def _open_file(spec: Spec, seed: int, size: int) -> Task:
    del seed, size  # they matter to generated tasks
    for key in spec.query:
        if key not in _FILE_KEYS:
            raise ValueError(f"{spec.text}: unknown key {key!r}, expected {', '.join(_FILE_KEYS)}")
    if spec.query.get("answer_extract", "whole") not in EXTRACTORS:
        raise ValueError(f"{spec.text}: answer_extract must be one of {', '.join(EXTRACTORS)}")
    try:
        path = Path(spec.target).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ValueError(f"{spec.text}: {error}") from error
    if not path.is_file():
        raise FileNotFoundError(f"{spec.text}: there is no file {path} (from {Path.cwd()})")
    rows = _read_jsonl(path) if spec.kind == "jsonl" else _read_parquet(path)
    examples = tuple(
        _file_example(spec, index, where, row) for index, (where, row) in enumerate(rows)
    )
    if not examples:
        raise ValueError(f"{spec.text}: the data set is empty; expected at least one example")
    return examples


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, [[[[…
                raise ValueError(f"{where}: expected one JSON object a line: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(
            f"parquet:{path} needs the package pyarrow: pip install pyarrow"
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error
    for number, row in enumerate(rows):
        # Dates and decimals travel to the reward workers as text.
        yield f"{path} row {number}", json.loads(json.dumps(row, default=str))


def _file_example(spec: Spec, index: int, where: str, row: Mapping[str, Any]) -> Example:
    prompt_column = spec.query.get("prompt", "prompt")
    answer_column = spec.query.get("answer", "answer")  # `?answer=`: there is none
    for key, column in (("prompt", prompt_column), ("answer", answer_column)):
        if column and column not in row:
            raise ValueError(
                f"{where}: no column {column!r}; it has {', '.join(map(repr, row))}. "
                f"Name the right one with ?{key}=COLUMN"
                + (" or leave answers out with ?answer=" if key == "answer" else "")
            )
    columns = {key: row[key] for key in row if key not in (prompt_column, answer_column)}
    for taken in _TAKEN_COLUMNS:
        if taken in columns:
            raise ValueError(f"{where}: rename column {taken!r}; reward functions get that name")
    answer = _answer_text(row[answer_column], where) if answer_column else None
    _check_text(answer or "", f"{where}: the answer", MOST_PROMPT_CHARACTERS)
    if answer is not None and "answer_extract" in spec.query:
        name = spec.query["answer_extract"]
        answer = extract_answer(name, answer)
        if answer is None:
            raise ValueError(f"{where}: answer_extract={name} finds nothing in the answer")
    prompt = _prompt(row[prompt_column], where)
    return Example(f"{spec.text}#{index}", prompt, answer, columns, spec.name, spec.text)


def _answer_text(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(f"{where}: the answer must be text or a number, got {type(value).__name__}")


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        _check_text(value, f"{where}: the prompt", MOST_PROMPT_CHARACTERS)
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        for item in value:
            _check_text(item["content"], f"{where}: the prompt", MOST_PROMPT_CHARACTERS)
        return tuple({"role": item["role"], "content": item["content"]} for item in value)
    shown = json.dumps(value)[:80]
    raise ValueError(
        f"{where}: the prompt must be text or a list of {{role, content}} messages, got {shown}"
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item.get(key), str) for key in ("role", "content")
    )


_OPENERS: Mapping[str, Callable[[Spec, int, int], Task]] = {
    "reasoning_gym": _ProceduralTask,
    "jsonl": _open_file,
    "parquet": _open_file,
}
