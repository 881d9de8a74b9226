"""Deltas of real updates: `python -m benchmarks.weights --json --policy downloads/smollm2`

Each version is a step of GRPO by `rl.learner` (AdamW, learning rate 1e-6, float32 masters) on
responses of the version before; workers hold bfloat16. Rewards: the right answer for
policies/tiny, the share of digits in the text for another policy (`make smollm2` makes one). Every
delta is applied and compared bit by bit. Rates are GB of weights a CPU second of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.workloads import BASE_POLICY, questions
from models import hf
from models.tokenizer import load as load_tokenizer
from models.transformer import Params
from rl.engine.engine import Engine
from rl.learner import trainer
from rl.learner.advantages import group_advantages
from rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from rl.learner.optimizer import init_state, make_optimizer
from rl.rollout import generate
from rl.runtime import host_memory
from rl.trajectory import Request, Trajectory
from rl.weights import delta
from rl.weights.versions import digest
from spec.config import SamplingConfig
from spec.sampling import step_key

LEARNING_RATE = 1e-6
RATES = {"encode": "encode_s", "copy_and_apply": "copy_and_apply_s", "sha256": "sha256_s"}


def versions(folder: Path, num: int, prompts: int, group: int, tokens: int) -> Iterator[Params]:
    """Yield weights in bfloat16, before and after each of `num` GRPO steps."""
    model, params = hf.load_pretrained(folder, dtype=jnp.float32)
    tokenizer = load_tokenizer(folder)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    settings = TrainerConfig(micro_batch_tokens=1024, logprob_chunk_tokens=256)
    recipe = TrainSpec(model, trainer=settings, optimizer=optimizer, total_steps=num)
    sampling = SamplingConfig(max_new_tokens=tokens)
    asked = questions(100)
    tiny = folder == BASE_POLICY

    base = load_tokenizer(BASE_POLICY)

    def ids(question: dict[str, Any]) -> list[int]:
        own = question["prompt_ids"]
        return own if tiny else tokenizer.encode(base.decode(own))

    def reward(t: Trajectory) -> float:
        text = tokenizer.decode(t.response_ids)
        if tiny:
            answer = tokenizer.decode(asked[t.group_id]["answer_ids"])
            return float(text.rpartition("####")[2].strip() == answer.strip())
        return sum(c.isdigit() for c in text) / max(1, len(text))

    longest = max(len(ids(q)) for q in asked) + tokens
    learner = trainer.Learner(recipe, trainer.batch_shape(recipe, longest), sampling)
    engine = Engine(model, dtype=jnp.float32)
    state = init_state(params, make_optimizer(optimizer, num))
    yield trainer.cast_params(state.params, jnp.bfloat16)
    for step in range(num):
        chosen = [(step * prompts + n) % len(asked) for n in range(prompts)]
        requests = [
            Request(n * group + k, tuple(ids(asked[q])), group_id=q, sample_index=k)
            for n, q in enumerate(chosen)
            for k in range(group)
        ]
        key = step_key(0, step)
        done = generate(model, state.params, requests, sampling, key=key, engine=engine)
        rewards = [reward(t) for t in done]
        advantages = group_advantages(rewards, [t.group_id for t in done])
        done = [dataclasses.replace(t, reward=r) for t, r in zip(done, rewards, strict=True)]
        state, _ = trainer.update(state, done, advantages, step, learner)
        yield trainer.cast_params(state.params, jnp.bfloat16)


def deltas(folder: Path, num: int, **sizes: int) -> dict[str, Any]:
    """Encode and apply the delta of every version of a training; figures are per version."""
    rows, before = list[dict[str, float]](), list[np.ndarray]()
    for version, params in enumerate(versions(folder, num, **sizes)):
        now = [np.array(x).view(np.uint16) for x in jax.tree.leaves(params)]
        if before:
            rows.append(one_delta(before, now))
            environment.progress(f"{folder.name} {version}: {rows[-1]}")
        before = now
    moved = [row for row in rows if row["bytes"]]
    full_bytes = sum(x.nbytes for x in before)
    rates = {
        f"{name}_gb_per_s": full_bytes / 1e9 / statistics.median(row[field] for row in moved)
        for name, field in RATES.items()
    }
    return {
        "full_bytes": full_bytes,
        "versions": len(rows),
        "versions_that_changed": len(moved),
        "apply_errors": sum(row["errors"] for row in rows),
        "elements_changed": _spread([row["changed"] for row in moved]),
        "delta_share": _spread([row["bytes"] / full_bytes for row in moved]),
        **{name: round(rate, 3) for name, rate in rates.items()},
    }


def one_delta(before: list[np.ndarray], now: list[np.ndarray]) -> dict[str, float]:
    """Encode and apply one version's delta, with CPU seconds of one core."""
    began_s = time.process_time()
    encoded = [delta.encode(a, b) for a, b in zip(before, now, strict=True)]
    encoded_s = time.process_time()
    found = [x.copy() for x in before]
    for array, one in zip(found, encoded, strict=True):
        delta.apply(array, one)
    applied_s = time.process_time()
    for array in found:
        digest([array])
    pairs = list(zip(before, now, strict=True))
    return {
        "encode_s": encoded_s - began_s,
        "copy_and_apply_s": applied_s - encoded_s,
        "sha256_s": time.process_time() - applied_s,
        "bytes": sum(one.size for one in encoded),
        "changed": sum(int((a != b).sum()) for a, b in pairs) / sum(x.size for x in now),
        "errors": not all(np.array_equal(a, b) for a, b in zip(found, now, strict=True)),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "largest": round(max(values), 5),
        "first": round(values[0], 5),
        "last": round(values[-1], 5),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    host_memory.bound_arenas()
    sizes = {"prompts": 4, "group": 8, "tokens": 48}
    figures = {"tiny": deltas(BASE_POLICY, arguments.versions, **sizes)}
    if arguments.policy:
        sizes = {"prompts": 4, "group": 4, "tokens": 24}
        figures["policy"] = deltas(arguments.policy, arguments.policy_versions, **sizes)
    return figures


if __name__ == "__main__":
    packages = (*environment.JAX, "numba", "optax")
    environment.run(__doc__, measure, packages, versions=200, policy=Path, policy_versions=12)
