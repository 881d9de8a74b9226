"""What training brings and costs: `python -m benchmarks.training PART --json`

| part | what it measures | result |
|---|---|---|
| learns | runs of --config: reward on unseen questions, before and after | train_tiny.json |
| distils | the same, and the share of the gap to its teacher | distill_countdown.json |
| trained | a finished run (--run, --policy): its evaluations, curve, cost | train_smollm2.json |
| evaluations | the share of a default run of 150 steps that its evaluations take | eval_cost.json |
| start | seconds to the first reward: nothing compiled; then another folder | second_run.json |

Runs are `python -m rl.train`, read from outside; `trained` needs --run, --policy and --name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import read_metrics, read_samples, step_rows
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.run_folder import read_launches

UNSEEN = {"temperature": 1.0}
GREEDY = {"num_prompts": 256, "samples": 1, "temperature": 0.0}
CURVE_STEPS = 5  # whose training rewards are averaged
SAMPLES = 3  # shown of the first and of the last step
STOP_S = 120.0
REWARD = "eval/mean_reward"
Rows = Sequence[dict[str, Any]]


def train(run: Path, *settings: str, flags: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run `rl.train` to its end; return its rows of metrics."""
    settings = (f"Run.directory={str(run)!r}", *settings)
    environment.call("rl.train", *flags, *(f"--gin.{x}" for x in settings))
    return read_metrics(run)


def evaluate(settings: dict[str, Any], *policy: str) -> list[float]:
    """Return the mean reward of `rl.evaluate` and its 95% interval."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "evaluation.json"
        gin = [f"--gin.Eval.{name}={value}" for name, value in settings.items()]
        environment.call("rl.evaluate", *policy, *gin, "--output", str(output))
        overall = json.loads(output.read_text())["overall"]
    return [round(overall[f"mean_reward{end}"], 4) for end in ("", "_low", "_high")]


def learns(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with several seeds; `gain` is on questions that training does not draw."""
    unseen = UNSEEN | {"num_prompts": arguments.questions, "samples": arguments.samples}
    config = load(TrainConfig, [str(arguments.config)])
    policy, of_config = config.policy.directory, f"--gin_file={arguments.config}"
    steps, runs = arguments.steps, list[dict[str, Any]]()
    for seed in range(arguments.seeds):
        run, began_s = folder / f"seed{seed}", time.perf_counter()
        rows = train(run, f"Run.seed={seed}", f"Run.steps={steps}", flags=[of_config])
        seconds = round(time.perf_counter() - began_s)
        before = evaluate(unseen, "--run", str(run), "--policy", policy)
        after = evaluate(unseen, "--run", str(run))
        gain, step_s = round(after[0] - before[0], 4), median_step_s(step_rows(rows))
        runs.append({"seed": seed, "steps": steps, "before": before, "after": after, "gain": gain})
        runs[-1] |= {"seconds": seconds, "step_time_s": step_s}
        environment.progress(runs[-1])
    return {"config": str(arguments.config), "gain_min": min(r["gain"] for r in runs), "runs": runs}


def distils(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train as `learns`; `closed` is (after − before) / (teacher − before)."""
    found = learns(arguments, folder)
    of_config = f"--gin_file={arguments.config}"
    unseen = UNSEEN | {"num_prompts": arguments.questions, "samples": arguments.samples}
    config = load(TrainConfig, [str(arguments.config)])
    teacher = evaluate(unseen, of_config, "--policy", str(config.distill.teacher))
    for run in found["runs"]:
        run["closed"] = round(run["gain"] / (teacher[0] - run["before"][0]), 4)
    closed_min = min(run["closed"] for run in found["runs"])
    return found | {"teacher": teacher, "closed_min": closed_min}


def median_step_s(steps: Rows) -> float:
    return round(statistics.median(row["step_time"] for row in steps), 3)


def trained(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Report on a finished run, and on its greedy responses before and after."""
    run, policy = arguments.run, arguments.policy
    if not (run and policy):
        raise SystemExit("trained: expected --run and --policy")
    before = evaluate(GREEDY, "--run", str(run), "--policy", str(policy))
    after = evaluate(GREEDY, "--run", str(run))
    samples = read_samples(run)
    kept = ("prompt", "completion", "answer", "reward")
    ends = {"first": samples[:SAMPLES], "last": samples[-SAMPLES:]}
    return {
        "policy": arguments.name,
        **run_figures(read_metrics(run)),
        "greedy": {"questions": GREEDY["num_prompts"], "before": before, "after": after},
        "greedy_gain_at_least": round(after[1] - before[2], 4),
        "samples": {end: [{k: s[k] for k in kept} for s in some] for end, some in ends.items()},
        "legs": [dataclasses.asdict(launch) for launch in read_launches(run)],
    }


def run_figures(rows: Rows) -> dict[str, Any]:
    """Return gain and cost; `gain_at_least` compares the near ends of the 95% intervals."""
    evaluated, steps = [row for row in rows if REWARD in row], step_rows(rows)
    first, last = evaluated[0], evaluated[-1]
    names = (REWARD, f"{REWARD}_low", f"{REWARD}_high")
    seconds = sum(row["step_time"] for row in steps) + sum(row["eval_s"] for row in evaluated)
    rewards = [row["reward"] for row in steps]
    windows = [rewards[i : i + CURVE_STEPS] for i in range(0, len(rewards), CURVE_STEPS)]
    return {
        "gain": round(last[REWARD] - first[REWARD], 4),
        "gain_at_least": round(last[f"{REWARD}_low"] - first[f"{REWARD}_high"], 4),
        "before": round(first[REWARD], 4),
        "after": round(last[REWARD], 4),
        "steps": len(steps),
        "responses": sum(row["completions/count"] for row in steps),
        "response_tokens": steps[-1]["num_tokens"],
        "hours": round(seconds / 3600, 3),
        "step_time_s": median_step_s(steps),
        "curve": {
            "evaluations": {str(r["step"]): [round(r[n], 4) for n in names] for r in evaluated},
            "training": [round(statistics.fmean(window), 4) for window in windows],
        },
    }


def evaluations(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    start_s = time.perf_counter()
    rows = train(folder / "run", f"Run.steps={arguments.steps}")
    return evaluation_cost(rows, time.perf_counter() - start_s)


def evaluation_cost(rows: Rows, wall_s: float) -> dict[str, Any]:
    """Return evaluations' share of all steps and evaluations, and of the whole process."""
    by_step = {row["step"]: float(row["eval_s"]) for row in rows if "eval_s" in row}
    steps_s = math.fsum(float(row["step_time"]) for row in step_rows(rows))
    eval_s = math.fsum(by_step.values())
    return {
        "share_of_run": round(eval_s / (steps_s + eval_s), 4),
        "share_of_wall": round(eval_s / wall_s, 4),
        "eval_s": round(eval_s, 2),
        "steps_s": round(steps_s, 1),
        "wall_s": round(wall_s, 1),
        "steps": len(step_rows(rows)),
        "evaluations": {str(step): round(seconds, 2) for step, seconds in by_step.items()},
    }


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


PARTS = {
    "learns": learns,
    "distils": distils,
    "trained": trained,
    "evaluations": evaluations,
    "start": start,
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return PARTS[arguments.part](arguments, Path(folder))


if __name__ == "__main__":
    flags: dict[str, Any] = {"run": Path, "policy": Path, "name": str}
    flags |= {"config": Path("configs/tiny_cpu.gin"), "seeds": 3, "steps": 150}
    flags |= {"questions": 100, "samples": 8}  # of each task
    environment.run(__doc__, dict.fromkeys(PARTS, measure), environment.TRAINING, **flags)
