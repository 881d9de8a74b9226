"""Trainers in processes of their own that publish weights; questions and offers are files."""

import json
import os
import time

import numpy as np

from rl.weights.config import WeightsConfig
from rl.weights.offers import VersionId
from rl.weights.publisher import Publisher
from rl.weights.transfer import TransferCarrier

ROWS, COLUMNS = 4000, 16
LIMIT_S = 60.0


def host_weights(version):
    """Three arrays; every version moves two percent of the matrix's words."""
    rng = np.random.default_rng(0)
    matrix = rng.integers(0x3000, 0x4000, (ROWS, COLUMNS)).astype(np.uint16)
    for v in range(version):
        matrix[np.random.default_rng(v + 1).random(matrix.shape) < 0.02] += 1
    return {
        "empty": np.zeros((0, 3), np.float32),
        "matrix": matrix.view("bfloat16"),
        "vector": np.arange(5, dtype=np.float32) + version,
    }


def trainer(place):
    """One process of the trainer: it has half of the matrix, and answers until told to end."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()), "fsdp")
    specs = {"empty": PartitionSpec(), "matrix": PartitionSpec("fsdp"), "vector": PartitionSpec()}

    def globally(version):
        host = host_weights(version)
        return {
            name: jax.make_array_from_callback(
                host[name].shape, NamedSharding(mesh, spec), lambda index, x=host[name]: x[index]
            )
            for name, spec in specs.items()
        }

    config = WeightsConfig("transfer", part_mib=1)
    publisher = Publisher(config, TransferCarrier(), source=place.index, sources=place.count)
    publisher.publish(0, globally(0), 0.0)
    while True:
        command, question = _next(place)
        if command == "end":
            return {"pieces": [list(p.info.start) for p in publisher._newest.pieces]}
        if command == "die":
            os.kill(os.getpid(), 9)
        if command == "publish":
            publisher.publish(question, globally(question), 0.0)
            answer = None
        else:
            have = VersionId.of_plain(question) if question else None
            answer = publisher.offer("worker", have, 0.0)
        working = place.folder / f"answer-{place.index}.part"
        working.write_text(json.dumps(answer))
        working.rename(place.folder / f"answer-{place.index}")


def tell(folder, index, command, question=None):
    """Send a command to a trainer process, without waiting for an answer."""
    working = folder / f"command-{index}.part"
    working.write_text(json.dumps([command, question]))
    working.rename(folder / f"command-{index}")


def call(folder, index, command, question=None):
    """Send a command and return the answer."""
    tell(folder, index, command, question)
    return _taken(folder / f"answer-{index}")


def _next(place):
    return _taken(place.folder / f"command-{place.index}")


def _taken(path):
    until_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"expected {path.name} within {LIMIT_S} s")
        time.sleep(0.01)
    value = json.loads(path.read_text())
    path.unlink()
    return value
