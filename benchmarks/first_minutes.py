"""The first minutes of a new user: seconds until the demo ends, and until a server answers.

    python -m benchmarks.first_minutes demo --json
    python -m benchmarks.first_minutes server --json

Each command runs twice as a process of its own: cold, without any compiled program, and warm, with
the programs that the first run kept. The kernels that numba compiles belong to the set-up. `demo`
reads its gain and the responses that differ from the demo's own lines.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import environment

LIMIT_S = 900.0
POLL_S = 0.1
MEDIAN = re.compile(r"median of (\d+): ([\d.]+)×; (\d+) of (\d+) responses differ")
Run = Callable[[dict[str, str], Path], dict[str, Any]]


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the demo, its pairs, its gain and the responses that differ."""

    def run(variables: dict[str, str], folder: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "rl.demo", "--output", str(folder / "demo")]
        start_s = time.monotonic()
        done = subprocess.run(
            command,
            cwd=environment.ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        seconds = time.monotonic() - start_s
        found = MEDIAN.search(done.stdout)
        assert found is not None, done.stdout
        pairs, gain, different, responses = found.groups()
        return {
            "seconds": seconds,
            "pairs": int(pairs),
            "gain": float(gain),
            "responses": int(responses),
            "responses_that_differ": int(different),
            "says_busy": "this machine is busy" in done.stdout,
        }

    return cold_and_warm(run)


def server(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds until a server answers, has compiled, and has stopped."""

    def run(variables: dict[str, str], folder: Path) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "rl.serve", "--policy", arguments.policy]
        command += ["--port", str(port), "--folder", str(folder / "served")]
        start_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=environment.ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while not answers(f"http://127.0.0.1:{port}/api/v1/healthz"):
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < start_s + LIMIT_S, "the server has not answered"
                time.sleep(POLL_S)
            up_s = time.monotonic() - start_s
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("compiled ") for line in lines), "it ended"
            compiled_s = time.monotonic() - start_s
            stop_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT_S)
            stopped_s = time.monotonic() - stop_s
        finally:
            process.kill()
        return {"up_s": up_s, "compiled_s": compiled_s, "stopped_s": stopped_s}

    return cold_and_warm(run)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=POLL_S * 10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def cold_and_warm(run: Run) -> dict[str, Any]:
    """Return what a run measures without kept programs, and with the programs that it has kept."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
        variables.pop("JAX_COMPILATION_CACHE_DIR", None)
        cold = run(variables, Path(folder) / "cold")
        warm = run(variables, Path(folder) / "warm")
    return {"cold": cold, "warm": warm}


if __name__ == "__main__":
    environment.run(__doc__, {"demo": demo, "server": server}, policy="policies/tiny")
