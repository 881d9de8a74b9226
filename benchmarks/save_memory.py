"""What checkpoints cost the host's memory: what saves leave behind, and what spilled rollouts take.

    python -m benchmarks.save_memory --json --output benchmarks/results/save_memory.json

`kept_mib` is how much the process has grown over `--saves` saves of the shipped policy with its
optimizer's state, after `WARM_UP` of them. `spilled_*` is of one save of a run whose rollout cache
has `--spilled_mib` on the disk: the most that the process grew meanwhile, and the bytes of files
that the checkpoint does not share with the cache. Linux (/proc) only.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import environment
from benchmarks.workloads import BASE_POLICY
from models import hf
from rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from rl.checkpoint.config import CheckpointConfig
from rl.checkpoint.manifest import Content
from rl.learner.config import OptimizerConfig
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.runtime import host_memory
from spec.reuse.rollout_cache import RolloutCache, of_group

PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "tensorstore")
WARM_UP = 50
MIB = 2**20


def memory_mib(field: str) -> float:
    """`VmRSS`, what the process has now, or `VmHWM`, the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"expected {field} in /proc/self/status: Linux only")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def state() -> TrainState:
    _, params = hf.load_pretrained(BASE_POLICY, dtype=jnp.float32)
    return init_state(params, make_optimizer(OptimizerConfig(), 1))


def kept(folder: Path, saves: int) -> dict[str, Any]:
    """Growth of the process over `saves` saves."""
    arrays = state()
    with Checkpointer(folder, CheckpointConfig(keep=2)) as saver:
        for step in range(WARM_UP):
            saver.save(step, arrays, {"step": step})
        saver.wait()
        gc.collect()
        before, began_s = memory_mib("VmRSS"), time.perf_counter()
        for step in range(WARM_UP, WARM_UP + saves):
            saver.save(step, arrays, {"step": step})
        saver.wait()
        gc.collect()
        seconds = (time.perf_counter() - began_s) / saves
        after = memory_mib("VmRSS")
    return {"saves": saves, "kept_mib": after - before, "save_s": seconds, "rss_mib": after}


def spilled(folder: Path, spilled_mib: int) -> dict[str, Any]:
    """Memory and bytes of one save beside so much on the disk."""
    rng, cache, number = np.random.default_rng(0), RolloutCache(1, folder / "rollouts"), 0
    on_disk = 0
    while on_disk < spilled_mib * MIB:
        tokens = [rng.integers(0, 2**31 - 1, MIB // 4, np.int32) for _ in range(4)]
        cache.replace(str(number), of_group(tokens, [1.0] * 4))
        number += 1
        on_disk = sum(file.num_bytes for file in cache.spilled().values())
    arrays = state()
    with Checkpointer(folder / "checkpoints") as saver:
        saver.save(0, arrays, {})  # what the first save allocates is not the rollouts'
        saver.wait()
        gc.collect()
        before = memory_mib("VmRSS")
        forget_peak()
        began_s = time.perf_counter()
        files = {f.name: Content(f.num_bytes, f.sha256) for f in cache.spilled().values()}
        saver.save(1, arrays, {"rollouts": cache.state()}, LinkedFiles(cache.folder, files))  # type: ignore[arg-type]
        call_s = time.perf_counter() - began_s
        saver.wait()
        peak = memory_mib("VmHWM")
    own = [p for p in (folder / "checkpoints" / "step_00000001").rglob("*") if p.is_file()]
    written = sum(p.stat().st_size for p in own if p.stat().st_nlink == 1)
    return {
        "spilled_mib": on_disk / MIB,
        "spilled_files": number,
        "spilled_peak_mib": peak - before,
        "spilled_written_mib": written / MIB,
        "spilled_call_s": call_s,
        "spilled_save_s": time.perf_counter() - began_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_memory", description=__doc__)
    parser.add_argument("--saves", type=int, default=300)
    parser.add_argument("--spilled_mib", type=int, default=1024)
    environment.add_output_flags(parser)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    host_memory.bound_arenas()  # as rl.train does
    with tempfile.TemporaryDirectory() as folder:
        figures = kept(Path(folder) / "kept", args.saves)
        figures |= spilled(Path(folder) / "spilled", args.spilled_mib)
    result = environment.record("benchmarks.save_memory", PACKAGES) | figures
    environment.show(result, args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
