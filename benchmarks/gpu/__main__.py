"""All rows that need a GPU, in one command and under nine minutes.

    python -m benchmarks.gpu --json --output benchmarks/results/gpu.json

Each part (`parts.py`) runs in a process with a deadline. A part that misses it is cut: its rows are
kept, and the result says so. The file is written after each part. `--size tiny` runs everything on
any backend in seconds, to see that it works: its figures mean nothing. The exit status is 1 if a
part was cut or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import environment

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "numpy")
# Of each part, its start and compilations included; in all less than nine minutes.
DEADLINES_S = {"rounds": 130, "kernels": 90, "rollouts": 130, "training": 100, "flips": 70}


def run_part(part: str, size: str, deadline_s: float) -> dict[str, Any]:
    """Run a part in a process; return its rows, and how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run_part", part, "--size", size]
    # Keys and values of the longest slots need more than the three quarters that jax takes.
    settings = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"} | dict(os.environ)
    settings.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # set for the first process only
    start_s, status, why = time.monotonic(), "done", ""
    run: Any = {"cwd": environment.ROOT, "env": settings, "capture_output": True}
    try:
        done = subprocess.run(command, timeout=deadline_s, check=False, **run)
        output = done.stdout
        if done.returncode:
            errors = done.stderr.decode(errors="replace")
            print(errors, file=sys.stderr)
            lines = [x for x in errors.splitlines() if "Error" in x and x[:1].strip()]
            status, why = "failed", lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        status, why = "cut", f"not done within {deadline_s:g} s"
    result: dict[str, Any] = {"status": status, "deadline_s": deadline_s}
    result["wall_s"] = round(time.monotonic() - start_s, 1)
    if why:
        result["why"] = why
    lines = [line for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    return result | {"rows": [json.loads(line) for line in lines]}


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
    for part, result in parts.items():
        for row in result["rows"]:
            names = [f"{k} {v}" for k, v in row.items() if isinstance(v, str | bool)]
            names += [f"{k} {row[k]}" for k in ("live_positions", "nodes") if k in row]
            kept = {k: v for k, v in row.items() if isinstance(v, float) and k != "operations"}
            shown[", ".join([part, *names])] = ", ".join(f"{k} {v}" for k, v in kept.items())
        if result["status"] != "done":
            shown[part] = f"{result['status']}: {result['why']}"
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=DEADLINES_S, default=tuple(DEADLINES_S))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--deadline_s", type=float, help="of each part, in place of its own")
    parser.add_argument("--run_part", choices=DEADLINES_S, help=argparse.SUPPRESS)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    if arguments.run_part:
        from benchmarks.gpu.parts import PARTS, SIZES

        for row in PARTS[arguments.run_part](SIZES[arguments.size]):
            print(json.dumps(row), flush=True)
        return 0
    # This process only looks at the device; its memory is for the parts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if why := refusal(arguments.size):
        print(why, file=sys.stderr)
        return 2
    is_real = arguments.size == "real"
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "kind": "measured" if is_real else "try",
        "size": arguments.size,
        "policy": f"{'Qwen3-0.6B shape, ' if is_real else ''}random weights",
        "parts": {},
        **environment.record("benchmarks.gpu", PACKAGES),
    }
    parts = result["parts"]
    for part in arguments.parts:
        parts[part] = run_part(part, arguments.size, arguments.deadline_s or DEADLINES_S[part])
        print(f"{part}: {parts[part]['status']}", file=sys.stderr, flush=True)
        environment.write(result, arguments)  # this process may be ended at any time
    environment.show(result, arguments, figures(parts))
    return int(any(part["status"] != "done" for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
