"""What learning from responses one update old costs: `python -m benchmarks.pipeline --json`

Trains the grid of configs/ablations/pipeline.gin: synchronous steps, the one-step-off pipeline
and HistoPipe, three seeds each. Compared are the rewards of the last epoch, seed by seed, against
how much seeds differ among synchronous runs. Workers and trainer share this machine's cores, so
that no seconds are claimed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.reuse import run
from rl.ablate import Cell, cells, read_cell
from rl.loop.experiment import open_inputs
from rl.metrics.writer import read_metrics, step_rows

CONFIG = Path(__file__).parents[1] / "configs" / "ablations" / "pipeline.gin"
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
SYNC = "sync"


def figures(found: Sequence[Cell], num_examples: int) -> dict[str, Any]:
    """Rewards against those of synchronous steps, and how old what was learnt from was."""
    rows = {(c.name, c.seed): read_cell(c, num_examples) for c in found}
    names = list(dict.fromkeys(c.name for c in found))
    seeds = sorted({c.seed for c in found})
    rewards = {n: [float(rows[n, s]["final_reward"]) for s in seeds] for n in names}
    rows_of = {
        n: [row for c in found if c.name == n for row in step_rows(read_metrics(c.folder))]
        for n in names
    }
    oldest = {n: max(r["rollout/off_policyness/max"] for r in rows_of[n]) for n in names}
    carried = {
        n: math.fsum(float(r.get("rollout/carried") or 0) for r in rows_of[n])
        / math.fsum(float(r["completions/count"]) for r in rows_of[n])
        for n in names
    }
    return {
        "sync_reward": round(statistics.fmean(rewards[SYNC]), 4),
        "sync_reward_spread": round(max(rewards[SYNC]) - min(rewards[SYNC]), 4),
        **{
            f"{n}_reward_difference": round(
                statistics.fmean(b - a for a, b in zip(rewards[SYNC], rewards[n], strict=True)), 4
            )
            for n in names
            if n != SYNC
        },
        "off_policyness_max": oldest,
        "carried_fraction": {n: round(share, 4) for n, share in carried.items()},
        "rewards": rewards,
        "seeds": seeds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline"), help="of the grid")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    overrides = [f"Ablation.directory={str(folder)!r}"]
    found = cells([CONFIG], overrides, folder)
    run(folder, "rl.ablate", str(CONFIG), *(f"--gin.{override}" for override in overrides))
    result = figures(found, len(open_inputs(found[0].config).task))
    record = environment.record("benchmarks.pipeline", PACKAGES, hidden=("--folder",))
    environment.show({"benchmark": "pipeline", **result, **record}, arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
