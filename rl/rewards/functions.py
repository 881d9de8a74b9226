"""Reward functions by name, all with TRL's signature.

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

All arguments are lists with one entry per sample. `columns` holds `answer`, `task`
and the example's other columns; `task` is a name, and for the built-in functions the
spec. None means "not applicable to this sample": the sum over functions leaves it out.
A response without an answer scores 0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data import reasoning_gym_tasks
from rl.data.answers import expected_answer, extract_answer
from rl.data.specs import parse_spec
from rl.rewards.config import split_user_function

Values = Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A function and the preparation that its deadline does not cover.

    `prepare(task_spec)` does the slow first steps (imports, opening a task); it is
    called once for each spec. `is_user` functions see chat prompts as TRL shows them.
    """

    function: Callable[..., Values]
    prepare: Callable[[str], object] = lambda spec: None
    is_user: bool = False

    def __call__(
        self,
        prompt: Any,
        completion: str,
        completion_ids: list[int],
        columns: Mapping[str, Any],
        spec: str,
    ) -> Values:
        """Score one sample: the function gets lists of length one."""
        if not self.is_user:
            columns = {**columns, "task": spec}
        completions: list[Any] = [completion]
        if self.is_user and not isinstance(prompt, str):
            completions = [[{"role": "assistant", "content": completion}]]
        arguments = {key: [value] for key, value in columns.items()}
        arguments |= {
            "prompts": [prompt],
            "completions": completions,
            "completion_ids": [completion_ids],
        }
        accepted = _accepted_names(self.function)
        if accepted is not None:
            arguments = {key: value for key, value in arguments.items() if key in accepted}
        return self.function(**arguments)


def load(function: str, extract: str) -> RewardFunction:
    """Return a reward function by name, importing a user's file.

    Raises what the user's file raises, and ValueError where it lacks the function.
    """
    if function == "task":
        return RewardFunction(functools.partial(task_reward, extract=extract), _open_source)
    if function == "exact_match":
        return RewardFunction(functools.partial(exact_match, extract=extract))
    if function == "math_verify":
        return RewardFunction(functools.partial(math_verify, extract=extract), _prepare_math)
    return RewardFunction(_load_user_function(*split_user_function(function)), is_user=True)


def exact_match(
    completions: Sequence[str], answer: Sequence[str | None], *, extract: str, **columns: Any
) -> Values:
    """Return 1 where the extracted answer equals `answer` but for case and spacing, else 0.

    An answer that holds the marker of `extract` is read as completions are.
    """
    del columns
    values: list[float | None] = []
    for completion, text in zip(completions, answer, strict=True):
        if text is None:
            values.append(None)
            continue
        found, gold = extract_answer(extract, completion), expected_answer(extract, text)
        values.append(float(found is not None and _normal(found) == _normal(gold)))
    return values


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()


def task_reward(
    completions: Sequence[str],
    answer: Sequence[str | None],
    task: Sequence[str],
    *,
    extract: str,
    **columns: Any,
) -> Values:
    """Return the task's own score: reasoning-gym's, 0 to 1; exact match for data files."""
    values: list[float | None] = []
    for row, (completion, gold, spec) in enumerate(zip(completions, answer, task, strict=True)):
        source = _open_source(spec)
        if source is None:
            values += exact_match([completion], [gold], extract=extract)
            continue
        found = extract_answer(extract, completion)
        entry = {"answer": gold, "metadata": columns["metadata"][row]}
        values.append(0.0 if found is None else source.score(found, entry))
    return values


@functools.lru_cache(maxsize=64)
def _open_source(spec: str) -> reasoning_gym_tasks.Procedural | None:
    parsed = parse_spec(spec)
    if parsed.kind != "reasoning_gym":
        return None
    query = {key: value for key, value in parsed.query.items() if key != "size"}
    return reasoning_gym_tasks.open_procedural(parsed.target, query)


def math_verify(
    completions: Sequence[str], answer: Sequence[str | None], *, extract: str, **columns: Any
) -> Values:
    """Return 1 where math-verify finds the extracted answer equal to `answer`, else 0.

    Raises ValueError for an `answer` that is not mathematics: no response could be right.
    Source: math-verify 0.9, its LaTeX grammar alone (its other parser is sympy's `parse_expr`,
    which evaluates text), with numbers built here, so that no part of an answer is compiled or
    evaluated (tests/hostile checks it). Its equality is generous: units, words behind a number
    and subscripts of numbers do not count (`1_0` is 1), nor does the name in `x = 3`. Its SIGALRM
    time-outs are off: the pool has a deadline.
    """
    from math_verify import verify

    del columns
    values: list[float | None] = []
    for completion, text in zip(completions, answer, strict=True):
        found = extract_answer(extract, completion)
        if text is None or found is None:
            values.append(None if text is None else 0.0)
            continue
        gold = _parse_math(expected_answer(extract, text))
        if not gold:
            raise ValueError(f"math-verify cannot read the expected answer {text[-80:]!r}")
        values.append(float(verify(gold, _parse_math(found), timeout_seconds=None)))
    return values


def _parse_math(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig

    text = text.replace(r"\$", "")  # an amount of money, not the edge of a formula
    if not any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
        text = f"${text}$"
    return _math_parser()(
        text,
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


@functools.cache
def _math_parser() -> Callable[..., list[Any]]:
    """Return math-verify's `parse` with its numbers read by `_number`.

    It would give them to sympy.Number, which evaluates text.
    """
    from latex2sympy2_extended import latex2sympy2
    from math_verify import parse

    latex2sympy2.Number = _number
    latex2sympy2._Latex2Sympy.parse_number = lambda _, text: _number(text.replace(",", ""))
    return parse


def _number(text: str) -> Any:
    """Read a sympy number; raises ValueError for any other text."""
    import sympy

    return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text)


def _prepare_math(spec: str) -> None:
    del spec
    import logging

    # It warns at every start that its time-outs are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first parse builds its grammar, the first comparison imports half of sympy.
    math_verify(["x(x+2)"], ["x^2+2x"], extract="whole")


def _load_user_function(path: Path, name: str) -> Callable[..., Values]:
    function = getattr(_user_module(path), name, None)
    if not callable(function):
        raise ValueError(f"{path} defines no function {name!r}; got {type(function).__name__}")
    return function


@functools.cache
def _user_module(path: Path) -> types.ModuleType:
    """Import a user's file, once for all of its functions."""
    spec = importlib.util.spec_from_file_location(f"reprise_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python; expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look themselves up there
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=64)
def _accepted_names(function: Callable[..., Values]) -> frozenset[str] | None:
    """Return the keyword names that a function takes; None means any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
