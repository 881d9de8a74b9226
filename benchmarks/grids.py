"""Grids of whole training runs: `python -m benchmarks.grids GRID --json`

| grid | what it compares | result |
|---|---|---|
| lenience | reuse across epochs against none: generated tokens and rewards | reuse.json |
| pipeline | responses one update old against synchronous steps: rewards | pipeline.json |

A grid is a file of configs/ablations, run by `rl.ablate`; it continues after a stop. Differences
and ratios are taken seed by seed; the figure is their mean.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.ablate import cells, read_cell
from rl.loop.experiment import open_inputs
from rl.metrics.writer import read_metrics, step_rows

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "orbax-checkpoint", "reasoning-gym")
CONFIGS = environment.ROOT / "configs" / "ablations"


def run(folder: Path, module: str, *arguments: str) -> None:
    """Run a module in another process, which frees its programs' memory."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")} | dict(os.environ)
    command = [sys.executable, "-m", module, *arguments]
    subprocess.run(command, cwd=environment.ROOT, env=env, stdout=sys.stderr, check=True)


class Grid:
    """The finished runs of a grid, compared with one of its variants."""

    def __init__(self, name: str, base: str, folder: Path, *overrides: str) -> None:
        config, self.base = CONFIGS / f"{name}.gin", base
        overrides = (*overrides, f"Ablation.directory={str(folder)!r}")
        self.cells = cells([config], overrides, folder)
        run(folder, "rl.ablate", str(config), *(f"--gin.{x}" for x in overrides))
        num_examples = len(open_inputs(self.cells[0].config).task)
        self.rows = {(c.name, c.seed): read_cell(c, num_examples) for c in self.cells}
        self.names = list(dict.fromkeys(c.name for c in self.cells))
        self.seeds = sorted({c.seed for c in self.cells})

    def column(self, name: str, column: str = "final_reward") -> list[float]:
        return [float(self.rows[name, seed][column]) for seed in self.seeds]

    def reward_difference(self, name: str) -> float:
        pairs = zip(self.column(self.base), self.column(name), strict=True)
        return round(statistics.fmean(b - a for a, b in pairs), 4)

    def ratio(self, name: str, column: str) -> float:
        pairs = zip(self.column(self.base, column), self.column(name, column), strict=True)
        return round(statistics.fmean(b / a for a, b in pairs), 4)

    @property
    def reward_spread(self) -> float:
        rewards = self.column(self.base)
        return round(max(rewards) - min(rewards), 4)


def lenience(folder: Path, *overrides: str) -> dict[str, Any]:
    grid = Grid("lenience", "plain", folder, *overrides)

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value  # JSON has no nan

    return {
        "lenient_tokens_ratio": grid.ratio("lenient e^0.5", "generated_tokens"),
        "lenient_reward_difference": grid.reward_difference("lenient e^0.5"),
        "coupled_reward_difference": grid.reward_difference("coupled"),
        "plain_reward_spread": grid.reward_spread,
        "rows": [{k: known(v) for k, v in row.items()} for row in grid.rows.values()],
    }


def pipeline(folder: Path, *overrides: str) -> dict[str, Any]:
    """Workers and trainer share this machine's cores, hence no seconds."""
    grid = Grid("pipeline", "sync", folder, *overrides)
    oldest, carried = dict[str, float](), dict[str, float]()
    for name in grid.names:
        folders = [c.folder for c in grid.cells if c.name == name]
        steps = [row for x in folders for row in step_rows(read_metrics(x))]
        oldest[name] = max(row["rollout/off_policyness/max"] for row in steps)
        responses = math.fsum(float(row["completions/count"]) for row in steps)
        total = math.fsum(float(row.get("rollout/carried") or 0) for row in steps)
        carried[name] = round(total / responses, 4)
    others = [name for name in grid.names if name != grid.base]
    return {
        "sync_reward": round(statistics.fmean(grid.column(grid.base)), 4),
        "sync_reward_spread": grid.reward_spread,
        **{f"{name}_reward_difference": grid.reward_difference(name) for name in others},
        "off_policyness_max": oldest,
        "carried_fraction": carried,
        "rewards": {name: grid.column(name) for name in grid.names},
        "seeds": grid.seeds,
    }


GRIDS = {"lenience": lenience, "pipeline": pipeline}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--folder", type=Path, help="of the grid; default: runs/GRID")
    parser.add_argument("--seeds", help="a tuple; default: the configuration's")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = (arguments.folder or Path("runs") / arguments.grid).absolute()
    overrides = [f"Ablation.seeds={arguments.seeds}"] if arguments.seeds else []
    figures = GRIDS[arguments.grid](folder, *overrides)
    record = environment.record("benchmarks.grids", PACKAGES, hidden=("--folder",))
    shown = {k: v for k, v in figures.items() if k != "rows"}
    environment.show(figures | record, arguments, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
