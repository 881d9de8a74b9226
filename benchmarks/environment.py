"""The command line that benchmarks share, and the fields that every result carries."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reprise.rl.runtime.devices import device, versions

ROOT = Path(__file__).parents[1]
JAX = ("jax", "jaxlib", "numpy")
TRAINING = (*JAX, "numba", "optax", "orbax-checkpoint", "reasoning-gym")
_MEASURED = ("models", "spec", "sched", "rl", "benchmarks")

Measure = Callable[[argparse.Namespace], Mapping[str, Any]]


def run(
    doc: str | None,
    measure: Measure | Mapping[str, Measure],
    packages: Sequence[str] = JAX,
    choices: Mapping[str, Sequence[str]] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """Parse the command line, measure, and print and write the result.

    Several `measure` are parts, and the first argument names one. `flags` are defaults by name: the
    type of a default is the flag's, a tuple takes several values, a type has no default. The record
    names a flag of type Path without its value. `arguments.record()` returns the record.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if isinstance(measure, Mapping):
        parser.add_argument("part", choices=measure)
    for name, default in flags.items():
        parser.add_argument(f"--{name}", **_options(default), choices=(choices or {}).get(name))
    parser.add_argument("--json", action="store_true", help="print one line")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    arguments = parser.parse_args()
    paths = {f"--{name}" for name, x in flags.items() if x is Path or isinstance(x, Path)}
    # not before it has measured: the record opens jax's devices
    arguments.record = partial(record, packages, {"--output", *paths})
    step = measure[arguments.part] if isinstance(measure, Mapping) else measure
    figures = step(arguments)
    result = {**figures, **arguments.record()}
    write(result, arguments)
    print(json.dumps(result, indent=None if arguments.json else 1))
    return result


def _options(default: Any) -> dict[str, Any]:
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, tuple):
        return {"type": type(default[0]), "nargs": "*", "default": default}
    return {"type": type(default), "default": default, "help": f"default: {default}"}


def record(packages: Sequence[str], hidden: set[str]) -> dict[str, Any]:
    """Return command, commit, device, instructions of CPU kernels, versions and date.

    `uncommitted_changes`: measured files differ from `commit`. The values of `hidden` flags are
    paths of this machine.
    """
    from reprise.models.kernels.cpu.cpu_tiles import HAS_WIDE_REGISTERS

    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else "benchmarks"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
    return {
        "benchmark": module.partition(".")[2],
        "command": " ".join(["python -m", module, *_without_paths(sys.argv[1:], hidden)]),
        "commit": _git("rev-parse", "HEAD") or None,
        "uncommitted_changes": bool(changed),
        "device": device(),
        "instructions": "AVX-512" if HAS_WIDE_REGISTERS else "AVX2",
        "versions": versions(packages),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def write(result: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Write a result to the file of `--output`, if it is given."""
    if arguments.output:
        replace(arguments.output, result)


def replace(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file of JSON so that it is whole at any moment, and after any end of the process."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(new, path)


def call(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run a module of this checkout in another process, which frees its memory at its end."""
    command = [sys.executable, "-m", module, *arguments]
    settings = os.environ | dict(env or {})
    subprocess.run(command, cwd=ROOT, env=settings, stdout=sys.stderr, check=True)


def progress(*values: Any) -> None:
    """Print to the other stream, which holds no result."""
    print(*values, file=sys.stderr, flush=True)


def _without_paths(arguments: Sequence[str], hidden: set[str]) -> list[str]:
    shown, skips = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if skips:
            skips = False
        elif flag in hidden:
            shown += [flag, flag.lstrip("-").upper()]
            skips = not equals
        else:
            shown.append(argument)
    return shown


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git: the commit is unknown
        return ""
    return done.stdout.strip()
