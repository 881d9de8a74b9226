"""Does the default run learn? `python -m benchmarks.train_tiny --json`

Runs `python -m rl.train` as it ships, once a seed, one after the other, and reads its
metrics.jsonl from outside. `gain` is the mean reward on questions that training does not
draw (`rl.evaluate`), the same ones for the shipped policy and the trained one.
`training_gain` compares the first and last WINDOW steps' own rewards: other questions at
each end, and the first steps have learnt already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.metrics.writer import read_metrics, step_rows

WINDOW = 10
ASKED = {"num_prompts": 100, "samples": 8, "temperature": 1.0}  # of each task
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "reasoning-gym")


def run(seed: int, limit_s: float, steps: int | None, folder: Path) -> dict[str, Any]:
    """One run, ended after `limit_s`; rows are timed by when they appear in the file."""
    command = [sys.executable, "-m", "rl.train", f"--gin.Run.directory={folder}"]
    command += [f"--gin.Run.seed={seed}"] + ([f"--gin.Run.steps={steps}"] if steps else [])
    start = time.perf_counter()
    arrived_s: list[float] = []
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and time.perf_counter() - start < limit_s:
            time.sleep(0.2)
            arrived_s += [time.perf_counter() - start] * (_num_rows(folder) - len(arrived_s))
        process.terminate()
        code = process.wait()
    rows = step_rows(read_metrics(folder))
    assert len(rows) >= 2 * WINDOW, f"seed {seed}: {len(rows)} steps, exit code {code}"
    rewards = [row["reward"] for row in rows]
    means = [statistics.mean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    return {
        "seed": seed,
        "steps": len(rows),
        "first_reward_line_s": round(arrived_s[0], 1),
        "reward_start": round(means[0], 4),
        "reward_end": round(means[-1], 4),
        "training_gain": round(means[-1] - means[0], 4),
        "seconds": round(arrived_s[-1]),
        "step_time_s": round(statistics.median(row["step_time"] for row in rows), 3),
        "rollout_share": round(
            statistics.median(row["time/rollout"] / row["step_time"] for row in rows), 3
        ),
        "logp_difference_max": max(row["sampling/sampling_logp_difference/max"] for row in rows),
    }


def unseen_reward(*flags: str) -> float:
    """Mean reward on the evaluation's questions of the policy that the flags name."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "evaluation.json"
        asked = [f"--gin.Eval.{field}={value}" for field, value in ASKED.items()]
        command = [sys.executable, "-m", "rl.evaluate", *flags, *asked, "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())["overall"]["mean_reward"]


def _num_rows(folder: Path) -> int:
    """The training steps so far: an evaluation before the first one has a row of its own."""
    exists = (folder / "metrics.jsonl").exists()
    return len(step_rows(read_metrics(folder))) if exists else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit_s", type=float, default=600.0, help="each run ends after this")
    parser.add_argument("--steps", type=int, help="default: what the configuration says")
    environment.add_output_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        before = unseen_reward("--policy", "policies/tiny")
        runs = []
        for seed in range(args.seeds):
            folder = Path(scratch) / f"seed{seed}"
            figures = run(seed, args.limit_s, args.steps, folder)
            after = unseen_reward("--run", str(folder))
            figures |= {"unseen_reward": round(after, 4), "gain": round(after - before, 4)}
            runs.append(figures)
            if not args.json:
                print(runs[-1])
    result = {
        "gain_min": min(r["gain"] for r in runs),
        "unseen_reward_before": round(before, 4),
        "first_reward_line_s_max": max(r["first_reward_line_s"] for r in runs),
        "runs": runs,
        **environment.record("benchmarks.train_tiny", PACKAGES),
    }
    environment.show(result, args, {k: v for k, v in result.items() if k != "runs"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
