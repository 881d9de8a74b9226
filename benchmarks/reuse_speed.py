"""What reuse across epochs buys in seconds: `python -m benchmarks.reuse_speed --json`

For three variants of configs/ablations/lenience.gin, runs whose every phase is also done plainly
(`reuse_turns.py`): seconds of the same policy on the same prompts, in turns. They go on where they
were stopped. Figures with `projected_` in front price recorded rounds by an accelerator's roofline
(`roofline.py`). Ratios are taken seed by seed; the figure is their mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.reuse import CONFIG, COUPLED, LENIENT, PACKAGES, STRICT, Row, run
from benchmarks.reuse_turns import PRICED
from rl.ablate import cells, folder_name
from rl.loop.experiment import open_inputs


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/reuse_speed"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    config = cells([CONFIG], [], folder)[0].config
    num_examples = len(open_inputs(config).task)
    epoch_steps = math.ceil(num_examples / config.rollout.prompts_per_step)
    found = {
        name: speed(folder, name, arguments.seeds, epoch_steps)
        for name in (COUPLED, LENIENT, STRICT)
    }
    lenient, strict, coupled = found[LENIENT], found[STRICT], found[COUPLED]
    figures = {
        "lenient_rollout_ratio": lenient["all_epochs"]["rollout_ratio"],
        "projected_lenient_rollout_ratio": lenient["all_epochs"]["projected_rollout_ratio"],
        "lenient_later_rollout_ratio": lenient["later_epochs"]["rollout_ratio"],
        "projected_lenient_later_rollout_ratio": lenient["later_epochs"]["projected_rollout_ratio"],
        "strict_rollout_ratio": strict["all_epochs"]["rollout_ratio"],
        "projected_strict_rollout_ratio": strict["all_epochs"]["projected_rollout_ratio"],
        "coupled_later_rollout_ratio": coupled["later_epochs"]["rollout_ratio"],
        "projected_coupled_later_rollout_ratio": coupled["later_epochs"]["projected_rollout_ratio"],
        "coupled_acceptance": coupled["later_epochs"]["acceptance"],
        "coupled_differing_responses": coupled["all_epochs"]["differing_responses"],
        "lenient_verify_share": lenient["later_epochs"]["verify_share"],
        "projected_lenient_verify_share": lenient["later_epochs"]["projected_verify_share"],
        "projected_coupled_verify_share": coupled["later_epochs"]["projected_verify_share"],
        "seeds": len(arguments.seeds),
        "priced_as": f"{PRICED.device.name}, {PRICED.model.name}",
    }
    record = environment.record("benchmarks.reuse_speed", PACKAGES, hidden=("--folder",))
    result = {"benchmark": "reuse_speed", **figures, "turns": found, **record}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
