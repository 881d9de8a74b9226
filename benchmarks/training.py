"""What training brings and costs: `python -m benchmarks.training PART --json`

| part | what it measures | result |
|---|---|---|
| learns | default runs: reward on unseen questions, before and after | train_tiny.json |
| start | seconds to the first reward: nothing compiled; then another folder | second_run.json |

Runs are `python -m rl.train`, read from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.metrics.writer import read_metrics, step_rows

UNSEEN = {"samples": 8, "temperature": 1.0}
STOP_S = 120.0


def evaluate(num_prompts: int, *policy: str) -> float:
    """Return the mean reward of `rl.evaluate` on so many unseen questions of each task."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "evaluation.json"
        settings = {"num_prompts": num_prompts, **UNSEEN}
        gin = [f"--gin.Eval.{name}={value}" for name, value in settings.items()]
        environment.call("rl.evaluate", *policy, *gin, "--output", str(output))
        return round(json.loads(output.read_text())["overall"]["mean_reward"], 4)


def learns(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with several seeds; `gain` is on questions that training does not draw."""
    before, runs = evaluate(arguments.questions, "--policy", "policies/tiny"), []
    for seed in range(arguments.seeds):
        run = folder / f"seed{seed}"
        settings = f"Run.directory={str(run)!r}", f"Run.seed={seed}", f"Run.steps={arguments.steps}"
        environment.call("rl.train", *(f"--gin.{x}" for x in settings))
        steps, after = (
            step_rows(read_metrics(run)),
            evaluate(arguments.questions, "--run", str(run)),
        )
        runs.append({"seed": seed, "steps": len(steps), "unseen_reward": after})
        step_s = statistics.median(row["step_time"] for row in steps)
        runs[-1] |= {"gain": round(after - before, 4), "step_time_s": round(step_s, 3)}
    gains = [run["gain"] for run in runs]
    return {"gain_min": min(gains), "unseen_reward_before": before, "runs": runs}


def start(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the default run with an empty cache of programs, then three times with a full one."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    seconds = [first_reward_s(folder / str(i), cache) for i in range(4)]
    programs = list(cache.rglob("*-cache"))
    return {
        "first_run_s": seconds[0],
        "second_run_s": statistics.median(seconds[1:]),
        "second_runs_s": seconds[1:],
        "programs_kept": len(programs),
        "kept_mib": sum(p.stat().st_size for p in programs) / 2**20,
    }


def first_reward_s(run: Path, cache: Path) -> float:
    """Return seconds from the start of a run to its first line with a reward; stop it then."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env |= {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "rl.train", f"--gin.Run.directory={str(run)!r}"]
    options: Any = {"cwd": environment.ROOT, "env": env, "stderr": subprocess.PIPE, "text": True}
    start_s, lines = time.perf_counter(), []
    with subprocess.Popen(command, **options) as process:
        try:
            for line in process.stderr:
                lines.append(line)
                if line.startswith("step ") and "reward" in line:
                    return time.perf_counter() - start_s
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=STOP_S)
            finally:
                process.kill()
    raise RuntimeError(f"the run ended before its first step:\n{''.join(lines)}")


PARTS = {"learns": learns, "start": start}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return PARTS[arguments.part](arguments, Path(folder))


if __name__ == "__main__":
    flags = {"seeds": 3, "steps": 150, "questions": 100}
    environment.run(__doc__, dict.fromkeys(PARTS, measure), environment.TRAINING, **flags)
