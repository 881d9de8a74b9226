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
from typing import Any

from benchmarks import environment

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "numpy")
# Of each part, its start and compilations included; in all less than nine minutes.
DEADLINES_S = {"rounds": 130, "kernels": 90, "rollouts": 130, "training": 100, "flips": 70}


def run_part(part: str, size: str, deadline_s: float) -> dict[str, Any]:
    """Run a part in a process; return its rows, and how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run_part", part, size]
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
            environment.progress(errors)
            lines = [x for x in errors.splitlines() if "Error" in x and x[:1].strip()]
            status, why = "failed", lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        status, why = "cut", f"not done within {deadline_s:g} s"
    result: dict[str, Any] = {"status": status, "deadline_s": deadline_s}
    result["wall_s"] = round(time.monotonic() - start_s, 1)
    lines = [line for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    rows = [json.loads(line) for line in lines]
    return result | ({"why": why} if why else {}) | {"rows": rows}


def refusal(size: str) -> str | None:
    """Return why this size cannot be measured here."""
    if size == "tiny":
        return None
    import jax

    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        platform = f"no device ({str(error).splitlines()[0]})"
    mend = "install '.[cuda]' on a machine that has one, or try the command with --size=tiny"
    expected = f"expected a GPU that jax computes on, got {platform}; mend: {mend}"
    return None if platform == "gpu" else expected


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    # This process only looks at the device; its memory is for the parts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    size = arguments.size
    if why := refusal(size):
        environment.progress(why)
        raise SystemExit(2)
    is_real, parts = size == "real", dict[str, Any]()
    result = {
        "kind": "measured" if is_real else "try",
        "size": size,
        "policy": f"{'Qwen3-0.6B shape, ' if is_real else ''}random weights",
        "parts": parts,
    }
    for part in arguments.parts:
        parts[part] = run_part(part, size, arguments.deadline_s or DEADLINES_S[part])
        environment.progress(f"{part}: {parts[part]['status']}")
        environment.write(result | arguments.record(), arguments)  # the process may be ended
    return result


def main() -> int:
    if sys.argv[1:2] == ["--run_part"]:
        from benchmarks.gpu.parts import PARTS, SIZES

        part, size = sys.argv[2:]
        for row in PARTS[part](SIZES[size]):
            print(json.dumps(row), flush=True)
        return 0
    parts, choices = tuple(DEADLINES_S), {"parts": tuple(DEADLINES_S), "size": ("real", "tiny")}
    flags = {"parts": parts, "size": "real", "deadline_s": float}
    found = environment.run(__doc__, measure, PACKAGES, choices, **flags)["parts"]
    return int(any(part["status"] != "done" for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
