"""What reuse across epochs buys: `python -m benchmarks.reuse --json`

Runs the grid of configs/ablations/lenience.gin (`python -m rl.ablate`, which goes on where it
was stopped) and reads its runs: generated tokens, rollout seconds on this machine, reward.
Figures with `projected_` in front price the recorded device calls by an accelerator's
roofline (`roofline.py`), the budget's decisions being those made for this machine.
Ratios are taken seed by seed; the figure is their mean.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, roofline
from rl.ablation import Cell, cells, read_cell
from rl.experiment import open_inputs
from rl.metrics import read_metrics, read_phases

CONFIG = environment.ROOT / "configs/ablations/lenience.gin"
PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "orbax-checkpoint", "reasoning-gym")
DEVICE, POLICY = roofline.H100, roofline.QWEN3_8B
PLAIN, LENIENT, STRICT, COUPLED = "plain", "lenient e^0.5", "lenient 1", "coupled"


def seconds_of(cell: Cell, first_step: int) -> dict[str, float]:
    """Rollout seconds from a step on: measured, projected, and the parts that verification took."""
    rows = [row for row in read_metrics(cell.folder) if row["step"] >= first_step]
    phases = [row for row in read_phases(cell.folder) if row["step"] >= first_step]
    priced = [roofline.recorded_seconds(DEVICE, POLICY, row) for row in phases]
    return {
        "rollout_s": sum(row["time/rollout"] for row in rows),
        "verify_s": sum(row.get("spec/prefix_pass_seconds", 0.0) for row in rows),
        "projected_rollout_s": sum(total for total, _ in priced),
        "projected_verify_s": sum(passes for _, passes in priced),
    }


def acceptance(cell: Cell) -> float:
    """Cached tokens that stand, over those that were decided on, in all steps with any."""
    rows = [row for row in read_metrics(cell.folder) if row.get("spec/cached_responses")]
    rates = [row["spec/cached_accept_rate"] for row in rows]
    return statistics.fmean(rates) if rates else math.nan


def _known(value: Any) -> Any:
    """JSON has no word for nan."""
    return None if isinstance(value, float) and math.isnan(value) else value


def summarise(found: Sequence[Cell], num_examples: int) -> dict[str, Any]:
    """All figures, and a row for every run."""
    by_name: dict[str, dict[int, Cell]] = {}
    for cell in found:
        by_name.setdefault(cell.name, {})[cell.seed] = cell
    epoch_steps = math.ceil(num_examples / found[0].config.rollout.prompts_per_step)
    table = {(c.name, c.seed): read_cell(c, num_examples) for c in found}
    rows = [
        {
            **{column: _known(value) for column, value in table[cell.name, cell.seed].items()},
            **seconds_of(cell, 1),
            "later": seconds_of(cell, epoch_steps + 1),
            "acceptance": _known(acceptance(cell)),
        }
        for cell in found
    ]
    row_of = {(row["name"], row["seed"]): row for row in rows}
    seeds = sorted(by_name[PLAIN])

    def mean(value: Callable[[Mapping[str, Any], Mapping[str, Any]], float], name: str) -> float:
        """Over seeds, of plain's row and that of `name`."""
        pairs = [(row_of[PLAIN, s], row_of[name, s]) for s in seeds if (name, s) in row_of]
        return round(statistics.fmean(value(*pair) for pair in pairs), 4)

    def faster(name: str, column: str, *, later: bool = False) -> float:
        def ratio(plain: Mapping[str, Any], other: Mapping[str, Any]) -> float:
            both = (plain["later"], other["later"]) if later else (plain, other)
            return both[0][column] / both[1][column]

        return mean(ratio, name)

    def reward_difference(name: str) -> float:
        return mean(lambda plain, other: other["final_reward"] - plain["final_reward"], name)

    def share(name: str, part: str, whole: str) -> float:
        return mean(lambda _, other: other["later"][part] / other["later"][whole], name)

    rewards = [row_of[PLAIN, s]["final_reward"] for s in seeds]
    return {
        "lenient_tokens_ratio": mean(
            lambda plain, other: other["generated_tokens"] / plain["generated_tokens"], LENIENT
        ),
        "lenient_rollout_ratio": faster(LENIENT, "rollout_s"),
        "projected_lenient_rollout_ratio": faster(LENIENT, "projected_rollout_s"),
        "strict_rollout_ratio": faster(STRICT, "rollout_s"),
        "projected_strict_rollout_ratio": faster(STRICT, "projected_rollout_s"),
        "coupled_later_rollout_ratio": faster(COUPLED, "rollout_s", later=True),
        "projected_coupled_later_rollout_ratio": faster(COUPLED, "projected_rollout_s", later=True),
        "coupled_acceptance": mean(lambda _, other: other["acceptance"], COUPLED),
        "lenient_reward_difference": reward_difference(LENIENT),
        "coupled_reward_difference": reward_difference(COUPLED),
        "plain_reward_spread": round(max(rewards) - min(rewards), 4),
        "verify_share": share(LENIENT, "verify_s", "rollout_s"),
        "projected_verify_share": share(LENIENT, "projected_verify_s", "projected_rollout_s"),
        "seeds": len(seeds),
        "priced_as": f"{DEVICE.name}, {POLICY.name}",
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/lenience"), help="of the grid")
    parser.add_argument("--seeds", default="(0, 1, 2)", help="a tuple, as in the configuration")
    parser.add_argument("--only_read", action="store_true", help="of a grid that is done")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    overrides = [f"Ablation.seeds={arguments.seeds}", f"Ablation.directory={str(folder)!r}"]
    if not arguments.only_read:
        command = [sys.executable, "-m", "rl.ablate", str(CONFIG)]
        command += [f"--gin.{override}" for override in overrides]
        code = subprocess.run(command, cwd=environment.ROOT, stdout=sys.stderr).returncode
        if code:
            return code
    found = [cell for cell in cells([CONFIG], overrides, folder) if cell.done]
    num_examples = len(open_inputs(found[0].config).task)
    figures = summarise(found, num_examples)
    record = environment.record("benchmarks.reuse", PACKAGES, hidden=("--output", "--folder"))
    result = {"benchmark": "reuse", **figures, **record}
    environment.show(result, arguments, {k: v for k, v in figures.items() if k != "rows"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
