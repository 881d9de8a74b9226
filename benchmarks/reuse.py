"""What reuse across epochs does to training: `python -m benchmarks.reuse --json`

The grid of configs/ablations/lenience.gin (`python -m rl.ablate`): generated tokens and rewards
of whole training runs, 70 minutes; it goes on where it was stopped. Ratios are taken seed by seed;
the figure is their mean. What it brings in seconds: `reuse_speed.py`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from rl.ablate import Cell, cells, read_cell
from rl.loop.experiment import open_inputs

CONFIG = environment.ROOT / "configs/ablations/lenience.gin"
PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "orbax-checkpoint", "reasoning-gym")
PLAIN, LENIENT, STRICT, COUPLED = "plain", "lenient e^0.5", "lenient 1", "coupled"

Row = Mapping[str, Any]


def run(folder: Path, module: str, *arguments: str) -> None:
    """A process of its own: its programs leave memory with it. Raises CalledProcessError."""
    command = [sys.executable, "-m", module, *arguments]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    subprocess.run(
        command, cwd=environment.ROOT, env=cache | dict(os.environ), stdout=sys.stderr, check=True
    )


def training(found: Sequence[Cell], num_examples: int) -> tuple[dict[str, Any], list[Row]]:
    """Rewards and tokens against plain's, seed by seed, and the rows of the grid's table."""
    rows = [read_cell(cell, num_examples) for cell in found]
    of = {(row["name"], row["seed"]): row for row in rows}
    seeds = sorted(cell.seed for cell in found if cell.name == PLAIN)
    rewards = [float(of[PLAIN, seed]["final_reward"]) for seed in seeds]

    def mean(column: str, name: str, *, ratio: bool) -> float:
        pairs = [(float(of[PLAIN, s][column]), float(of[name, s][column])) for s in seeds]
        return round(statistics.fmean(b / a if ratio else b - a for a, b in pairs), 4)

    figures = {
        "lenient_tokens_ratio": mean("generated_tokens", LENIENT, ratio=True),
        "lenient_reward_difference": mean("final_reward", LENIENT, ratio=False),
        "coupled_reward_difference": mean("final_reward", COUPLED, ratio=False),
        "plain_reward_spread": round(max(rewards) - min(rewards), 4),
    }
    return figures, [{k: _known(v) for k, v in row.items()} for row in rows]


def _known(value: Any) -> Any:
    """JSON has no word for nan."""
    return None if isinstance(value, float) and math.isnan(value) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/lenience"), help="of the grid")
    parser.add_argument("--seeds", default="(0, 1, 2)", help="a tuple, as in the configuration")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    overrides = [f"Ablation.seeds={arguments.seeds}", f"Ablation.directory={str(folder)!r}"]
    found = cells([CONFIG], overrides, folder)
    run(folder, "rl.ablate", str(CONFIG), *(f"--gin.{override}" for override in overrides))
    num_examples = len(open_inputs(found[0].config).task)
    figures, table = training(found, num_examples)
    record = environment.record("benchmarks.reuse", PACKAGES, hidden=("--folder",))
    result = {"benchmark": "reuse", **figures, "rows": table, **record}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
