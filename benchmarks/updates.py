"""The speed of an update over the device's own: `python -m benchmarks.updates --json`.

For the configuration of each of --policies, one micro-batch of its shape, full of random responses:
seconds of the gradient that an update accumulates. Operations are those that
`benchmarks.accelerator.gradient` counts, of products with weights and of attention. `peak_share` is
their median rate over the fastest of a product of two matrices of 1,024 numbers a side, which takes
turns with the gradient, ten after each. `products_of_ROWS` is that share of a pass's products with
all weights of so many rows, as rollouts compute them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, workloads
from benchmarks.accelerator.gradient import operations, random_responses
from benchmarks.accelerator.sizes import Size, timed
from benchmarks.rounds import products
from benchmarks.turns import in_turns
from benchmarks.ways import TINY
from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.rl.batches import micro_batches
from reprise.rl.batches.micro_batches import MicroBatch, TrainSample
from reprise.rl.gin.loader import load
from reprise.rl.learner import gradient_accumulation, trainer
from reprise.rl.learner.config import TrainSpec
from reprise.rl.learner.gradient_accumulation import StepScalars
from reprise.rl.settings.config import TrainConfig, recipe
from reprise.rl.settings.inputs import open_policy

CONFIGS = {TINY: "configs/tiny_cpu.gin", "downloads/countdown": "configs/countdown_cpu.gin"}
SIDE = 1024  # of the matrices whose product is the peak
PEAK_CALLS = 10
ROWS = (16, 64, 256)
square = jax.jit(jnp.matmul)


def full_batch(spec: TrainSpec, max_tokens: int) -> tuple[MicroBatch, int, float]:
    """Return a micro-batch of full rows, its positions, and the operations of its gradient."""
    shape = trainer.batch_shape(spec, max_tokens)
    size = Size(model=spec.model, row_tokens=shape.length, train_rows=shape.rows)
    drawn = random_responses(size)
    samples = [TrainSample(t, advantage=1.0) for t in drawn]
    [packed] = micro_batches.micro_batches(samples, shape)
    positions, needed = operations(size, len(drawn[0].prompt_ids), drawn[0].num_tokens)
    return packed.batch, positions, needed


class Gradient:
    """The call of a training step that adds a micro-batch's gradient to the total."""

    def __init__(self, params: Params, batch: MicroBatch, spec: TrainSpec, positions: int) -> None:
        self._params, self._batch = params, jax.device_put(batch)
        self._scalars = StepScalars(jnp.float32(positions), jnp.float32(positions), np.bool_(True))
        self._static: dict[str, Any] = {"network": trainer.POLICY, "recipe": spec}
        self._total = gradient_accumulation.start(**self._static)

    def __call__(self) -> Any:
        self._total, health = gradient_accumulation.accumulate(
            self._params, self._total, self._batch, self._scalars, **self._static
        )
        return self._total, health


def fastest(call: Callable[[], Any]) -> float:
    return min(timed(call) for _ in range(PEAK_CALLS))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each policy that is there."""
    rows = []
    for policy in arguments.policies:
        if not (environment.ROOT / policy / "config.json").is_file():
            environment.progress(f"{policy} is left out: expected a policy in that folder")
            continue
        config = load(TrainConfig, [environment.ROOT / CONFIGS[policy]])
        folder, model, _ = open_policy(str(environment.ROOT / policy), config.task)
        rows.append({"name": Path(policy).name, **row(config, model, folder, arguments.turns)})
        environment.progress(rows[-1])
    return {"rows": rows}


def row(config: TrainConfig, model: ModelConfig, folder: Path, turns: int) -> dict[str, Any]:
    """Return the figures of a configuration's gradient."""
    spec = recipe(config, model)
    max_tokens = config.rollout.max_prompt_tokens + config.sampling.max_new_tokens
    batch, positions, needed = full_batch(spec, max_tokens)
    _, params = workloads.policy(folder)
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    kinds = {
        "update": partial(timed, Gradient(params, batch, spec, positions)),
        "peak": partial(fastest, partial(square, matrix, matrix)),
    }
    for num_rows in ROWS:
        inputs = jnp.ones((num_rows, 1, model.d_model))
        kinds[f"products_of_{num_rows}"] = partial(timed, partial(products, model, params, inputs))
    seconds = in_turns(kinds, turns)
    update_s = float(np.median(seconds["update"]))
    rate = needed / update_s
    peak_rate = 2 * SIDE**3 / float(seconds["peak"].min())
    products_s = {n: float(np.median(seconds[f"products_of_{n}"])) for n in ROWS}
    num_weights = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    return {
        "tokens": positions,
        "operations": needed,
        "update_s": round(update_s, 5),
        "gflop_s": round(rate / 1e9, 1),
        "peak_gflop_s": round(peak_rate / 1e9, 1),
        "peak_share": round(rate / peak_rate, 4),
        **{
            f"products_of_{n}": round(2 * n * num_weights / products_s[n] / peak_rate, 4)
            for n in ROWS
        },
    }


if __name__ == "__main__":
    environment.run(
        __doc__, measure, choices={"policies": tuple(CONFIGS)}, policies=tuple(CONFIGS), turns=40
    )
