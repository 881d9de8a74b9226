"""Reuse across epochs: `python -m benchmarks.reuse PART --json`

| part | what it compares | result |
|---|---|---|
| grid | runs of configs/ablations/lenience.gin: generated tokens and rewards | reuse.json |
| speed | seconds of rollouts with reuse and of plain ones, in turns | reuse_speed.json |

`speed` trains three variants of that grid. The same policy answers each step's prompts three times:
plainly, with reuse (the run is trained on these), and with reuse while the budget decides by an
accelerator's roofline. The first two are timed and take turns in coming first; of the third only
the recorded rounds count (`projected_`, `roofline.py`). Both parts continue after a stop. Ratios
and differences are taken seed by seed; the figure is their mean.
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

from benchmarks import environment
from benchmarks.roofline import PRICED_8B, cached_seconds, phase_seconds, round_times
from reprise.rl.ablation.grid import Cell, cells, folder_name
from reprise.rl.ablation.results import read_cell
from reprise.rl.assembly.system import System
from reprise.rl.engine.engine import OnFinish, OnRound
from reprise.rl.engine.rollout_spec import DrafterFactory, RolloutSpec, no_drafts
from reprise.rl.metrics.writer import Timings
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.stats import cached_seconds as measured_cached_seconds
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation.sources import Speculation
from reprise.rl.steps.position import RunPosition
from reprise.rl.steps.step import train_step
from reprise.rl.warm_up.rollout_programs import Reach, round_buckets
from reprise.spec.round_times import RoundTimes
from tests.support import tiny_run

CONFIG = environment.ROOT / "configs" / "ablations" / "lenience.gin"
VARIANTS = {"lenient": "lenient e^0.5", "strict": "lenient 1", "coupled": "coupled"}


# --- the grid -----------------------------------------------------------------------------


def grid(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the grid, and compare its variants with plain decoding."""
    folder = arguments.folder.absolute()
    overrides = [f"Ablation.directory={str(folder)!r}", f"Ablation.seeds={tuple(arguments.seeds)}"]
    gin = [f"--gin.{x}" for x in overrides]
    environment.call("rl.ablate", f"--gin_file={CONFIG}", *gin, env=compiled(folder))
    found = cells([CONFIG], overrides, folder)
    num_examples = len(open_inputs(found[0].config).task)
    rows = {(c.name, c.seed): read_cell(c, num_examples) for c in found}

    def column(name: str, figure: str) -> list[float]:
        return [float(rows[name, seed][figure]) for seed in arguments.seeds]

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value  # JSON has no nan

    def reward_difference(name: str) -> float:
        rewards = np.subtract(column(name, "final_reward"), plain)
        return round(float(np.mean(rewards)), 4)

    plain, names = column("plain", "final_reward"), ("lenient e^0.5", "plain")
    lenient_tokens, plain_tokens = (column(name, "generated_tokens") for name in names)
    return {
        "lenient_tokens_ratio": round(float(np.mean(np.divide(lenient_tokens, plain_tokens))), 4),
        "lenient_reward_difference": reward_difference("lenient e^0.5"),
        "coupled_reward_difference": reward_difference("coupled"),
        "plain_reward_spread": round(max(plain) - min(plain), 4),
        "rows": [{k: known(v) for k, v in row.items()} for row in rows.values()],
    }


def compiled(folder: Path) -> dict[str, str]:
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}


# --- seconds of one run -------------------------------------------------------------------


class BothDrafts:
    """Replaces a run's speculation; makes the drafters of a phase a second time.

    `priced` are these drafters, which decide by the roofline's seconds.
    """

    def __init__(self, system: System, times: RoundTimes) -> None:
        self._measured = system.speculation
        self._of_roofline = Speculation(system.config.speculation, system.cache, times=times)
        self.priced: DrafterFactory = no_drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._measured, name)

    def drafter_factory(self, *args: Any, **options: Any) -> DrafterFactory:
        self.priced = self._of_roofline.drafter_factory(*args, **options)
        return self._measured.drafter_factory(*args, **options)


