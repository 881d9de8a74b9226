"""The core: the code of ours that a reader of one local GRPO step meets.

    python -m tests.support.core_code          the figures, and the files of each part

A small run is profiled on the main thread up to its first step (the start), and in its fourth step.
Device code is the code of ours that runs while jax traces.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "spec", "sched", "rl")
OURS = tuple(f"{ROOT}/{prefix}/" for prefix in ("reprise", *PACKAGES))  # of file names
RUN = (
    "--gin_file=configs/epochs_tiny.gin",
    "--gin.Run.steps=4",
    "--gin.Task.size=4",
    "--gin.Rollout.prompts_per_step=8",
    "--gin.Sampling.max_new_tokens=64",
    "--gin.Engine.slots=8",
    "--gin.Engine.max_nodes=4",
    "--gin.Eval.num_prompts=0",
    "--gin.Speculation.budget=fixed:4",
)
TRACED_STEP = 4  # of the second epoch: history drafts
MOST_SHOWN = 40  # of the functions that are called most often
ROUND = "Rounds.run"  # called once for the rounds between two fetches


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of ours; also a module or a comprehension, whose last name is then `<…>`."""

    file: str  # from the root
    name: str
    line: int

    @property
    def is_named(self) -> bool:
        return not self.name.endswith(">")


class Profile:
    """The code that one thread calls: how often, and what of it jax traces."""

    def __init__(self) -> None:
        self.calls = collections.Counter[CodeType]()
        self.traced = set[CodeType]()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return
        self.calls[code] += 1
        core = sys.modules.get("jax._src.core")
        is_clean = getattr(core, "trace_state_clean", None)  # None while jax is being imported
        if code not in self.traced and is_clean is not None and not is_clean():
            self.traced.add(code)

    def functions(self) -> dict[Function, int]:
        """Return the functions of ours, and their calls."""
        found = {_function(code): calls for code, calls in self.calls.items()}
        return {function: calls for function, calls in found.items() if function is not None}

    def traced_functions(self) -> set[Function]:
        found = {_function(code) for code in self.traced}
        return {function for function in found if function is not None}


@functools.cache
def _function(code: CodeType) -> Function | None:
    """Return a function of ours; None for any other code."""
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    if relative.parts[0] not in PACKAGES:
        return None
    return Function(relative.as_posix(), code.co_qualname, code.co_firstlineno)


def profiled(folder: Path) -> dict[str, Any]:
    """Return the figures of a run in `folder`, and the functions of each part."""
    start, step = Profile(), Profile()
    sys.setprofile(start)
    from reprise.rl.commands import train
    from reprise.rl.run import loop

    original, num_steps = loop.train_step, 0

    def train_step(*given: Any, **options: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        sys.setprofile(step if num_steps == TRACED_STEP else None)
        try:
            return original(*given, **options)
        finally:
            sys.setprofile(None)

    loop.train_step = train_step
    try:
        status = train.main([*RUN, f"--gin.Run.directory={str(folder / 'run')!r}"])
    finally:
        sys.setprofile(None)
        loop.train_step = original
    assert (status, num_steps) == (0, TRACED_STEP)
    calls = step.functions()
    rounds = sum(n for function, n in calls.items() if function.name == ROUND)
    assert rounds, f"expected calls of {ROUND} in a step: its name has changed"
    host = {function for function in calls if function.is_named}
    device = {f for f in start.traced_functions() if f.is_named} - host
    modules = {function for function in start.functions() if function.name == "<module>"}
    begun = {function for function in start.functions() if function.is_named}
    return {
        "figures": {
            **{f"host {name}": value for name, value in sizes(host).items()},
            **{f"device {name}": value for name, value in sizes(device).items()},
            "calls a round": round(sum(calls.values()) / rounds),
            "start modules": len(modules),
            "start functions": len(begun),
        },
        "host": _by_file(host),
        "device": _by_file(device),
        "calls": {f"{f.file} {f.name}": n / rounds for f, n in calls.items()},
    }


def sizes(functions: Iterable[Function]) -> dict[str, int]:
    """Return the number of files, functions and lines of functions."""
    functions = list(functions)
    lines = sum(num_lines(function) for function in functions)
    return {"files": len({f.file for f in functions}), "functions": len(functions), "lines": lines}


def num_lines(function: Function) -> int:
    return _lines_by_start(function.file).get(function.line, 0)


@functools.cache
def _lines_by_start(file: str) -> dict[int, int]:
    found = dict[int, int]()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            assert node.end_lineno is not None
            found[first] = node.end_lineno - first + 1
    return found


def _by_file(functions: Iterable[Function]) -> dict[str, list[str]]:
    found = collections.defaultdict[str, list[str]](list)
    for function in functions:
        found[function.file].append(function.name)
    return {file: sorted(names) for file, names in sorted(found.items())}


def tuple_splats(tree: ast.AST) -> list[int]:
    """Return the lines of calls `f(*x)` whose x is a tuple that the function has just made."""
    found = set[int]()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        tuples = {name for name, value in _assigned(scope) if isinstance(value, ast.Tuple)}
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call):
                continue
            for argument in call.args:
                value = argument.value if isinstance(argument, ast.Starred) else None
                is_local = isinstance(value, ast.Name) and value.id in tuples
                if isinstance(value, ast.Tuple) or is_local:
                    found.add(call.lineno)
    return sorted(found)


def _assigned(scope: ast.AST) -> Iterable[tuple[str, ast.expr]]:
    """Yield the names that a scope assigns, and their values."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(name, ast.Name):
                        yield name.id, value


def parallel_assignments(tree: ast.AST) -> list[int]:
    """Return the lines of assignments `a, b = x, y`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ]


def style(root: Path = ROOT) -> dict[str, float]:
    """Return the figures of the source: calls of packed tuples, assignments, the largest room."""
    splats = parallels = statements = 0
    rooms = collections.Counter[str]()
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            splats += len(tuple_splats(tree))
            parallels += len(parallel_assignments(tree))
            statements += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
            rooms[path.parent.relative_to(root).as_posix()] += text.count("\n")
    return {
        "tuple splats": splats,
        "parallel assignments per 1,000 statements": round(1000 * parallels / statements, 1),
        "lines of the largest room": max(rooms.values(), default=0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a file for the figures and functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = profiled(Path(folder))
    found["figures"] |= style()
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1))
    for name, value in found["figures"].items():
        print(f"{name:45} {value}")
    print("\ncalls a round:")
    for name, calls in sorted(found["calls"].items(), key=lambda item: -item[1])[:MOST_SHOWN]:
        print(f"  {calls:6.1f}  {name}")
    for part in ("host", "device"):
        print(f"\n{part}:")
        for file, names in found[part].items():
            print(f"  {file} {len(names)}: {', '.join(names)}")
