"""All rows that need a GPU, in one command and thirteen minutes.

    python -m benchmarks.gpu --json --output benchmarks/results/gpu.json

Each part (`grpo.py`, `parts.py`) runs in a process with a deadline, the most important first. A
part that misses it is cut: its rows are kept, and the result says so. The file is written after
each row. `--size tiny` runs everything on any backend in three minutes, to see that it works: its
figures mean nothing. The exit status is 1 if a part was cut or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import environment

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "numpy")
Save = Callable[[dict[str, Any]], None]
# Of each part, its start and compilations included; in all thirteen minutes.
DEADLINES_S = {
    **{"grpo": 240, "rounds": 100, "kernels": 60},
    **{"rollouts": 130, "training": 100, "same_bits": 120},
}


def run_part(part: str, size: str, deadline_s: float, save: Save) -> dict[str, Any]:
    """Run a part in a process, and save after each of its rows; return them, and how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run_part", part, size]
    # Keys and values of the longest slots need more than the three quarters that jax takes.
    settings = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"} | dict(os.environ)
    settings.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # set for the first process only
    result: dict[str, Any] = {"status": "running", "deadline_s": deadline_s, "rows": []}
    start_s, is_cut = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile() as errors:
        run: Any = {"cwd": environment.ROOT, "env": settings, "stderr": errors}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, **run)

        def cut() -> None:
            is_cut.set()
            os.killpg(process.pid, signal.SIGKILL)  # its runs too

        timer = threading.Timer(deadline_s, cut)
        timer.start()
        try:
            for line in process.stdout or ():
                if line.endswith(b"\n"):
                    result["rows"].append(json.loads(line))
                    save(result)
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                cut()
                process.wait()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    result["status"], why = "done", ""
    if is_cut.is_set():
        result["status"], why = "cut", f"not done within {deadline_s:g} s"
    elif process.returncode:
        lines = [x for x in text.splitlines() if "Error" in x and x[:1].strip()]
        result["status"], why = "failed", lines[-1] if lines else f"status {process.returncode}"
    if result["status"] != "done":
        environment.progress(text)
    result["wall_s"] = round(time.monotonic() - start_s, 1)
    return result | ({"why": why} if why else {})


def refusal(size: str) -> str | None:
    """Return why this size cannot be measured here."""
    if size == "tiny":
        return None
    import jax

    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        platform = f"no device ({str(error).splitlines()[0]})"
    fix = "install '.[cuda]' on a machine that has one, or try the command with --size=tiny"
    expected = f"expected a GPU that jax computes on, got {platform}; fix: {fix}"
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
    record = arguments.record()

    def save(part: str, found: dict[str, Any]) -> None:  # the process may be ended at any time
        parts[part] = found
        environment.write(result | record, arguments)

    for part in arguments.parts:
        deadline_s = arguments.deadline_s or DEADLINES_S[part]
        save(part, run_part(part, size, deadline_s, partial(save, part)))
        environment.progress(f"{part}: {parts[part]['status']}")
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
