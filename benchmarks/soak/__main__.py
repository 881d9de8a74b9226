"""Faults in real runs: `python -m benchmarks.soak FAULT --json --output benchmarks/results/FILE`

| fault | what happens | file |
|---|---|---|
| kill | kill −9 at random points of a run, which is then resumed | resume.json |
| kill_ahead | the same with two workers that prefetch the next step | resume_ahead.json |
| kill_drafting | the same with a worker that drafts for three others | resume_drafting.json |
| stop | SIGTERM in every part of a step, Ctrl-C during compilation | stops.json |
| lose | rollout workers on Ray are killed, and one is stopped | remote.json |
| processes | several processes of one run, resumed by fewer | processes.json |
| saves | memory after 300 saves, and of one with 1 GiB of spilled rollouts | save_memory.json |
| roles | memory of every program of a run on Ray over 300 steps | role_memory.json |

Runs with a fault are compared with a run without it, bit by bit. The exit status is 1 if they
differ. `lose`, `saves` and `roles` need Linux (/proc).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import environment
from benchmarks.soak import memory, processes, runs

FAULTS = {
    "kill": runs.kill,
    "kill_ahead": runs.kill_ahead,
    "kill_drafting": runs.kill_drafting,
    "stop": runs.stop,
    "lose": processes.lose,
    "processes": processes.compare_processes,
    "saves": memory.saves,
    "roles": memory.roles,
}
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "ray", "tensorstore")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--count", type=int, help="of kills, saves or steps; for trials")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        count = {} if arguments.count is None else {"count": arguments.count}
        figures = FAULTS[arguments.fault](Path(folder), **count)
    record = environment.record("benchmarks.soak", PACKAGES)
    shown = {k: v for k, v in figures.items() if not isinstance(v, list)}
    environment.show(record | figures, arguments, shown)
    rows = [figures, *figures.get("rows", [])]
    is_wrong = any(
        (k.endswith("_equal") and not v) or (("that_differ" in k or k == "traceback") and v)
        for row in rows
        for k, v in row.items()
    )
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
