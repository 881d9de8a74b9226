"""One training run with reuse whose every phase is also done plainly, for `benchmarks.reuse`.

In each step the same policy answers the same prompts three times: plainly (no reuse, no
draft tokens), as the configuration says (this one is trained on), and once more so with the
budget deciding by an accelerator's roofline. The first two are timed and take turns in
coming first; of the third only the recorded rounds count. With `coupled`, plain tokens
are the same tokens. Rewards are computed outside of the timed seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import roofline, tiny_run
from rl.ablate import cells
from rl.engine.engine import OnFinish, OnRound
from rl.engine.rollout_spec import DrafterFactory, RolloutSpec, no_drafts
from rl.engine.stats import EngineStats, cached_seconds
from rl.loop import train_loop
from rl.loop.experiment import TrainConfig, open_inputs
from rl.loop.generation import System
from rl.metrics.writer import Timings
from rl.trajectory import Request, Trajectory
from rl.warm_up.rollout_programs import Reach, round_buckets
from sched.simulator.roofline import Instance
from spec.budget.run_seconds import RunSeconds

PRICED = Instance(roofline.H100, roofline.QWEN3_8B, efficiency=roofline.PRICED)


class Turns:
    """Stands in for a run's engine, and does each phase in the three ways."""

    def __init__(self, system: System) -> None:
        self._engine, self._speculation, self._config = (
            system.engine,
            system.speculation,
            system.config,
        )
        rollout = self._config.rollout
        reach = Reach(rollout.num_requests, rollout.max_prompt_tokens)
        buckets = round_buckets(self._engine, self._config.sampling, reach)
        self._accelerator_times = roofline.round_times(PRICED, list(buckets))
        self._elsewhere: DrafterFactory = no_drafts
        phase, speculation = self._speculation.drafter_factory, self._speculation

        def with_both(*asked: Any, **named: Any) -> DrafterFactory:
            """Have the phase's drafts decided on by the roofline's seconds as well."""
            here = speculation.times, speculation.seconds
            speculation.times, speculation.seconds = self._accelerator_times, RunSeconds()
            try:
                self._elsewhere = phase(*asked, **named)
            finally:
                speculation.times, speculation.seconds = here
            return phase(*asked, **named)

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
        seconds, found, stats = {}, {}, {}
        ways = {"plain": dataclasses.replace(spec, drafts=no_drafts, rule=None), "reuse": spec}
        order = ["plain", "reuse"] if len(self.rows) % 2 else ["reuse", "plain"]
        for name in order:
            began_s = time.perf_counter()
            found[name] = self._engine.run(ways[name], requests)
            seconds[name] = time.perf_counter() - began_s
            stats[name] = self._engine.stats
        elsewhere = {"drafts": self._elsewhere, "times": self._accelerator_times}
        self._engine.run(dataclasses.replace(spec, **elsewhere), requests)
        stats["projected"] = self._engine.stats
        self._engine.stats = stats["reuse"]
        self.rows.append(_row(seconds, stats) | _differences(found["plain"], found["reuse"]))
        for trajectory in found["reuse"]:
            on_finish(trajectory)
        return found["reuse"]


def _row(seconds: dict[str, float], stats: dict[str, EngineStats]) -> dict[str, Any]:
    v = stats["reuse"].cached
    priced = {name: roofline.phase_seconds(PRICED, stats[name]) for name in ("plain", "projected")}
    return {
        "plain_s": seconds["plain"],
        "reuse_s": seconds["reuse"],
        "verify_s": cached_seconds(stats["reuse"].timeline),
        "projected_plain_s": priced["plain"],
        "projected_reuse_s": priced["projected"],
        "projected_verify_s": roofline.cached_seconds(PRICED, stats["projected"].timeline),
        "plain_tokens": stats["plain"].tokens,
        "reuse_tokens": stats["reuse"].tokens - v.kept_tokens,
        "cached_responses": v.responses,
        "kept_tokens": v.kept_tokens,
        "decided_tokens": v.decided_tokens,
    }


def _differences(plain: Sequence[Trajectory], reuse: Sequence[Trajectory]) -> dict[str, int]:
    pairs = zip(plain, reuse, strict=True)
    same = [np.array_equal(a.response_ids, b.response_ids) for a, b in pairs]
    return {"responses": len(same), "differing_responses": same.count(False)}


def train_in_turns(config: TrainConfig) -> list[dict[str, Any]]:
    """A row of every step."""
    inputs = open_inputs(config)
    with tiny_run.opened(config, inputs) as (system, state):
        turns: Any = Turns(system)
        system = dataclasses.replace(system, engine=turns)
        place = train_loop.RunPosition()
        while place.step < config.run.steps:
            state, place, _ = train_loop.train_step(
                system, state, place, Timings(time.perf_counter)
            )
            print(place.step, turns.rows[-1], file=sys.stderr, flush=True)
    return turns.rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a grid's file")
    parser.add_argument("variant")
    parser.add_argument("seed", type=int)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    [cell] = [
        c
        for c in cells([arguments.config], [], arguments.output.parent.absolute() / "none")
        if (c.name, c.seed) == (arguments.variant, arguments.seed)
    ]
    rows = train_in_turns(cell.config)
    arguments.output.write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
