"""Where and with what a figure was made: the fields that every result carries."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.runtime.environment import device, versions

ROOT = Path(__file__).parents[1]
_MEASURED = ("models", "spec", "sched", "rl", "benchmarks")


def record(module: str, packages: Sequence[str], hidden: Sequence[str] = ()) -> dict[str, Any]:
    """Command, commit, device, versions and date of this process.

    `hidden` are flags, besides `--output`, whose value is a path of this machine: the record
    names the flag only. `uncommitted_changes` says that measured files differ from `commit`.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
    arguments = _without_paths(sys.argv[1:], ("--output", *hidden))
    return {
        "command": " ".join(["python -m", module, *arguments]),
        "commit": _git("rev-parse", "HEAD") or None,
        "uncommitted_changes": bool(changed),
        "device": device(),
        "versions": versions(packages),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")


def show(
    result: Mapping[str, Any], arguments: argparse.Namespace, figures: Mapping[str, Any]
) -> None:
    """Write and print a result as the output flags say; `figures` are what people read."""
    write(result, arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print(f"{name:{width}}  {value}")


def write(result: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Write a result to the file that the output flags name, if any."""
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def _without_paths(arguments: Sequence[str], hidden: Sequence[str]) -> list[str]:
    shown, skip = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
            continue
        if flag in hidden:
            shown += [flag, f"{flag.lstrip('-').upper()}"]
            skip = not equals
        else:
            shown.append(argument)
    return shown


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # a checkout without git: the record says so by an empty commit
        return ""
    return done.stdout.strip()
