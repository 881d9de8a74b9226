"""Weights for workers in other programs: deltas of real updates, and the speed of transports.

    make smollm2 && python -m benchmarks.weights --json --policy downloads/smollm2 \\
        --output benchmarks/results/weights.json

**Deltas.** Each version is a step of GRPO by `rl.learner` (AdamW, learning rate 1e-6, float32
masters) on responses that the version before has just given; workers hold bfloat16. Rewards: the
right answer for policies/tiny, the share of digits in the text for another policy. Every version
is published, fetched through a store in memory and compared bit by bit with what was published.
`encode` and `apply` are GB of weights a CPU second of one core. `compressed` is what zlib makes of
a delta.

**Transports.** `--megabytes` of weights go to three worker processes at once on the loopback
device, whole, verified and put on a device; medians over rounds after one that is not counted.
`worker` is the bytes of one copy, `delivered` those of all three, by the seconds until the last has
them ready; `received` by the seconds that the slowest has waited for bytes; CPU seconds are those
of all four processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
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
from rl.rollout import generate
from rl.runtime import host_memory
from rl.trajectory import Request, Trajectory
from rl.weights import delta
from rl.weights.config import MIB, WeightsConfig
from rl.weights.interface import Carrier
from rl.weights.object_store import FolderStore, ObjectStoreCarrier
from rl.weights.offers import VersionId
from rl.weights.pieces import sha256
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber
from rl.weights.transfer import TransferCarrier
from spec.config import SamplingConfig
from spec.sampling import step_key

PACKAGES = ("jax", "jaxlib", "numpy", "numba", "optax")
LEARNING_RATE = 1e-6
FLOAT32_VERSIONS = 5  # whose deltas in float32 are looked at too
WORKERS = 3
ARRAY_SHAPE = 4096, 1024  # of bfloat16: 8 MiB


class MemoryStore:
    """A store in this process."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        key = str(len(self._data)) + "-" + sha256(np.frombuffer(data, np.uint8))
        self._data[key] = data
        return key

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._data[key]

    def delete(self, key: str) -> None:
        del self._data[key]


# Deltas


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

    def ids(question: dict[str, Any]) -> list[int]:
        own = question["prompt_ids"]
        text = load_tokenizer(BASE_POLICY).decode(own)
        return own if tiny else tokenizer.encode(text)

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
    """Publish and fetch every version of a training; figures are per version."""
    rows: list[dict[str, float]] = []
    errors, changed_shares, in_float32 = 0, [], []
    publisher: Publisher | None = None
    before: list[np.ndarray] = []
    masters: list[np.ndarray] = []
    for version, (params, master) in enumerate(versions(folder, num, **sizes)):
        now = [np.asarray(x).view(np.uint16) for x in jax.tree.leaves(params)]
        if publisher is None:
            publisher, worker = _ends(params)
        else:
            changed = sum(int((a != b).sum()) for a, b in zip(before, now, strict=True))
            changed_shares.append(changed / sum(x.size for x in now))
            rows.append(_one_delta(before, now))
        publisher.publish(version, params, float(version))
        staged = worker.fetch()
        assert staged is not None
        got = worker.swap(staged)
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


def _ends(params: Params) -> tuple[Publisher, Subscriber]:
    carrier = ObjectStoreCarrier(MemoryStore())
    publisher = Publisher(WeightsConfig("object_store"), carrier)
    return publisher, Subscriber(
        params, carrier, lambda source, have: publisher.offer("worker", have, 0.0), 60.0
    )


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


# Transports


def expected(megabytes: int) -> list[jax.ShapeDtypeStruct]:
    num = max(1, round(megabytes * 1e6 / (2 * ARRAY_SHAPE[0] * ARRAY_SHAPE[1])))
    return [jax.ShapeDtypeStruct(ARRAY_SHAPE, jnp.bfloat16) for _ in range(num)]


def made(specs: list[jax.ShapeDtypeStruct], version: int) -> list[np.ndarray]:
    rng = np.random.default_rng(version)
    return [rng.integers(0, 2**16, s.shape, np.uint16).view(s.dtype) for s in specs]


def carrier_of(settings: dict[str, Any]) -> Carrier:
    if settings["transport"] == "object_store":
        return ObjectStoreCarrier(FolderStore(Path(settings["folder"])))
    names = "connections", "transfer_bytes", "ahead"
    return TransferCarrier(**{name: settings[name] for name in names if name in settings})


