"""What each program of a run on Ray has more of after hundreds of steps: `RssAnon`, in MiB.

    python -m benchmarks.role_memory --json --output benchmarks/results/role_memory.json

The smallest run takes `--steps` steps with two rollout workers, a scorer, a history worker and a
draft server in programs of their own; they draft from history, siblings and own text. Memory of
all of them is read a dozen times. `mib_more` is from a third of the steps to the last: before
that, buffers and caches fill. Pages that programs share (Ray's object store) are not in it. Linux
(/proc) only.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, tiny_run

# how Ray and the run call these programs: the beginning of their command lines
ROLES = {
    "rollout worker": "ray::WorkerActor",
    "scorer": "ray::ScoringActor",
    "history worker": "ray::HistoryActor",
    "draft server": "ray::DraftActor",
}
LOOKS = 12
LIMIT_S = 1500.0
SETTINGS = (
    *("Cluster.kind='ray'", "Cluster.scorers=1", "Cluster.history_workers=1", "Sched.workers=2"),
    *("Sched.policy='seer'", "Sched.chunk_tokens=4", "Engine.slots=4", "Engine.min_slots=4"),
    *("Speculation.budget='fixed:1'", "Speculation.sources=('history', 'group', 'own')"),
    *("Checkpoint.every_steps=50", "Rollout.cache_bytes=65536"),
)


def anonymous_mib(pid: int) -> float | None:
    """Memory that a process shares with no file and no other; None once it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def programs(trainer: subprocess.Popen[bytes]) -> dict[str, dict[int, float]]:
    """Return MiB by role and process of what the run has started."""
    found: dict[str, dict[int, float]] = {"trainer": {}} | {role: {} for role in ROLES}
    if (mib := anonymous_mib(trainer.pid)) is not None:
        found["trainer"][trainer.pid] = mib
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for role, begins in ROLES.items():
            if words.startswith(begins) and (mib := anonymous_mib(int(path.name))) is not None:
                found[role][int(path.name)] = mib
    return found


def looks(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run, and return what each program had at a dozen steps."""
    run, rows = folder / "run", list[dict[str, Any]]()
    metrics = run / "metrics.jsonl"
    told = [f"--gin.{x}" for x in (*SETTINGS, f"Run.steps={steps}")]
    arguments = tiny_run.command(tiny_run.make_inputs(folder), run, *told)
    with (folder / "output.txt").open("wb") as output:
        trainer = subprocess.Popen(
            arguments,
            cwd=tiny_run.ROOT,
            env=tiny_run.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    until_s, every = time.monotonic() + LIMIT_S, max(1, steps // LOOKS)
    try:
        while trainer.poll() is None and time.monotonic() < until_s:
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done >= (rows[-1]["step"] if rows else 0) + every:
                rows.append({"step": done, "mib": programs(trainer)})
            time.sleep(0.05)
    finally:
        if trainer.poll() is None:
            trainer.send_signal(signal.SIGTERM)
        trainer.wait(60)
    if trainer.returncode or len(rows) < LOOKS // 2:
        said = (folder / "output.txt").read_text(errors="replace")
        raise RuntimeError(f"{len(rows)} looks, exit status {trainer.returncode}\n{said[-3000:]}")
    return rows


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each program: how much more it had at the last look than at a third."""
    first, last = rows[len(rows) // 3], rows[-1]
    found = []
    for role, processes in first["mib"].items():
        for number, (pid, mib) in enumerate(sorted(processes.items())):
            then = last["mib"][role].get(pid)
            if then is None:  # it was lost, or Ray has ended it already
                raise RuntimeError(f"{role} {number} was not there at the last look")
            found.append(
                {
                    "role": role,
                    "number": number,
                    "mib": round(mib, 1),
                    "mib_more": round(then - mib, 2),
                    "looks_mib": [round(row["mib"][role].get(pid, 0.0), 1) for row in rows],
                }
            )
    return found


def measure(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = looks(Path(folder), steps)
    grown = growth(rows)
    missing = {"trainer", *ROLES} - {row["role"] for row in grown}
    assert not missing, f"no program of {missing}"
    return {
        "from_step": rows[len(rows) // 3]["step"],
        "to_step": rows[-1]["step"],
        "programs": len(grown),
        "most_mib_more": max(row["mib_more"] for row in grown),
        "roles": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.role_memory", description=__doc__)
    environment.add_output_flags(parser)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    result = measure(args.steps)
    shown = {f"{r['role']} {r['number']}": (r["mib"], r["mib_more"]) for r in result["roles"]}
    record = environment.record("benchmarks.role_memory", ("jax", "numpy", "ray"))
    environment.show(record | result, args, {"most_mib_more": result["most_mib_more"]} | shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
