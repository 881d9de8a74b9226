"""Faults in real runs: `python -m benchmarks.soak FAULT --json --output benchmarks/results/FILE`

| fault | what happens | file |
|---|---|---|
| kill | kill −9 at random points of a run, which is then resumed | resume.json |
| kill_ahead | the same with two workers that prefetch the next step | resume_ahead.json |
| kill_drafting | the same with a worker that drafts for three others | resume_drafting.json |
| writes | a kill at every write of a run folder: copies are resumed | writes.json |
| full | a disk that is full from any write on: runs are resumed with room | full_disk.json |
| stop | SIGTERM in every part of a step, Ctrl-C during compilation | stops.json |
| lose | rollout workers on Ray are killed, and one is stopped | remote.json |
| processes | several processes of one run, resumed by fewer | processes.json |
| roles | memory of every program of a run on Ray over 300 steps | role_memory.json |
| pages | 20,000 random rollouts with few pages, on a device of hashes | page_soak.json |
| hostile | hostile configurations, folders and answers | hostile.json |
| server | hostile bodies and sequences of operations on a server | server_hostile.json |
| server_faults | kill −9 of servers, half of them on a full disk | server_faults.json |

Runs with a fault are compared with a run without it, bit by bit. The exit status is 1 if they
differ. `lose`, `processes`, `roles` and the servers need Linux (/proc). `--count` is of kills,
copies, steps, rollouts, bodies or servers, and of hostile cases of each class.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.soak import full_disk, inputs, memory, processes, runs, server, writes

FAULTS = {
    "kill": runs.kill,
    "kill_ahead": partial(runs.kill, settings=runs.AHEAD),
    "kill_drafting": partial(runs.kill, settings=runs.DRAFTING),
    "writes": writes.writes,
    "full": full_disk.full,
    "stop": runs.stop,
    "lose": processes.lose,
    "processes": processes.compare_processes,
    "roles": memory.roles,
    "pages": inputs.pages,
    "hostile": inputs.hostile,
    "server": server.fuzz,
    "server_faults": server.faults,
}
PACKAGES = (*environment.JAX, "optax", "orbax-checkpoint", "ray", "tensorstore", "transformers")
WRONG = ("traceback", "tracebacks", "failures", "outside_writes", "outside_reads", "executions")
WRONG += ("answers_of_other_statuses", "internal_errors", "lost_records")
WRONG += ("hangs", "over_30_s", "over_2_gb", "accepted_though_wrong")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    count = {} if arguments.count is None else {"count": arguments.count}
    with tempfile.TemporaryDirectory() as folder:
        return FAULTS[arguments.part](Path(folder), **count)


def is_wrong(row: dict[str, Any]) -> bool:
    return any(
        (k.endswith("_equal") and not v) or (("that_differ" in k or k in WRONG) and v)
        for k, v in row.items()
    )


if __name__ == "__main__":
    found = environment.run(__doc__, dict.fromkeys(FAULTS, measure), PACKAGES, count=int)
    sys.exit(int(any(map(is_wrong, [found, *found.get("rows", [])]))))
