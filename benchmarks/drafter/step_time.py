"""Seconds of training steps with spot training and without, for `benchmarks.drafter`.

Two runs of the same configuration take turns, step by step; both draft with the initial drafter,
hence their work differs in training only. Each worker needs a device: on a CPU, a process with one
core a device (`in_own_process`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

from benchmarks import environment, tiny_run
from rl.config.loader import load
from rl.learner.optimizer import TrainState
from rl.loop import train_loop
from rl.loop.experiment import TrainConfig, open_inputs
from rl.loop.generation import System
from rl.metrics.writer import Timings

CONFIG = environment.ROOT / "configs/tlt_tiny_cpu.gin"
WORKERS = 2
SETTINGS = (
    f"Sched.workers={WORKERS}",
    "Mesh.data=1",
    "Speculation.sources=('group', 'own', 'learned')",
    "Speculation.budget='fixed:3'",
    "Engine.max_nodes=4",
    "Checkpoint.every_steps=0",
)
ARMS = {"on": "Drafter.spot=True", "off": "Drafter.spot=False"}
FIRST_STEPS = 2  # not counted: the buffer fills
ONE_CORE_EACH = (
    f"--xla_force_host_platform_device_count={WORKERS} --xla_cpu_multi_thread_eigen=false "
    "intra_op_parallelism_threads=1"
)


@dataclasses.dataclass(eq=False)
class _Run:
    system: System
    state: TrainState
    place: train_loop.RunPosition
    seconds: list[float]

    def step(self) -> float:
        began_s = time.perf_counter()
        self.state, self.place, _ = train_loop.train_step(
            self.system, self.state, self.place, Timings(time.perf_counter)
        )
        return time.perf_counter() - began_s


def step_time(steps: int) -> dict[str, Any]:
    """The ratio of turns, with training over without; needs a device for each worker."""
    assert len(jax.local_devices()) >= WORKERS, "devices of their own"
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, setting in ARMS.items():
            config = load(TrainConfig, [CONFIG], [*SETTINGS, setting, f"Run.steps={steps + 9}"])
            system, state = stack.enter_context(tiny_run.opened(config, open_inputs(config)))
            assert system.drafter is not None
            system.drafter.trainer.learned.swap = _keep  # type: ignore[method-assign]
            runs[name] = _Run(system, state, train_loop.RunPosition(), [])
        for turn in range(FIRST_STEPS + steps):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                taken_s = runs[name].step()
                if turn >= FIRST_STEPS:
                    runs[name].seconds.append(taken_s)
        drafter = runs["on"].system.drafter
        assert drafter is not None
        trained, tokens = drafter.trainer.step, {r.place.num_tokens for r in runs.values()}
    seconds = {name: run.seconds for name, run in runs.items()}
    ratios = [a / b for a, b in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "step_time_ratio": round(statistics.median(ratios), 4),
        "step_time_s": {name: [round(x, 3) for x in s] for name, s in seconds.items()},
        "step_time_spot_steps": trained,
        "step_time_tokens_same": len(tokens) == 1,
        "step_time_devices": f"{WORKERS} workers, {jax.local_devices()[0].device_kind}",
    }


def _keep(params: Any) -> None:
    """Replaces a swap: draft tokens do not change."""


def in_own_process(steps: int) -> dict[str, Any]:
    """Measure in a process whose devices have a core each; null if there are too few cores."""
    if jax.default_backend() != "cpu" or (os.cpu_count() or 1) < WORKERS:
        return {"step_time_ratio": None}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.drafter.step_time", f"--steps={steps}", "--json"],
        cwd=environment.ROOT,
        env=os.environ | {"XLA_FLAGS": ONE_CORE_EACH},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    devices = f"{WORKERS} workers, each a CPU device of one thread"
    figures = {name: found[name] for name in found if name.startswith("step_time")}
    return figures | {"step_time_devices": devices}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    figures = step_time(arguments.steps)
    record = environment.record("benchmarks.drafter.step_time", ("jax", "jaxlib", "numpy", "numba"))
    environment.show({"benchmark": "drafter_step_time", **figures, **record}, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