class Turns:
    """Replaces a run's engine; answers each phase in the three ways."""

    def __init__(self, system: System) -> None:
        self._engine = system.engine
        rollout, sampling = system.config.rollout, system.config.sampling
        reach = Reach(rollout.num_requests, rollout.max_prompt_tokens)
        self._times = round_times(PRICED_8B, list(round_buckets(self._engine, sampling, reach)))
        self.speculation = BothDrafts(system, self._times)
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
        priced = dataclasses.replace(spec, drafts=self.speculation.priced, times=self._times)
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
    cached, projected = stats["reuse"].cached, stats["projected"]
    return {
        "plain_s": seconds["plain"],
        "reuse_s": seconds["reuse"],
        "verify_s": measured_cached_seconds(stats["reuse"].timeline),
        "projected_plain_s": phase_seconds(PRICED_8B, stats["plain"]),
        "projected_reuse_s": phase_seconds(PRICED_8B, projected),
        "projected_verify_s": cached_seconds(PRICED_8B, projected.timeline),
        "plain_tokens": stats["plain"].tokens,
        "reuse_tokens": stats["reuse"].tokens - cached.kept_tokens,
        "kept_tokens": cached.kept_tokens,
        "decided_tokens": cached.decided_tokens,
    }


def train_in_turns(cell: Cell) -> list[dict[str, Any]]:
    """Return a row for every step of a run."""
    with tiny_run.opened(cell.config, open_inputs(cell.config)) as (system, state):
        turns: Any = Turns(system)
        system = dataclasses.replace(system, engine=turns, speculation=turns.speculation)
        place = RunPosition()
        while place.step < cell.config.run.steps:
            timings = Timings(time.perf_counter)
            state, place, _ = train_step(system, state, place, timings)
    return turns.rows


def one(variant: str, seed: str, path: str, *overrides: str) -> None:
    """Train one run and write its rows."""
    grid = cells([CONFIG], overrides, Path(path))
    [cell] = [c for c in grid if (c.name, c.seed) == (variant, int(seed))]
    Path(path).write_text(json.dumps(train_in_turns(cell)))


# --- seconds of all runs ------------------------------------------------------------------


def turn_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
            arguments = "--one", variant, str(seed), str(path)
            environment.call("benchmarks.reuse", *arguments, env=compiled(folder))
        rows = json.loads(path.read_text(encoding="utf-8"))
        parts = {"all_epochs": rows, "later_epochs": rows[epoch_steps:]}
        runs.append({part: turn_figures(some) for part, some in parts.items()})
    means = {
        part: {name: round(statistics.fmean(r[part][name] for r in runs), 4) for name in figures}
        for part, figures in runs[0].items()
    }
    return means | {"seeds": [r | {"seed": seed} for r, seed in zip(runs, seeds, strict=True)]}


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = arguments.folder.absolute()
    config = cells([CONFIG], [], folder / "none")[0].config
    epoch_steps = math.ceil(len(open_inputs(config).task) / config.rollout.prompts_per_step)
    found = {
        name: measure(folder, variant, arguments.seeds, epoch_steps)
        for name, variant in VARIANTS.items()
    }
    figures = dict[str, Any]()
    for name in VARIANTS:
        for part, title in (("all_epochs", name), ("later_epochs", f"{name}_later")):
            for figure in ("rollout_ratio", "projected_rollout_ratio"):
                prefix = "projected_" if figure.startswith("projected") else ""
                figures[f"{prefix}{title}_rollout_ratio"] = found[name][part][figure]
        later = found[name]["later_epochs"]
        figures[f"{name}_verify_share"] = later["verify_share"]
        figures[f"projected_{name}_verify_share"] = later["projected_verify_share"]
    return {
        **figures,
        "coupled_acceptance": found["coupled"]["later_epochs"]["acceptance"],
        "coupled_differing_responses": found["coupled"]["all_epochs"]["differing_responses"],
        "seeds": len(arguments.seeds),
        "priced_as": f"{PRICED_8B.device.name}, {PRICED_8B.model.name}",
        "turns": found,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        parts = {"grid": grid, "speed": speed}
        packages, folder = environment.TRAINING, Path("runs/reuse")
        environment.run(__doc__, parts, packages, folder=folder, seeds=(0, 1, 2))
