"""Memory of a run's processes over many steps. Linux (/proc) only."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak.runs import TIMEOUT_S, RunFailed, output_of, started
from tests.support import tiny_run

LOOK_EVERY_STEPS = 25
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


def own_mib(pid: int) -> float | None:
    """Return the memory that a process shares with no file or process, None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    values = [int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")]
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


def watch(process: subprocess.Popen[bytes], run: Path, pids: Pids) -> list[dict[str, Any]]:
    """Return the memory of all programs, by role and pid, every few steps until the run ends."""
    metrics, looks = run / "metrics.jsonl", list[dict[str, Any]]()
    deadline_s = time.monotonic() + 10 * TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step >= (looks[-1]["step"] if looks else 0) + LOOK_EVERY_STEPS:
            mib = {role: {p: own_mib(p) for p in some} for role, some in pids().items()}
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
