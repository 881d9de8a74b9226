"""Rows of data files as prompts and answers, in columns and forms found from the first row.

Found by default: text or messages in `prompt` or `messages`, `reward_model.ground_truth` of verl,
GSM8K and MATH.
"""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprise.rl.answers import written_numbers
from reprise.rl.answers.answers import EXTRACTORS, boxed, extract_answer, hash_mark
from reprise.rl.data.conversations import Prompt, check_last_turn, ends_with_answer, read_prompt
from reprise.rl.data.specs import MAX_PROMPT_CHARACTERS, Spec, check_text

Row = Mapping[str, Any]

_KEYS = ("prompt", "answer", "answer_extract", "split")
_LAST_TURN = object()  # the answer is the last turn, by the assistant
_ABSENT = object()
# Arguments of reward functions; data columns may not have these names.
_RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "task")
_SYNONYMS = {
    "prompt": ("question", "problem", "query", "instruction", "input", "messages", "text"),
    "answer": ("ground_truth", "solution", "final_answer", "target", "label", "expected", "gold"),
}
_MIN_PLAIN = 1e-15  # smaller numbers have an exponent as text
_CONVERSATIONS = ("messages", "conversations", "conversation")  # prompts by default
_MAX_NAMES = 40  # of columns, in messages


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns, or paths `a.b`, of prompt and answer (or None), and the extraction of the answer."""

    prompt: str
    answer: Any
    extract: Callable[[str], str | None] | None = None
    extract_name: str = ""


def gsm8k_answer(text: str) -> str | None:
    """Return the number after ####, without thousands separators, or else the text after ####."""
    text = hash_mark(text) or ""
    number = written_numbers.read(text)
    return text or None if number is None else written_numbers.to_text(number)


def math_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; some solutions have `\fbox{…}` or `\boxed 2`."""
    bare = re.findall(r"\\boxed\s+([^\s{$]+)", text)
    return boxed(text.replace(r"\fbox{", r"\boxed{")) or (bare[-1].rstrip(".") if bare else None)


PUBLISHED: Mapping[str, Layout] = {  # data sets by the kind of their specs
    "gsm8k": Layout("question", "answer", gsm8k_answer, "####"),
    "math": Layout("problem", "solution", math_answer, r"\boxed{…}"),
}


def check_query(spec: Spec) -> None:
    """Raise ValueError for query keys and values that a spec of data files may not have."""
    keys = ("split",) if spec.kind in PUBLISHED else _KEYS
    for key in spec.query:
        if key not in keys:
            raise ValueError(f"{spec.text}: unknown key {key!r}, expected {', '.join(keys)}")
    if spec.query.get("answer_extract", "whole") not in EXTRACTORS:
        raise ValueError(f"{spec.text}: answer_extract must be one of {', '.join(EXTRACTORS)}")


def find_layout(spec: Spec, first: Row) -> Layout:
    """Return the layout of the rows of a spec, given the first row."""
    if spec.kind in PUBLISHED:
        return PUBLISHED[spec.kind]
    query = spec.query
    by_default = next((name for name in ("prompt", *_CONVERSATIONS) if name in first), "prompt")
    prompt = query.get("prompt", by_default)
    answer: Any = query.get("answer", "answer") or None
    if "answer" not in query and "answer" not in first:
        if lookup(first, "reward_model.ground_truth") is not _ABSENT:
            answer = "reward_model.ground_truth"
        elif ends_with_answer(lookup(first, prompt), spec.text):
            answer = _LAST_TURN
    if (name := query.get("answer_extract")) is None:
        return Layout(prompt, answer)
    return Layout(prompt, answer, functools.partial(extract_answer, name), f"answer_extract={name}")


def read_row(layout: Layout, row: Row, where: str) -> tuple[Prompt, str | None, dict[str, Any]]:
    """Return the prompt, the answer and the other columns of a row."""
    answer: str | None
    prompt = read_prompt(_value(row, "prompt", layout.prompt, where), where)
    is_answered = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
    if layout.answer is _LAST_TURN:
        if isinstance(prompt, str) or not is_answered or len(prompt) == 1:
            raise ValueError(f"{where}: expected messages that end with the assistant's answer")
        prompt, answer = prompt[:-1], prompt[-1]["content"]
    elif is_answered:
        raise ValueError(
            f"{where}: the prompt ends with a turn of the assistant: leave that turn out, or the "
            "answer column (then the turn is the answer)"
        )
    else:
        answer = _answer(layout, row, where)
    check_last_turn(prompt, where)
    if layout.extract is not None and answer is not None:
        answer = layout.extract(answer)
        if answer is None:
            raise ValueError(f"{where}: {layout.extract_name} finds nothing in the answer")
    check_text(answer or "", f"{where}: the answer", MAX_PROMPT_CHARACTERS)
    columns = {key: row[key] for key in row if key not in (layout.prompt, layout.answer)}
    for name in _RESERVED_COLUMNS:
        if name in columns:
            raise ValueError(f"{where}: rename column {name!r}; reward functions get that name")
    return prompt, answer, columns


def lookup(row: Row, path: str) -> Any:
    """Return the value of a column, or of a path `a.b` into nested columns; else _ABSENT."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _value(row: Row, key: str, path: str, where: str) -> Any:
    value = lookup(row, path)
    if value is not _ABSENT:
        return value
    names = list(_column_names(row))
    near = difflib.get_close_matches(path, names, n=1)
    leaves = {name.rpartition(".")[2].lower(): name for name in reversed(names)}
    near += [leaves[name] for name in _SYNONYMS[key] if name in leaves]
    shown = ", ".join(map(repr, names[:_MAX_NAMES])) or "none"
    raise ValueError(
        f"{where}: no column {path!r}; it has {shown}. Name the right one with ?{key}=COLUMN"
        + (f" (perhaps ?{key}={near[0]})" if near else "")
        + (" or leave answers out with ?answer=" if key == "answer" else "")
    )


def _column_names(row: Row, before: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names of columns, and the paths of nested columns."""
    for name, value in row.items():
        yield before + str(name)
        if isinstance(value, dict) and depth < 3:
            yield from _column_names(value, f"{before}{name}.", depth + 1)


def _answer(layout: Layout, row: Row, where: str) -> str | None:
    if layout.answer is None:
        return None
    value = _value(row, "answer", layout.answer, where)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return number_text(value)
    names = value if isinstance(value, dict) else ()
    inner = ", ".join(f"?answer={layout.answer}.{name}" for name in names)
    raise ValueError(
        f"{where}: the answer must be text or a number, got {type(value).__name__}"
        + (f"; perhaps {inner[:200]}" if inner else "")
    )


def number_text(value: int | float) -> str:
    """Return a number as text: `5.0` is `5`, since a missing value makes a whole column float.

    A float from 2**53 on may have lost digits and keeps its form (1e+16).
    """
    if isinstance(value, int) or abs(value) >= 2**53 or 0 < abs(value) < _MIN_PLAIN:
        return str(value)
    return str(int(value)) if value.is_integer() else format(decimal.Decimal(str(value)), "f")
