"""What reuse across epochs buys: `python -m benchmarks.reuse --json`

First the grid of configs/ablations/lenience.gin (`python -m rl.ablate`): generated tokens and
rewards of whole training runs. Then, for three of its variants, runs whose every phase is
also done plainly (`reuse_turns.py`): seconds of the same policy on the same prompts, in turns.
Both go on where they were stopped. Figures with `projected_` in front price recorded rounds
by an accelerator's roofline (`roofline.py`). Ratios are taken seed by seed; the figure is
their mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.reuse_turns import PRICED
from rl.ablation.grid import Cell, cells, folder_name
from rl.ablation.results import read_cell
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


def in_turns(folder: Path, variant: str, seed: int) -> list[Row]:
    """The steps of one run of `reuse_turns`, which is done where it is not there yet."""
    path = folder / "turns" / f"{folder_name(variant)}-{seed}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        run(folder, "benchmarks.reuse_turns", str(CONFIG), variant, str(seed), str(path))
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def turn_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios and shares over some steps of one run."""
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "rollout_ratio": total["plain_s"] / total["reuse_s"],
        "projected_rollout_ratio": total["projected_plain_s"] / total["projected_reuse_s"],
        "tokens_ratio": total["reuse_tokens"] / total["plain_tokens"],
        "verify_share": total["verify_s"] / total["reuse_s"],
        "projected_verify_share": total["projected_verify_s"] / total["projected_reuse_s"],
        "acceptance": total["kept_tokens"] / max(total["decided_tokens"], 1),
        "differing_responses": total["differing_responses"],
        "responses": total["responses"],
    }


def speed(folder: Path, variant: str, seeds: Sequence[int], epoch_steps: int) -> dict[str, Any]:
    """The figures of all epochs and of those after the first: means over seeds, and each seed's."""
    runs = [in_turns(folder, variant, seed) for seed in seeds]
    parts = {"all_epochs": 0, "later_epochs": epoch_steps}
    return {part: _mean([turn_figures(rows[n:]) for rows in runs]) for part, n in parts.items()} | {
        "seeds": [
            {part: turn_figures(rows[n:]) for part, n in parts.items()} | {"seed": seed}
            for seed, rows in zip(seeds, runs, strict=True)
        ]
    }


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}


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
    seeds = sorted({cell.seed for cell in found})
    num_examples = len(open_inputs(found[0].config).task)
    epoch_steps = math.ceil(num_examples / found[0].config.rollout.prompts_per_step)
    names = (LENIENT, STRICT, COUPLED)
    lenient, strict, coupled = (speed(folder, name, seeds, epoch_steps) for name in names)
    trained, table = training(found, num_examples)
    figures = trained | {
        "lenient_rollout_ratio": lenient["all_epochs"]["rollout_ratio"],
        "projected_lenient_rollout_ratio": lenient["all_epochs"]["projected_rollout_ratio"],
        "strict_rollout_ratio": strict["all_epochs"]["rollout_ratio"],
        "projected_strict_rollout_ratio": strict["all_epochs"]["projected_rollout_ratio"],
        "coupled_later_rollout_ratio": coupled["later_epochs"]["rollout_ratio"],
        "projected_coupled_later_rollout_ratio": coupled["later_epochs"]["projected_rollout_ratio"],
        "coupled_acceptance": coupled["later_epochs"]["acceptance"],
        "coupled_differing_responses": coupled["all_epochs"]["differing_responses"],
        "lenient_verify_share": lenient["later_epochs"]["verify_share"],
        "projected_lenient_verify_share": lenient["later_epochs"]["projected_verify_share"],
        "projected_coupled_verify_share": coupled["later_epochs"]["projected_verify_share"],
        "seeds": len(seeds),
        "priced_as": f"{PRICED.device.name}, {PRICED.model.name}",
    }
    record = environment.record("benchmarks.reuse", PACKAGES, hidden=("--folder",))
    turns = dict(zip(names, (lenient, strict, coupled), strict=True))
    result = {"benchmark": "reuse", **figures, "turns": turns, "rows": table, **record}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
