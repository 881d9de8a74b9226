"""Reward functions by name.

A job is one response, or all responses of a group. A built-in function scores each response by
itself: a number, or None for "does not apply". A user function has the signature of TRL, plain or
async: `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from reprise.rl.answers import math_answers
from reprise.rl.answers.answers import expected_answer, extract_answer
from reprise.rl.data import reasoning_gym_tasks
from reprise.rl.data.specs import parse_spec
from reprise.rl.rewards.config import BUILT_IN
from reprise.rl.runtime.user_files import did_you_mean, load_user_name

Columns = Mapping[str, Any]  # of the example, with its answer
_MAX_SHOWN = 30  # names in a message


class BuiltIn:
    """A built-in function, which finds answers by `extract`."""

    def __init__(self, name: str, extract: str) -> None:
        self._name = name
        self._extract = extract

    def prepare(self, spec: str) -> None:
        """Do the slow set-up for a task (cached), which the deadline does not cover."""
        if self._name == "task":
            _open_source(spec)
        elif self._name == "math_verify":
            math_answers.prepare()

    def score(
        self, *, completions: list[str], columns: Columns, spec: str, **_: Any
    ) -> list[float | None]:
        """Score the responses of a job, each by itself."""
        if self._name == "task":
            return [task_reward(text, columns, spec, self._extract) for text in completions]
        compare = math_verify if self._name == "math_verify" else exact_match
        return [compare(text, columns["answer"], self._extract) for text in completions]


class UserFunction:
    """A function of a user file; its lists have an entry for each response of a job."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self._name = name
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = None if takes_all else {parameter.name for parameter in parameters}
        variable = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        self._required = {
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in variable
        }

    def prepare(self, spec: str) -> None:
        """Do nothing."""

    def score(
        self,
        *,
        prompt: Any,
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Columns,
        **_: Any,
    ) -> Any:
        """Score the responses of a job; a completion of a chat is a message, as in TRL."""
        size = len(completions)
        messages = not isinstance(prompt, str)
        shared = {**columns, "prompts": prompt}
        arguments = {name: [value] * size for name, value in shared.items()} | {
            "completions": [_as_message(text) for text in completions] if messages else completions,
            "completion_ids": completion_ids,
        }
        if missing := self._required - arguments.keys():
            raise ValueError(_missing_arguments(self._name, sorted(missing), list(arguments)))
        names = arguments if self._names is None else self._names
        result = self._function(**{key: arguments[key] for key in arguments if key in names})
        return _event_loop().run_until_complete(result) if inspect.isawaitable(result) else result


def _missing_arguments(function: str, missing: list[str], names: list[str]) -> str:
    hints = [did_you_mean(name, names) for name in missing]
    return (
        f"{function} has the parameter {', '.join(map(repr, missing))}, which is no column of the "
        f"data: expected {', '.join(sorted(names)[:_MAX_SHOWN])}{''.join(hints)}; the signature is "
        f"{function}(prompts, completions, completion_ids, **columns), each a list, as TRL's"
    )


def _as_message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@functools.cache
def _event_loop() -> Any:
    """Return the event loop of the worker, shared by clients that a user file keeps."""
    import asyncio

    return asyncio.new_event_loop()


def load(function: str, extract: str) -> BuiltIn | UserFunction:
    """Return a reward function by name. Raises ValueError, and the errors of a user file."""
    if function in BUILT_IN:
        return BuiltIn(function, extract)
    return UserFunction(load_user_name(function), function.rpartition(":")[2])


def exact_match(completion: str, answer: str | None, extract: str) -> float | None:
    """Return 1 if the extracted answer equals `answer` up to case and spacing, else 0."""
    if answer is None:
        return None
    response = extract_answer(extract, completion)
    gold = expected_answer(extract, answer)
    return float(response is not None and _words(response) == _words(gold))


def _words(text: str) -> list[str]:
    return text.casefold().split()


def task_reward(completion: str, columns: Columns, spec: str, extract: str) -> float | None:
    """Return the score of the task: 0 to 1 by reasoning-gym; exact match for data files."""
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
    """Return 1 if the extracted answer equals `answer` as mathematics or as words, else 0.

    Raises ValueError for an `answer` that cannot be read. The pool enforces the deadline.
    """
    response = extract_answer(extract, completion)
    if answer is None or response is None:
        return None if answer is None else 0.0
    return float(math_answers.equal(expected_answer(extract, answer), response))
