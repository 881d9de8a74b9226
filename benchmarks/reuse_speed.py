"""What reuse across epochs brings in seconds: `python -m benchmarks.reuse_speed --json`

For three variants of configs/ablations/lenience.gin and each seed, a training run in which the same
policy answers each step's prompts three times: plainly, with reuse (this one is trained on), and
with reuse while the budget decides by an accelerator's roofline. The first two are timed and take
turns in coming first; of the third only the recorded rounds count (`projected_`, `roofline.py`).
Runs continue after a stop. Ratios are taken seed by seed; the figure is their mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment, roofline, tiny_run
from benchmarks.grids import CONFIGS, PACKAGES, run
from rl.ablate import Cell, cells, folder_name
from rl.engine.engine import OnFinish, OnRound
from rl.engine.rollout_spec import DrafterFactory, RolloutSpec, no_drafts
from rl.engine.stats import EngineStats, cached_seconds
from rl.loop import train_loop
from rl.loop.experiment import open_inputs
from rl.loop.generation import System
from rl.metrics.writer import Timings
from rl.trajectory import Request, Trajectory
from rl.warm_up.rollout_programs import Reach, round_buckets
from sched.simulator.roofline import Instance
from spec.budget.run_seconds import RunSeconds

CONFIG = CONFIGS / "lenience.gin"
VARIANTS = {"lenient": "lenient e^0.5", "strict": "lenient 1", "coupled": "coupled"}
PRICED = Instance(roofline.H100, roofline.QWEN3_8B, efficiency=roofline.PRICED)

Row = Mapping[str, Any]


# --- one run ------------------------------------------------------------------------------


class Turns:
    """Replaces a run's engine; answers each phase in the three ways."""

    def __init__(self, system: System) -> None:
        self._engine, self._speculation = system.engine, system.speculation
        rollout, sampling = system.config.rollout, system.config.sampling
        reach = Reach(rollout.num_requests, rollout.max_prompt_tokens)
        buckets = list(round_buckets(self._engine, sampling, reach))
        self._times = roofline.round_times(PRICED, buckets)
        self._priced_drafts: DrafterFactory = no_drafts
        drafter_factory, speculation = self._speculation.drafter_factory, self._speculation

        def with_both(*args: Any, **options: Any) -> DrafterFactory:
            """Make the phase's drafters a second time, deciding by the roofline's seconds."""
            measured = speculation.times, speculation.seconds
            speculation.times, speculation.seconds = self._times, RunSeconds()
            try:
                self._priced_drafts = drafter_factory(*args, **options)
            finally:
                speculation.times, speculation.seconds = measured
            return drafter_factory(*args, **options)

        speculation.drafter_factory = with_both  # type: ignore[method-assign]
        self.rows: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(
        self,
        spec: RolloutSpec,
        requests: Sequence[Request],
        *,
        on_finish: OnFinish,
        on_round: OnRound,
    ) -> list[Trajectory]:
        seconds, done, stats = {}, {}, {}
        ways = {"plain": dataclasses.replace(spec, drafts=no_drafts, rule=None), "reuse": spec}
        for name in ("plain", "reuse") if len(self.rows) % 2 else ("reuse", "plain"):
            start_s = time.perf_counter()
            done[name] = self._engine.run(ways[name], requests)
            seconds[name], stats[name] = time.perf_counter() - start_s, self._engine.stats
        priced = dataclasses.replace(spec, drafts=self._priced_drafts, times=self._times)
        self._engine.run(priced, requests)
        stats["projected"], self._engine.stats = self._engine.stats, stats["reuse"]
        pairs = zip(done["plain"], done["reuse"], strict=True)
        differ = sum(not np.array_equal(a.response_ids, b.response_ids) for a, b in pairs)
        row = step_figures(seconds, stats)
        self.rows.append(row | {"responses": len(requests), "differing_responses": differ})
        for trajectory in done["reuse"]:
            on_finish(trajectory)
        return done["reuse"]


def step_figures(seconds: Mapping[str, float], stats: Mapping[str, EngineStats]) -> dict[str, Any]:
    cached = stats["reuse"].cached
    return {
        "plain_s": seconds["plain"],
        "reuse_s": seconds["reuse"],
        "verify_s": cached_seconds(stats["reuse"].timeline),
        "projected_plain_s": roofline.phase_seconds(PRICED, stats["plain"]),
        "projected_reuse_s": roofline.phase_seconds(PRICED, stats["projected"]),
        "projected_verify_s": roofline.cached_seconds(PRICED, stats["projected"].timeline),
        "plain_tokens": stats["plain"].tokens,
        "reuse_tokens": stats["reuse"].tokens - cached.kept_tokens,
        "kept_tokens": cached.kept_tokens,
        "decided_tokens": cached.decided_tokens,
    }


def train_in_turns(cell: Cell) -> list[dict[str, Any]]:
    """Return a row for every step of a run."""
    with tiny_run.opened(cell.config, open_inputs(cell.config)) as (system, state):
        turns: Any = Turns(system)
        system, place = dataclasses.replace(system, engine=turns), train_loop.RunPosition()
        while place.step < cell.config.run.steps:
            timings = Timings(time.perf_counter)
            state, place, _ = train_loop.train_step(system, state, place, timings)
    return turns.rows


# --- all runs -----------------------------------------------------------------------------


def turn_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return ratios and shares over some steps of one run."""
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


def measure(folder: Path, variant: str, seeds: Sequence[int], epoch_steps: int) -> dict[str, Any]:
    """Return figures of all epochs and of those after the first: means over seeds, and each."""
    runs = []
    for seed in seeds:
        path = folder / "turns" / f"{folder_name(variant)}-{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            one = ("--one", variant, str(seed), str(path))
            run(folder, "benchmarks.reuse_speed", *one)
        rows = json.loads(path.read_text(encoding="utf-8"))
        parts = {"all_epochs": rows, "later_epochs": rows[epoch_steps:]}
        runs.append({part: turn_figures(some) for part, some in parts.items()})
    means = {
        part: {name: round(statistics.fmean(r[part][name] for r in runs), 4) for name in figures}
        for part, figures in runs[0].items()
    }
    return means | {"seeds": [r | {"seed": seed} for r, seed in zip(runs, seeds, strict=True)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/reuse_speed"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    grid = cells([CONFIG], [], folder / "none")
    if arguments.one:
        variant, seed, path = arguments.one
        [cell] = [c for c in grid if (c.name, c.seed) == (variant, int(seed))]
        Path(path).write_text(json.dumps(train_in_turns(cell)))
        return 0
    config = grid[0].config
    epoch_steps = math.ceil(len(open_inputs(config).task) / config.rollout.prompts_per_step)
    found = {
        name: measure(folder, variant, arguments.seeds, epoch_steps)
        for name, variant in VARIANTS.items()
    }
    lenient, strict, coupled = (found[name] for name in VARIANTS)
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
