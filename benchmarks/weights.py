"""Weights for workers in other programs: deltas of real updates.

    make smollm2 && python -m benchmarks.weights --json --policy downloads/smollm2 \\
        --output benchmarks/results/weights.json

Each version is a step of GRPO by `rl.learner` (AdamW, learning rate 1e-6, float32 masters) on
responses of the version before; workers hold bfloat16. Rewards: the right answer for
policies/tiny, the share of digits in the text for another policy. Every version is published,
staged and compared bit by bit. `encode` and `apply` are GB of weights a CPU second of one core.
`compressed` is the size of a delta after zlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import zlib
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
from rl.remote.weights import MessageCarrier
from rl.rollout import generate
from rl.runtime import host_memory
from rl.trajectory import Request, Trajectory
from rl.weights import delta
from rl.weights.pieces import sha256
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber
from spec.config import SamplingConfig
from spec.sampling import step_key

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax")
LEARNING_RATE = 1e-6
FLOAT32_VERSIONS = 5  # whose deltas in float32 are looked at too


def versions(
    folder: Path, num: int, prompts: int, group: int, tokens: int
) -> Iterator[tuple[Params, Params]]:
    """Yield weights in bfloat16 and the masters, before and after each of `num` GRPO steps."""
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
    yield trainer.cast_params(state.params, jnp.bfloat16), state.params
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
        yield trainer.cast_params(state.params, jnp.bfloat16), state.params


def deltas(folder: Path, num: int, **sizes: int) -> dict[str, Any]:
    """Publish and stage every version of a training; figures are per version."""
    rows: list[dict[str, float]] = []
    errors, changed_shares, in_float32 = 0, [], []
    carrier = MessageCarrier()  # both ends
    publisher, worker = Publisher(carrier), None
    before: list[np.ndarray] = []
    masters: list[np.ndarray] = []
    for version, (params, master) in enumerate(versions(folder, num, **sizes)):
        now = [np.asarray(x).view(np.uint16) for x in jax.tree.leaves(params)]
        if worker is None:
            worker = Subscriber(params, carrier)
        else:
            changed = sum(int((a != b).sum()) for a, b in zip(before, now, strict=True))
            changed_shares.append(changed / sum(x.size for x in now))
            rows.append(_one_delta(before, now))
        publisher.publish(version, params, float(version))
        offer = publisher.offer("worker", worker.have(), float(version))
        assert offer is not None
        got = worker.swap(worker.stage(offer))
        publisher.release("worker")
        found = [np.asarray(x).view(np.uint16) for x in jax.tree.leaves(got)]
        errors += not all(np.array_equal(a, b) for a, b in zip(found, now, strict=True))
        before = [x.copy() for x in now]
        if version <= FLOAT32_VERSIONS:
            old, masters = masters, [np.array(x).view(np.uint32) for x in jax.tree.leaves(master)]
            found_bytes = sum(delta.encode(a, b).size for a, b in zip(old, masters, strict=False))
            in_float32.append(found_bytes / sum(x.nbytes for x in masters))
        print(f"{folder.name} {version}: {rows[-1:] or ''}", file=sys.stderr, flush=True)
    moved = [row for row in rows if row["bytes"]]
    full_bytes = sum(x.nbytes for x in before)
    return {
        "full_bytes": full_bytes,
        "versions": len(rows),
        "versions_that_changed": len(moved),
        "apply_errors": errors,
        "elements_changed": _spread([share for share in changed_shares if share]),
        "delta_share": _spread([row["bytes"] / full_bytes for row in moved]),
        "float32_delta_share": _spread([share for share in in_float32 if share]),
        "compressed_share": _spread([row["compressed"] / full_bytes for row in moved]),
        "encode_gb_per_s": round(_rate(moved, full_bytes, "encode_s"), 3),
        "apply_gb_per_s": round(_rate(moved, full_bytes, "apply_s"), 3),
        "copy_and_apply_gb_per_s": round(_rate(moved, full_bytes, "copy_s"), 3),
        "sha256_gb_per_s": round(_rate(moved, full_bytes, "sha256_s"), 3),
        "compress_gb_per_s": round(_rate(moved, full_bytes, "compress_s"), 3),
    }


def _one_delta(before: list[np.ndarray], now: list[np.ndarray]) -> dict[str, float]:
    """Encode and apply one version's delta, with CPU seconds of one core."""
    row: dict[str, float] = {}
    began_s = time.process_time()
    encoded = [delta.encode(a, b) for a, b in zip(before, now, strict=True)]
    row["encode_s"] = time.process_time() - began_s
    began_s = time.process_time()
    copies = [x.copy() for x in before]
    copied_s = time.process_time()
    for copy, one in zip(copies, encoded, strict=True):
        delta.apply(copy, one)
    row["apply_s"] = time.process_time() - copied_s
    row["copy_s"] = time.process_time() - began_s
    began_s = time.process_time()
    for copy in copies:
        sha256(copy.reshape(-1).view(np.uint8))
    row["sha256_s"] = time.process_time() - began_s
    began_s = time.process_time()
    row["compressed"] = sum(len(zlib.compress(one.tobytes(), 1)) for one in encoded if one.size)
    row["compress_s"] = time.process_time() - began_s
    row["bytes"] = sum(one.size for one in encoded)
    return row


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "largest": round(max(values), 5),
        "first": round(values[0], 5),
        "last": round(values[-1], 5),
    }


def _rate(rows: list[dict[str, float]], num_bytes: int, field: str) -> float:
    """Return GB of weights a second, in the median."""
    return num_bytes / 1e9 / max(statistics.median(row[field] for row in rows), 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--versions", type=int, default=200, help="steps of policies/tiny")
    parser.add_argument("--policy", type=Path, help="another policy: `make smollm2` makes one")
    parser.add_argument("--policy_versions", type=int, default=12, help="steps of that policy")
    environment.add_output_flags(parser)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    host_memory.bound_arenas()
    figures: dict[str, Any] = {}
    if args.versions:
        figures["tiny"] = deltas(BASE_POLICY, args.versions, prompts=4, group=8, tokens=48)
    if args.policy and args.policy_versions:
        sizes = {"prompts": 4, "group": 4, "tokens": 24}
        figures["policy"] = deltas(args.policy, args.policy_versions, **sizes)
    result = environment.record("benchmarks.weights", PACKAGES, ("--policy",)) | figures
    environment.show(result, args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
