"""Gains and costs of a learned drafter: `python -m benchmarks.drafter --json`

Accept lengths and waits are measured in real runs of the shipped policy (`runs.py`), rates in
rollouts that take turns with identical tokens (`tuner.py`). `step_time_ratio` needs a device for
each worker (`step_time.py`): it is null if all share one accelerator or one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import environment
from benchmarks.drafter import runs, step_time, tuner
from models import hf
from rl.config.loader import load
from rl.loop.experiment import TrainConfig, open_inputs

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax", "orbax-checkpoint", "reasoning-gym")
SPOT = environment.ROOT / "configs/tlt_tiny_cpu.gin"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first_steps", type=int, default=10, help="of training, then a look")
    parser.add_argument("--more_steps", type=int, default=50, help="until the second look")
    parser.add_argument("--timed_steps", type=int, default=12, help="with and without training")
    parser.add_argument("--rollouts", type=int, default=60, help="that end while workers train")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    figures = measure(
        arguments.first_steps, arguments.more_steps, arguments.rollouts, arguments.timed_steps
    )
    record = environment.record("benchmarks.drafter", PACKAGES)
    environment.show({"benchmark": "drafter", **figures, **record}, arguments, figures)
    return 0


def measure(first_steps: int, more_steps: int, rollouts: int, timed_steps: int) -> dict[str, Any]:
    """Measure all figures, the timed ones first."""
    config = load(TrainConfig, [SPOT])
    inputs = open_inputs(config)
    _, params = hf.load_pretrained(inputs.policy, dtype=jnp.float32)
    figures: dict[str, Any] = {}
    figures |= runs.preemption_waits(inputs, params, config, rollouts=rollouts)
    figures |= tuner.tuner(inputs, params, config)
    if jax.default_backend() != "cpu" and len(jax.local_devices()) >= step_time.WORKERS:
        figures |= step_time.step_time(timed_steps)
    else:
        figures |= step_time.in_own_process(timed_steps)
    lengths, curve = runs.accept_lengths(first_steps, more_steps)
    found = {
        f"accept_{k}": round(v, 4)
        for k, v in dataclasses.asdict(lengths).items()
        if not k.endswith("_steps")
    }
    figures |= found | {
        "accept_trained_ratio": round(lengths.trained / lengths.untrained, 4),
        "accept_adaptive_ratio": round(lengths.adaptive / lengths.frozen, 4),
        "first_steps": first_steps,
        "more_steps": more_steps,
        "curve": curve,
    }
    return figures


if __name__ == "__main__":
    sys.exit(main())
