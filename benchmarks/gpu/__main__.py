"""All rows that need a GPU, in one command and under nine minutes.

    python -m benchmarks.gpu --json --output benchmarks/results/gpu.json

Each part runs in a process of its own with a deadline. A part that is not done by then is cut: the
rows that it has are kept, and the result says so. The file is written after each part. What is
compared takes turns in one process; medians count. `--size tiny` runs everything on any backend in
seconds, to see that it works: its figures mean nothing. The exit status is 1 where a part was cut
or failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import environment

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "numpy")
# Seconds of each part, its start and compilations included; in all less than nine minutes.
DEADLINES_S = {"rounds": 130, "kernels": 90, "rollouts": 130, "training": 100, "flips": 70}
PARTS = tuple(DEADLINES_S)
ENDING_S = 10.0  # for a process that was killed


def part_rows(part: str, size: str) -> Any:
    """Return the rows of a part, one by one as they are measured."""
    from benchmarks.gpu.sizes import SIZES

    module = importlib.import_module(f"benchmarks.gpu.{part}")
    return module.rows(SIZES[size])


def run_part(part: str, size: str, deadline_s: float) -> dict[str, Any]:
    """Run a part in a process of its own; return its rows, and how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run_part", part, "--size", size]
    began_s = time.monotonic()
    # keys and values of the longest slots need more than the three quarters that jax takes
    settings = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"} | dict(os.environ)
    settings.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # it is meant for the first process
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=environment.ROOT, env=settings, **pipes)
    status, why = "done", ""
    try:
        printed, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate(timeout=ENDING_S)
        status, why = "cut", f"not done within {deadline_s:g} s"
    if status == "done" and process.returncode:
        said = [line for line in errors.splitlines() if "Error" in line and line[:1].strip()]
        status, why = "failed", said[-1] if said else f"exit status {process.returncode}"
        print(errors, file=sys.stderr)
    lines = [line for line in printed.splitlines(keepends=True) if line.endswith("\n")]
    found: dict[str, Any] = {"status": status, "deadline_s": deadline_s}
    found["wall_s"] = round(time.monotonic() - began_s, 1)
    if why:
        found["why"] = why
    return found | {"rows": [json.loads(line) for line in lines]}


def refusal(size: str) -> str | None:
    """Return why this size cannot be measured here."""
    if size == "tiny":
        return None
    import jax

    mend = "install '.[cuda]' on a machine that has one, or try the command with --size=tiny"
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        platform = f"no device ({str(error).splitlines()[0]})"
    if platform == "gpu":
        return None
    return f"expected a GPU that jax computes on, got {platform}; mend: {mend}"


def figures(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a line for each row, and for each part that was not done."""
    shown = {}
    for part, found in parts.items():
        for row in found["rows"]:
            names = [f"{k} {v}" for k, v in row.items() if isinstance(v, str | bool)]
            name = ", ".join([part, *names, *_sizes(row)])
            kept = {k: v for k, v in row.items() if isinstance(v, float) and k != "operations"}
            shown[name] = ", ".join(f"{k} {v}" for k, v in kept.items())
        if found["status"] != "done":
            shown[part] = f"{found['status']}: {found['why']}"
    return shown


def _sizes(row: Mapping[str, Any]) -> Sequence[str]:
    kept = ("live_positions", "nodes_of_a_slot", "nodes")
    return [f"{k} {row[k]}" for k in kept if k in row]


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--deadline_s", type=float, help="of each part, in place of its own")
    parser.add_argument("--run_part", choices=PARTS, help=argparse.SUPPRESS)
    environment.add_output_flags(parser)
    return parser


def main() -> int:
    arguments = command_line().parse_args()
    if arguments.run_part:
        for row in part_rows(arguments.run_part, arguments.size):
            print(json.dumps(row), flush=True)
        return 0
    # this process looks at the device, and leaves its memory to those of the parts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if why := refusal(arguments.size):
        print(why, file=sys.stderr)
        return 2
    parts: dict[str, Any] = {}
    result: dict[str, Any] = {"benchmark": "gpu", "kind": "measured", "size": arguments.size}
    result |= {"policy": "Qwen3-0.6B's shape, random weights", "parts": parts}
    if arguments.size == "tiny":
        result |= {"kind": "try", "policy": "random weights"}
    result |= environment.record("benchmarks.gpu", PACKAGES)
    for part in arguments.parts:
        parts[part] = run_part(part, arguments.size, arguments.deadline_s or DEADLINES_S[part])
        print(f"{part}: {parts[part]['status']}", file=sys.stderr, flush=True)
        environment.write(result, arguments)  # whoever started this may end it
    environment.show(result, arguments, figures(parts))
    return int(any(found["status"] != "done" for found in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
