"""What a training run came to: `python -m benchmarks.trained_run --run RUN --policy DIR --json`.

Reads a finished run folder: its evaluations, which ask the same unseen questions before and after,
and its steps. `gain_at_least` compares the lower end of the last evaluation's 95% interval with the
upper end of the first one's. Then `rl.evaluate` asks the policy that the run started from, and the
run's newest checkpoint, one greedy response to each of `--questions` unseen questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.loop import legs
from rl.metrics.writer import read_metrics, read_samples, step_rows

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "reasoning-gym")
WINDOW = 5  # steps whose training rewards are averaged
SAMPLES = 3  # shown of the first and of the last step
_FIGURE = "eval/mean_reward"


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run's metrics say of its gain and its cost."""
    evaluated, steps = [row for row in rows if _FIGURE in row], step_rows(rows)
    first, last = evaluated[0], evaluated[-1]
    rewards = [row["reward"] for row in steps]
    hours = sum(row["step_time"] for row in steps) + sum(row["eval_s"] for row in evaluated)
    return {
        "gain": round(last[_FIGURE] - first[_FIGURE], 4),
        "gain_at_least": round(last[f"{_FIGURE}_low"] - first[f"{_FIGURE}_high"], 4),
        "before": round(first[_FIGURE], 4),
        "after": round(last[_FIGURE], 4),
        "steps": len(steps),
        "responses": sum(row["completions/count"] for row in steps),
        "response_tokens": steps[-1]["num_tokens"],
        "hours": round(hours / 3600, 3),
        "step_time_s": round(statistics.median(row["step_time"] for row in steps), 2),
        "curve": {
            "evaluations": {
                str(row["step"]): [
                    round(row[name], 4) for name in (_FIGURE, f"{_FIGURE}_low", f"{_FIGURE}_high")
                ]
                for row in evaluated
            },
            "training": [
                round(math.fsum(some) / len(some), 4)
                for some in (rewards[i : i + WINDOW] for i in range(0, len(rewards), WINDOW))
            ],
        },
    }


def samples(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return some responses of the first step and of the last one."""
    rows = read_samples(run)
    kept = ("prompt", "completion", "answer", "reward")
    ends = {"first": rows[:SAMPLES], "last": rows[-SAMPLES:]}
    return {end: [{name: row[name] for name in kept} for row in some] for end, some in ends.items()}


def greedy(run: str, questions: int, *policy: str) -> list[float]:
    """Return the mean reward of greedy responses, and its interval."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "evaluation.json"
        command = [sys.executable, "-m", "rl.evaluate", "--run", run, *policy]
        command += [f"--gin.Eval.num_prompts={questions}", "--gin.Eval.samples=1"]
        command += ["--gin.Eval.temperature=0.0", "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        overall = json.loads(output.read_text())["overall"]
    return [round(overall[f"mean_reward{end}"], 4) for end in ("", "_low", "_high")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="the folder of a finished run")
    parser.add_argument("--policy", required=True, help="the policy that it started from")
    parser.add_argument("--name", required=True, help="of the policy, for readers of the result")
    parser.add_argument("--questions", type=int, default=256)
    environment.add_output_flags(parser)
    args = parser.parse_args()
    before = greedy(str(args.run), args.questions, "--policy", args.policy)
    after = greedy(str(args.run), args.questions)
    result = {
        "policy": args.name,
        **figures(read_metrics(args.run)),
        "greedy": {"questions": args.questions, "before": before, "after": after},
        "greedy_gain_at_least": round(after[1] - before[2], 4),
        "samples": samples(args.run),
        "legs": [dataclasses.asdict(leg) for leg in legs.read(args.run)],
        **environment.record("benchmarks.trained_run", PACKAGES, ("--run", "--policy")),
    }
    shown = {k: v for k, v in result.items() if k not in ("samples", "curve", "legs")}
    environment.show(result, args, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
