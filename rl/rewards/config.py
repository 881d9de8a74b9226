"""Section `Reward`, and the checks of its functions that need no worker."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rl.data.answers import EXTRACTORS, Extractor

BUILT_IN = ("task", "exact_match", "math_verify")
# Python 3.11's `ast.parse` counts its depth for all threads together and fails where two are in
# it at once (github.com/python/cpython/issues/106905)
_parsing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Section `Reward`.

    functions: `task` (the task's own verifier), `exact_match`, `math_verify`, or
      `PATH.py:function` with the signature
      `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
    weights: one per function; empty means all ones.
    extract: how the built-in functions find the answer in a completion (rl.data.answers).
    deadline_s: of one sample, for all functions together.
    on_failure: where a scorer raises, hangs, dies or answers nonsense, with `zero` the reward of
      its sample is 0, with `skip` the sample is left out of the advantages.
    memory_limit_mib: address space of each worker, which libraries reserve more of than they
      use; None means no limit.
    """

    functions: tuple[str, ...] = ("task",)
    weights: tuple[float, ...] = ()
    extract: Extractor = "hash"
    deadline_s: float = 10.0
    workers: int = 2
    on_failure: Literal["zero", "skip"] = "zero"
    memory_limit_mib: int | None = 4096

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError(
                f"Reward.functions is empty; expected one of {', '.join(BUILT_IN)} "
                "or PATH.py:function"
            )
        for function in self.functions:
            _check_name(function)
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"Reward.weights: expected one per function ({len(self.functions)}), "
                f"got {len(self.weights)}"
            )
        if any(not abs(weight) < float("inf") for weight in self.weights):
            raise ValueError(f"Reward.weights must be finite, got {self.weights}")
        if self.extract not in EXTRACTORS:
            close = difflib.get_close_matches(self.extract, EXTRACTORS, n=1)
            mend = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"Reward.extract: expected one of {', '.join(EXTRACTORS)}, "
                f"got {self.extract!r}{mend}"
            )
        if not 0 < self.deadline_s < float("inf"):
            raise ValueError(f"Reward.deadline_s must be positive seconds, got {self.deadline_s}")
        if self.workers < 1:
            raise ValueError(f"Reward.workers must be at least 1, got {self.workers}")
        if self.on_failure not in ("zero", "skip"):
            raise ValueError(f"Reward.on_failure: expected zero or skip, got {self.on_failure!r}")
        if self.memory_limit_mib is not None and self.memory_limit_mib < 64:
            raise ValueError(
                "Reward.memory_limit_mib must be at least 64 (Python itself needs "
                f"that) or None, got {self.memory_limit_mib}"
            )
        names = display_names(self.functions)
        if len(set(names)) != len(names):
            raise ValueError(f"Reward.functions names one function twice: {self.functions}")

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names in metrics, `rewards/{name}/...`."""
        return display_names(self.functions)

    @property
    def full_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)


def display_names(functions: Sequence[str]) -> tuple[str, ...]:
    """Shorten `PATH.py:f` to `f`, except where another function is called f too."""
    short = [function.rpartition(":")[2] for function in functions]
    return tuple(
        name if short.count(name) == 1 else function
        for name, function in zip(short, functions, strict=True)
    )


def split_user_function(function: str) -> tuple[Path, str]:
    """Split `PATH.py:name` into the absolute path and the name."""
    path, _, name = function.rpartition(":")
    try:
        return Path(path).expanduser().absolute(), name
    except RuntimeError as error:  # ~nobody
        raise ValueError(f"Reward.functions: {function}: {error}") from error


def validate(config: RewardConfig) -> None:
    """Check that every function can be found, without running any of the user's code.

    Raises FileNotFoundError, ValueError (not Python, no such function) or ImportError
    (math-verify is missing).
    """
    for function in config.functions:
        if function == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "Reward.functions: math_verify needs a package: "
                "pip install 'math-verify==0.9.0' latex2sympy2_extended"
            )
        if function not in BUILT_IN:
            _check_user_file(*split_user_function(function))


def _check_name(function: str) -> None:
    if function in BUILT_IN:
        return
    path, colon, name = function.rpartition(":")
    if colon and path.endswith(".py") and name.isidentifier():
        return
    close = difflib.get_close_matches(function, BUILT_IN, n=1)
    mend = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"Reward.functions: expected one of {', '.join(BUILT_IN)} or "
        f"PATH.py:function, got {function!r}{mend}"
    )


def _check_user_file(path: Path, name: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"Reward.functions: there is no file {path} (wanted for {name})")
    try:
        with _parsing:
            tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"Reward.functions: {path} is not valid Python: {error}") from error
    defined = _defined_names(tree)
    if name not in defined:
        close = difflib.get_close_matches(name, defined, n=1)
        mend = f"did you mean {close[0]}?" if close else f"it has {', '.join(defined) or 'none'}"
        raise ValueError(f"Reward.functions: {path} defines no function {name!r}; {mend}")
    if isinstance(defined[name], ast.AsyncFunctionDef):
        raise ValueError(f"Reward.functions: {name} in {path} is async; expected a plain function")


def _defined_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the top-level names that may be functions: definitions, imports and assignments."""
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                defined[alias.asname or alias.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
    return defined
