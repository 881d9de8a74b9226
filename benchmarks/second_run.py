"""How long a newcomer waits: from the command to the first reward, twice.

    python -m benchmarks.second_run --json --output benchmarks/results/second_run.json

The default run is started with an empty cache of compiled programs, stopped after its first step,
and started again, of the same configuration in another folder. Seconds count from the start of
the process to the line of step 1. The cache is the user's own folder, which lies in a temporary
one here.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environment

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "orbax-checkpoint")
_HIDDEN = ("--gin_file",)
_STOP_S = 120.0


def first_reward_s(config: str, run: Path, cache: Path) -> float:
    """Seconds from the start of a run to its first line with a reward; the run is ended then."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env |= {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "rl.train", f"--gin_file={config}"]
    command += [f"--gin.Run.directory={str(run)!r}"]
    began_s = time.perf_counter()
    with subprocess.Popen(
        command, cwd=environment.ROOT, env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if line.startswith("step ") and "reward" in line:
                    return time.perf_counter() - began_s
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=_STOP_S)
            finally:
                process.kill()
    raise RuntimeError(f"the run ended before its first step:\n{''.join(said)}")


def measure(config: str, folder: Path, repeats: int) -> dict[str, Any]:
    """The first run, and the second to the last, which find what it compiled."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    seconds = [first_reward_s(config, folder / str(i), cache) for i in range(1 + repeats)]
    programs = list(cache.rglob("*-cache"))
    return {
        "first_run_s": seconds[0],
        "second_run_s": sorted(seconds[1:])[repeats // 2],
        "second_runs_s": seconds[1:],
        "programs_kept": len(programs),
        "kept_mib": sum(p.stat().st_size for p in programs) / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_run", description=__doc__)
    parser.add_argument("--gin_file", default="configs/tiny_cpu.gin")
    parser.add_argument("--repeats", type=int, default=3, help="second runs; the median counts")
    environment.add_output_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.gin_file, Path(folder), args.repeats)
    result = environment.record("benchmarks.second_run", PACKAGES, _HIDDEN) | figures
    environment.show(result, args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