class _Timed:
    """A carrier that notes the seconds of `receive`."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier, self.seconds = carrier, 0.0

    def receive(self, *arguments: Any) -> list[np.ndarray]:
        began_s = time.perf_counter()
        found = self.carrier.receive(*arguments)
        self.seconds = time.perf_counter() - began_s
        return found


def worker(settings: dict[str, Any]) -> int:
    """A worker process: fetches whenever a line comes, asks and answers by lines of JSON."""
    carrier = _Timed(carrier_of(settings))

    def tell(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    def ask(source: int, have: VersionId | None) -> str:
        tell(ask=source)
        return json.loads(sys.stdin.readline())

    tell(ready=True)
    subscriber = Subscriber(expected(settings["megabytes"]), carrier, ask, 60.0)  # type: ignore[arg-type]
    for _ in range(settings["rounds"]):
        json.loads(sys.stdin.readline())
        began_s, cpu_s = time.perf_counter(), time.process_time()
        staged = subscriber.fetch()
        assert staged is not None
        subscriber.swap(staged)
        ready_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        tell(done=staged.version, ready_s=ready_s, cpu_s=cpu_s, wait_s=carrier.seconds)
        del staged
    subscriber.close()
    return 0


def move(settings: dict[str, Any]) -> dict[str, Any]:
    """Publish whole versions and have three workers fetch each at once."""
    command = [sys.executable, "-m", "benchmarks.weights", "--worker", json.dumps(settings)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=environment.ROOT)
    started = [subprocess.Popen(command, **pipes) for _ in range(WORKERS)]  # type: ignore[call-overload]
    config = WeightsConfig(
        settings["transport"], kept_deltas=0, part_mib=settings.get("part_mib", 64)
    )
    publisher = Publisher(config, carrier_of(settings))
    specs, rounds = expected(settings["megabytes"]), []
    num_bytes = sum(s.size * 2 for s in specs)
    try:
        for process in started:
            assert json.loads(process.stdout.readline())["ready"]
        for version in range(settings["rounds"]):
            publisher.publish(version, made(specs, version), float(version))
            rounds.append(_round(started, publisher, version))
    finally:
        for process in started:
            process.kill()
            process.wait()
        publisher.close()
    counted = rounds[1:]
    ready_s = statistics.median(r["ready_s"] for r in counted)
    return {
        "bytes": num_bytes,
        "rounds": len(counted),
        "until_last_ready_s": round(ready_s, 3),
        "worker_gb_per_s": round(num_bytes / 1e9 / ready_s, 3),
        "delivered_gb_per_s": round(WORKERS * num_bytes / 1e9 / ready_s, 3),
        "received_gb_per_s": round(
            num_bytes / 1e9 / statistics.median(r["wait_s"] for r in counted), 3
        ),
        "cpu_s_per_delivered_gb": round(
            statistics.median(r["cpu_s"] for r in counted) / (WORKERS * num_bytes / 1e9), 3
        ),
        "first_round_s": round(rounds[0]["ready_s"], 3),
    }


def _round(started: list[Any], publisher: Publisher, version: int) -> dict[str, float]:
    """Have all workers fetch at once; return the slowest's seconds."""
    found: list[dict[str, float]] = []

    def serve(name: str, process: Any) -> None:
        process.stdin.write("{}\n")
        process.stdin.flush()
        while "done" not in (message := json.loads(process.stdout.readline())):
            process.stdin.write(json.dumps(publisher.offer(name, None, float(version))) + "\n")
            process.stdin.flush()
        assert message["done"] == version
        publisher.forget(name)
        found.append(message)

    threads = [
        threading.Thread(target=serve, args=(str(n), p), daemon=True) for n, p in enumerate(started)
    ]
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    ready_s = time.perf_counter() - began_s
    assert len(found) == len(started), "expected all workers to have the weights in 120 s"
    cpu_s = time.process_time() - cpu_s + sum(m["cpu_s"] for m in found)
    return {"ready_s": ready_s, "wait_s": max(m["wait_s"] for m in found), "cpu_s": cpu_s}


def transports(megabytes: int, rounds: int) -> dict[str, Any]:
    common = {"megabytes": megabytes, "rounds": rounds + 1}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        store = move(common | {"transport": "object_store", "folder": at})
    return {"object_store": store, "transfer": move(common | {"transport": "transfer"})}


def sweep(megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """The transfer server's settings, one changed at a time."""
    changes: list[dict[str, int]] = [{}]
    changes += [{"connections": n} for n in (1, 4, 8)]
    changes += [{"transfer_bytes": n * MIB} for n in (4, 16, 256)]
    changes += [{"part_mib": n} for n in (16, 256)]
    changes += [{"ahead": n} for n in (1, 2, 8)]
    found = []
    for change in changes:
        settings = {"transport": "transfer", "megabytes": megabytes, "rounds": rounds + 1}
        found.append(change | move(settings | change))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--versions", type=int, default=200, help="steps of policies/tiny")
    parser.add_argument("--policy", type=Path, help="another policy: `make smollm2` makes one")
    parser.add_argument("--policy_versions", type=int, default=12, help="steps of that policy")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sweep", action="store_true", help="settings of the transfer server too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    environment.add_output_flags(parser)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    host_memory.bound_arenas()
    if args.worker:
        return worker(json.loads(args.worker))
    figures: dict[str, Any] = {}
    if args.rounds:
        figures |= transports(args.megabytes, args.rounds)
    if args.sweep:
        figures["sweep"] = sweep(args.megabytes, args.rounds)
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
