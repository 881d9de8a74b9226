"""Reward functions by name.

A built-in function scores one response: a number, or None for "does not apply". A user's function
has TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.data import reasoning_gym_tasks
from rl.data.answers import expected_answer, extract_answer
from rl.data.specs import parse_spec
from rl.rewards.config import BUILT_IN, did_you_mean, split_user_function

Columns = Mapping[str, Any]  # of the example, with its answer


class BuiltIn:
    """A built-in function, which finds answers by `extract`."""

    def __init__(self, name: str, extract: str) -> None:
        self._name, self._extract = name, extract

    def prepare(self, spec: str) -> None:
        """Do the slow first steps for a task (cached), which the deadline does not cover."""
        if self._name == "task":
            _open_source(spec)
        elif self._name == "math_verify":
            _prepare_math()

    def __call__(self, completion: str, columns: Columns, spec: str, **_: Any) -> list[Any]:
        """Score one sample."""
        if self._name == "task":
            return [task_reward(completion, columns, spec, self._extract)]
        compare = math_verify if self._name == "math_verify" else exact_match
        return [compare(completion, columns["answer"], self._extract)]


class UserFunction:
    """A function of a user's file, whose lists have one entry."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = None if takes_all else {parameter.name for parameter in parameters}

    def prepare(self, spec: str) -> None:
        """Do nothing."""

    def __call__(
        self, prompt: Any, completion: str, completion_ids: list[int], columns: Columns, spec: str
    ) -> Any:
        """Score one sample; a chat's completion is a message, as in TRL."""
        message = [{"role": "assistant", "content": completion}]
        arguments = {
            **columns,
            "prompts": prompt,
            "completions": completion if isinstance(prompt, str) else message,
            "completion_ids": completion_ids,
        }
        names = arguments if self._names is None else self._names
        return self._function(**{key: [arguments[key]] for key in arguments if key in names})


def load(function: str, extract: str) -> BuiltIn | UserFunction:
    """Return a reward function by name; raises ValueError, and the errors of a user's file."""
    if function in BUILT_IN:
        return BuiltIn(function, extract)
    path, name = split_user_function(function)
    module = _user_module(path)
    if not callable(result := getattr(module, name, None)):
        raise ValueError(f"{path} defines no function {name!r}{did_you_mean(name, vars(module))}")
    if inspect.iscoroutinefunction(result):
        raise ValueError(f"{name} in {path} is async; expected a plain function")
    return UserFunction(result)


def exact_match(completion: str, answer: str | None, extract: str) -> float | None:
    """Return 1 if the extracted answer equals `answer` up to case and spacing, else 0."""
    if answer is None:
        return None
    response, gold = extract_answer(extract, completion), expected_answer(extract, answer)
    return float(response is not None and _words(response) == _words(gold))


def _words(text: str) -> list[str]:
    return text.casefold().split()


def task_reward(completion: str, columns: Columns, spec: str, extract: str) -> float | None:
    """Return the task's own score: reasoning-gym's, 0 to 1; exact match for data files."""
    source = _open_source(spec)
    if source is None:
        return exact_match(completion, columns["answer"], extract)
    response = extract_answer(extract, completion)
    entry = {"answer": columns["answer"], "metadata": columns["metadata"]}
    return 0.0 if response is None else source.score(response, entry)


@functools.lru_cache(maxsize=64)
def _open_source(spec: str) -> reasoning_gym_tasks.Procedural | None:
    parsed = parse_spec(spec)
    if parsed.kind != "reasoning_gym":
        return None
    query = {key: value for key, value in parsed.query.items() if key != "size"}
    return reasoning_gym_tasks.open_procedural(parsed.target, query)


def math_verify(completion: str, answer: str | None, extract: str) -> float | None:
    """Return 1 if math-verify finds the extracted answer equal to `answer`, else 0.

    Raises ValueError for an `answer` that is not mathematics. Source: math-verify 0.9, its LaTeX
    grammar alone (its other parser evaluates text), with numbers built here, so that no answer is
    compiled or evaluated (tests/hostile). Its equality ignores units, words after a number,
    subscripts of numbers (`1_0` is 1) and the name in `x = 3`. The pool has the deadline.
    """
    from math_verify import verify

    response = extract_answer(extract, completion)
    if answer is None or response is None:
        return None if answer is None else 0.0
    if not (gold := _parse_math(expected_answer(extract, answer))):
        raise ValueError(f"math-verify cannot read the expected answer {answer[-80:]!r}")
    return float(verify(gold, _parse_math(response), timeout_seconds=None))


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
    """Return math-verify's `parse`, with `_number` for sympy.Number, which evaluates text."""
    import logging

    from latex2sympy2_extended import latex2sympy2
    from math_verify import parse

    # It warns at every start that its timeouts are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex2sympy2.Number = _number
    latex2sympy2._Latex2Sympy.parse_number = lambda _, text: _number(text.replace(",", ""))
    return parse


@functools.cache
def _prepare_math() -> None:
    # The first parse builds its grammar, the first comparison imports half of sympy.
    math_verify("x(x+2)", "x^2+2x", "whole")


def _number(text: str) -> Any:
    """Read a sympy number; raises ValueError for any other text."""
    import sympy

    return sympy.Integer(int(text)) if text.isdecimal() else sympy.Float(text)


@functools.cache
def _user_module(path: Path) -> types.ModuleType:
    """Import a user's file once for all of its functions."""
    spec = importlib.util.spec_from_file_location(f"reprise_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python; expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look themselves up there
    spec.loader.exec_module(module)
    return module
