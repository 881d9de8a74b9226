"""The speed of an update over the device's own: `python -m benchmarks.updates --json`.

For the configuration of each of --policies, one micro-batch of its shape, full of responses to one
prompt: seconds of the gradient that an update accumulates. FLOP are 6 · parameters · tokens, those
of products with weights forward and backward; attention, norms and the loss are not among them.
`peak_share` is their median rate over the fastest of a product of two matrices of 1,024 numbers a
side, which takes turns with the gradient, ten after each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment, workloads
from benchmarks.turns import in_turns
from benchmarks.ways import POLICIES, TINY
from rl.config import TrainConfig, recipe
from rl.gin.loader import load
from rl.inputs import open_policy
from rl.learner import gradient_accumulation, micro_batches, trainer
from rl.learner.gradient_accumulation import StepScalars
from rl.learner.micro_batches import MicroBatch, TrainSample
from rl.packing import Shape
from rl.trajectory import FinishReason, Trajectory

CONFIGS = {name: settings[0] for name, settings in POLICIES.items()}
CONFIGS[TINY] = "configs/tiny_cpu.gin"
SIDE = 1024  # of the matrices whose product is the peak
PROMPT_TOKENS, GROUP_SIZE = 16, 8


def full_batch(shape: Shape, vocab_size: int) -> MicroBatch:
    """Return a micro-batch with one group of responses in each row and no padding."""
    rng = np.random.default_rng(0)
    samples = list[TrainSample]()
    lengths = np.full(GROUP_SIZE, (shape.length - PROMPT_TOKENS) // GROUP_SIZE)
    lengths[0] += shape.length - PROMPT_TOKENS - lengths.sum()
    for group in range(shape.rows):
        prompt_ids = rng.integers(0, vocab_size, PROMPT_TOKENS, np.int32)
        for i, n in enumerate(lengths.tolist()):
            drawn = Trajectory(
                request_id=group * GROUP_SIZE + i,
                group_id=group,
                sample_index=i,
                prompt_ids=prompt_ids,
                response_ids=rng.integers(0, vocab_size, n, np.int32),
                logprobs=np.full(n, -2.0, np.float32),
                policy_versions=np.zeros(n, np.int32),
                origins=np.zeros(n, np.uint8),
                finish_reason=FinishReason.STOP,
                reward=1.0,
                emission_logprobs=np.full(n, -2.0, np.float32),
            )
            samples.append(TrainSample(drawn, advantage=1.0))
    [packed] = micro_batches.micro_batches(samples, shape)
    return packed.batch


def gradient(policy: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a call that accumulates a micro-batch's gradient, and its sizes."""
    config = load(TrainConfig, [environment.ROOT / CONFIGS[policy]])
    folder, model, _ = open_policy(str(environment.ROOT / policy), config.task)
    _, params = workloads.policy(folder)
    spec = recipe(config, model)
    max_tokens = config.rollout.max_prompt_tokens + config.sampling.max_new_tokens
    batch = jax.device_put(full_batch(trainer.batch_shape(spec, max_tokens), model.vocab_size))
    num_tokens = int((np.asarray(batch.tokens_BT) >= 0).sum())
    scalars = StepScalars(jnp.float32(num_tokens), jnp.float32(num_tokens), np.bool_(True))
    static: dict[str, Any] = {"network": trainer.POLICY, "recipe": spec}
    total = [gradient_accumulation.start(**static)]

    def call() -> Any:
        total[0], health = gradient_accumulation.accumulate(
            params, total[0], batch, scalars, **static
        )
        return total[0], health

    sizes = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "rows": batch.tokens_BT.shape[0],
        "row_tokens": batch.tokens_BT.shape[1],
        "tokens": num_tokens,
    }
    return call, sizes


def seconds(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began_s


def fastest(call: Callable[[], Any]) -> float:
    return min(seconds(call) for _ in range(10))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each policy that is there."""
    x = jnp.ones((SIDE, SIDE), jnp.float32)
    square = jax.jit(jnp.matmul)
    rows = []
    for policy in arguments.policies:
        if not (environment.ROOT / policy / "config.json").is_file():
            environment.progress(f"{policy} is left out: expected a policy in that folder")
            continue
        call, sizes = gradient(policy)
        kinds = {"update": partial(seconds, call), "peak": partial(fastest, lambda: square(x, x))}
        taken = in_turns(kinds, arguments.turns)
        update_s, peak_s = statistics.median(taken["update"].tolist()), taken["peak"].min()
        peak_flop_s = 2 * SIDE**3 / peak_s
        flop_s = 6 * sizes["parameters"] * sizes["tokens"] / update_s
        rows.append(
            {
                "name": Path(policy).name,
                **sizes,
                "update_s": round(update_s, 5),
                "gflop_s": round(flop_s / 1e9, 1),
                "peak_gflop_s": round(peak_flop_s / 1e9, 1),
                "peak_share": round(flop_s / peak_flop_s, 4),
            }
        )
        environment.progress(rows[-1])
    return {"rows": rows}


if __name__ == "__main__":
    environment.run(__doc__, measure, policies=tuple(CONFIGS)[:2], turns=40)
