"""Gains and costs of a learned drafter: `python -m benchmarks.drafter --json`

Accept lengths and waits are measured in real runs of the shipped policy (`runs.py`), rates in
rollouts that take turns with identical tokens (`tuner.py`).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp

from benchmarks import environment
from benchmarks.drafter import runs, tuner
from models import hf
from rl.config import TrainConfig
from rl.gin.loader import load
from rl.inputs import open_inputs

SPOT = environment.ROOT / "configs/tlt_tiny_cpu.gin"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures, the timed ones first."""
    config, steps = load(TrainConfig, [SPOT]), (arguments.first_steps, arguments.more_steps)
    inputs = open_inputs(config)
    _, params = hf.load_pretrained(inputs.policy, dtype=jnp.float32)
    figures: dict[str, Any] = {}
    figures |= runs.preemption_waits(inputs, params, config, rollouts=arguments.rollouts)
    figures |= tuner.tuner(inputs, params, config, turns=arguments.turns)
    lengths, curve = runs.accept_lengths(*steps)
    return {
        **figures,
        **{f"accept_{name}": round(length, 4) for name, length in lengths.items()},
        "accept_trained_ratio": round(lengths["trained"] / lengths["untrained"], 4),
        "accept_adaptive_ratio": round(lengths["adaptive"] / lengths["frozen"], 4),
        **dict(zip(("first_steps", "more_steps"), steps, strict=True)),
        "curve": curve,
    }


if __name__ == "__main__":
    sizes = {"first_steps": 10, "more_steps": 50, "rollouts": 60, "turns": 21}
    environment.run(__doc__, measure, environment.TRAINING, **sizes)
