"""What evaluation costs a run: `python -m benchmarks.eval_cost --json`

Runs `python -m rl.train` as it ships, with its default evaluation: before the first step, every
`Eval.every_steps` steps and at the end. `share_of_run` is the seconds of the evaluations over those
of all steps and evaluations, both as the run measured them; `share_of_wall` is over the whole
process, compiling included. The goal is 5% of a run of 150 steps.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.metrics.writer import read_metrics, step_rows

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "reasoning-gym")


def cost(rows: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """Return the figures of a finished run, from its rows of metrics and its seconds."""
    evaluations = {row["step"]: float(row["eval_s"]) for row in rows if "eval_s" in row}
    steps_s = math.fsum(float(row["step_time"]) for row in step_rows(rows))
    eval_s = math.fsum(evaluations.values())
    first, last = (rows[i] for i in (0, -1))
    return {
        "share_of_run": round(eval_s / (steps_s + eval_s), 4),
        "share_of_wall": round(eval_s / wall_s, 4),
        "eval_s": round(eval_s, 2),
        "steps_s": round(steps_s, 1),
        "wall_s": round(wall_s, 1),
        "steps": len(step_rows(rows)),
        "evaluations": {str(step): round(seconds, 2) for step, seconds in evaluations.items()},
        "questions": last["eval/questions"],
        "reward_before": first["eval/mean_reward"],
        "reward_after": last["eval/mean_reward"],
        "interval_after": [last["eval/mean_reward_low"], last["eval/mean_reward_high"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_cost", description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    environment.add_output_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "rl.train", f"--gin.Run.directory={str(folder)!r}"]
        command += [f"--gin.Run.seed={args.seed}", f"--gin.Run.steps={args.steps}"]
        began_s = time.perf_counter()
        subprocess.run(command, cwd=environment.ROOT, check=True, stdout=subprocess.DEVNULL)
        figures = cost(read_metrics(folder), time.perf_counter() - began_s)
    environment.show(environment.record("benchmarks.eval_cost", PACKAGES) | figures, args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
