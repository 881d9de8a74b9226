"""The simulator's speed and memory: `python -m benchmarks.simulator --json`

One simulated rollout under Seer's scheduler, on one core; drawing lengths is not timed. `long` is
6,400 requests of up to 98,304 tokens on 8 workers, `million` 1,000,000 requests on 4,096 workers.
Peak memory is the whole process's.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

from benchmarks import environment
from sched.simulator.cluster import Cluster, play_policy
from sched.simulator.roofline import ACCELERATORS, MODELS, Instance
from sched.simulator.workloads import Workload, draw_lengths, make_requests

PACKAGES = ("numpy",)
CASES = {
    "long": (
        Workload(800, 8, 38959, 98304, group_share=0.95),
        Cluster(Instance(ACCELERATORS["H800"], MODELS["Qwen3-8B"], 8), 8),
    ),
    "million": (
        Workload(125_000, 8, 8000, 32768, group_share=0.95),
        Cluster(Instance(ACCELERATORS["H800"], MODELS["Qwen3-8B"]), 4096),
    ),
}


def measure(case: str, repeats: int) -> dict[str, Any]:
    """Return the seconds of each repeat, and figures of the simulated rollout."""
    workload, cluster = CASES[case]
    requests, lengths = make_requests(workload, draw_lengths(workload, seed=0))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        record = play_policy(cluster, "seer", 0, requests, lengths)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "case": case,
        "requests": len(requests),
        "workers": cluster.num_workers,
        "limit_tokens": workload.limit_tokens,
        "seconds": round(sorted(seconds)[len(seconds) // 2], 2),
        "seconds_all": [round(s, 2) for s in seconds],
        "peak_gib": round(peak / 2**30 * (1 if sys.platform == "darwin" else 1024), 2),
        "simulated_s": round(record.completion_s, 1),
        "simulated_tokens": record.tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="long", help="what is simulated")
    parser.add_argument("--repeats", type=int, default=1, help="rollouts; the median counts")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    figures = measure(arguments.case, arguments.repeats)
    record = environment.record("benchmarks.simulator", PACKAGES)
    result = {"benchmark": "simulator", **figures, **record}
    environment.show(result, arguments, figures | {"device": record["device"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
