"""Memory of a run's processes over many steps, and of checkpoints. Linux (/proc) only."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.soak.runs import TIMEOUT_S, RunFailed, output_of, started
from benchmarks.workloads import BASE_POLICY
from models import hf
from rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from rl.checkpoint.config import CheckpointConfig
from rl.checkpoint.manifest import Content
from rl.learner.config import OptimizerConfig
from rl.learner.optimizer import TrainState, init_state, make_optimizer
from rl.runtime import host_memory
from spec.reuse.rollout_cache import RolloutCache, of_group
from tests.support import tiny_run

MIB = 2**20
LOOK_EVERY_STEPS = 25
WARM_UP_SAVES = 50
Pids = Callable[[], Mapping[str, Sequence[int]]]
# The beginning of these programs' command lines, as Ray names them.
ROLES = {
    "rollout worker": "ray::WorkerActor",
    "scorer": "ray::ScoringActor",
    "history worker": "ray::HistoryActor",
    "draft server": "ray::GroupDrafts",
}
SETTINGS = (
    *("Cluster.kind='ray'", "Cluster.scorers=1", "Cluster.history_workers=1", "Sched.workers=2"),
    *("Sched.policy='seer'", "Sched.chunk_tokens=4", "Engine.slots=4", "Engine.min_slots=4"),
    *("Speculation.budget='fixed:1'", "Speculation.sources=('history', 'group', 'own')"),
    *("Checkpoint.every_steps=50", "Rollout.cache_bytes=65536"),
)


def status_mib(field: str, pid: int | str = "self") -> float | None:
    """Return a field of /proc/PID/status, or None if the process has ended.

    `VmRSS` is what it has, `VmHWM` the maximum, `RssAnon` what it shares with no file or process.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = [int(line.split()[1]) / 1024 for line in lines if line.startswith(field)]
    return values[0] if values else None


def programs_of(marker: str, role: str) -> list[int]:
    """Return programs whose command line begins with `role`, started with REPRISE_SOAK=`marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if not (path / "cmdline").read_bytes().startswith(role.encode()):
                continue
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if f"REPRISE_SOAK={marker}".encode() in variables:
            found.append(int(path.name))
    return sorted(found)


# --- over many steps ----------------------------------------------------------------------


def watch(process: subprocess.Popen[bytes], run: Path, pids: Pids) -> list[dict[str, Any]]:
    """Return the memory of all programs, by role and pid, every few steps until the run ends."""
    metrics, looks = run / "metrics.jsonl", list[dict[str, Any]]()
    deadline_s = time.monotonic() + 10 * TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step >= (looks[-1]["step"] if looks else 0) + LOOK_EVERY_STEPS:
            mib = {
                role: {p: status_mib("RssAnon", p) for p in some} for role, some in pids().items()
            }
            looks.append({"step": step, "mib": mib})
        time.sleep(0.05)
    return looks


def growth(looks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each program: how much it grew from a third of the looks to the last.

    Before that, buffers and caches fill.
    """
    first, last, rows = looks[len(looks) // 3], looks[-1], []
    for role, programs in first["mib"].items():
        for number, (pid, mib) in enumerate(sorted(programs.items())):
            end_mib = last["mib"][role].get(pid)
            if mib is None or end_mib is None:
                raise RunFailed(f"expected {role} {number} at every look, but it was lost")
            row = {"role": role, "number": number, "mib": round(mib, 1)}
            rows.append(row | {"mib_more": round(end_mib - mib, 2)})
    return rows


def roles(folder: Path, count: int = 300) -> dict[str, Any]:
    """Run on Ray for `count` steps with every kind of actor, and watch all programs."""
    run, log = folder / "run", folder / "run.log"
    gin = [f"--gin.{x}" for x in (*SETTINGS, f"Run.steps={count}")]
    command = tiny_run.command(tiny_run.make_inputs(folder), run, *gin)
    env = tiny_run.environment() | {"REPRISE_SOAK": str(folder)}
    with started(command, env, log) as process:

        def pids() -> dict[str, Sequence[int]]:
            actors = {role: programs_of(str(folder), name) for role, name in ROLES.items()}
            return {"trainer": [process.pid], **actors}

        looks = watch(process, run, pids)
        code = process.wait(TIMEOUT_S)
    if code or not looks:
        raise RunFailed(f"{len(looks)} looks, exit status {code}\n{output_of(log)[-3000:]}")
    grown = growth(looks)
    missing = {"trainer", *ROLES} - {row["role"] for row in grown}
    assert not missing, f"expected a program of each role, got none of {missing}"
    return {
        "from_step": looks[len(looks) // 3]["step"],
        "to_step": looks[-1]["step"],
        "programs": len(grown),
        "most_mib_more": max(row["mib_more"] for row in grown),
        "roles": grown,
    }


# --- checkpoints --------------------------------------------------------------------------


def settled_mib() -> float:
    gc.collect()
    mib = status_mib("VmRSS")
    assert mib is not None, "this process runs"
    return mib


def saves(folder: Path, count: int = 300, spilled_mib: int = 1024) -> dict[str, Any]:
    """Memory that `count` saves leave behind, and that one save with spilled rollouts takes."""
    host_memory.bound_arenas()  # as rl.train does
    _, params = hf.load_pretrained(BASE_POLICY, dtype=jnp.float32)
    state = init_state(params, make_optimizer(OptimizerConfig(), 1))
    return _kept(folder / "kept", state, count) | _spilled(folder / "spilled", state, spilled_mib)


def _kept(folder: Path, state: TrainState, count: int) -> dict[str, Any]:
    with Checkpointer(folder, CheckpointConfig(keep=2)) as saver:
        for step in range(WARM_UP_SAVES + count):
            if step == WARM_UP_SAVES:
                saver.wait()
                before, start_s = settled_mib(), time.perf_counter()
            saver.save(step, state, {"step": step})
        saver.wait()
        after = settled_mib()
    save_s = (time.perf_counter() - start_s) / count
    return {"saves": count, "kept_mib": after - before, "save_s": save_s, "rss_mib": after}


def _spilled(folder: Path, state: TrainState, spilled_mib: int) -> dict[str, Any]:
    """`spilled_peak_mib` is growth during one save, `spilled_written_mib` of unshared files."""
    rng, cache, number, on_disk = np.random.default_rng(0), RolloutCache(1, folder / "cache"), 0, 0
    while on_disk < spilled_mib * MIB:
        tokens = [rng.integers(0, 2**31 - 1, MIB // 4, np.int32) for _ in range(4)]
        cache.replace(str(number), of_group(tokens, [1.0] * 4))
        number += 1
        on_disk = sum(file.num_bytes for file in cache.spilled().values())
    with Checkpointer(folder / "checkpoints") as saver:
        saver.save(0, state, {})  # the first save allocates more
        saver.wait()
        before = settled_mib()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        start_s = time.perf_counter()
        files = {f.name: Content(f.num_bytes, f.sha256) for f in cache.spilled().values()}
        saver.save(1, state, {"rollouts": cache.state()}, LinkedFiles(cache.folder, files))  # type: ignore[arg-type]
        saver.wait()
        peak = status_mib("VmHWM") or 0.0
    own = [p for p in (folder / "checkpoints" / "step_00000001").rglob("*") if p.is_file()]
    written = sum(p.stat().st_size for p in own if p.stat().st_nlink == 1)
    return {
        "spilled_mib": on_disk / MIB,
        "spilled_files": number,
        "spilled_peak_mib": peak - before,
        "spilled_written_mib": written / MIB,
        "spilled_save_s": time.perf_counter() - start_s,
    }
