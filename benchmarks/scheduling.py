"""Schedulers compared on real workers: `python -m benchmarks.scheduling --json`

The shipped policy runs on four workers of two virtual devices each, under every scheduler in turn,
with the same requests and noise. Workers share this machine's cores, so that time is counted in
rounds of each worker: a request ends at the rounds that its worker has run by then. Every rollout
is replayed on a virtual clock with its measured durations, and the decisions are compared. There
are two workloads: the shipped tasks, and responses whose lengths are drawn beforehand with a long
tail (end tokens are ignored there; the tokens are real). The tail lasts from the end of nine tenths
of the requests to the end of the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import environment
from benchmarks.simulator.replay import replay
from benchmarks.workloads import BASE_POLICY, group_requests, policy, questions
from rl.engine.config import EngineConfig
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats
from rl.trajectory import Request
from rl.workers.config import SchedConfig
from rl.workers.multi_engine import MultiEngine, make_engines
from sched.protocol import ChunkDone, Finished, Start
from sched.request import Kv
from sched.simulator.workloads import Workload, draw_lengths
from spec.config import SamplingConfig
from spec.sampling import step_key

PACKAGES = ("jax", "jaxlib", "numpy", "numba")
POLICIES = ("group_fifo", "divided_fifo", "seer")
GROUPS, GROUP_SIZE, WORKERS, LIMIT = 32, 8, 4, 256
ENGINE = EngineConfig(slots=16, min_slots=16, rounds_per_fetch=4)
CHUNK_TOKENS = 32
LENGTHS = Workload(GROUPS, GROUP_SIZE, mean_tokens=60, limit_tokens=LIMIT, group_share=0.9)


def drawn_lengths(requests: Sequence[Request], seed: int) -> list[Request]:
    """Return the requests with limits, so that each ends at a length drawn for it."""
    lengths = draw_lengths(LENGTHS, seed=seed)
    return [
        dataclasses.replace(r, max_new_tokens=int(lengths[r.group_id, r.sample_index]))
        for r in requests
    ]


def finish_rounds(workers: Sequence[EngineStats]) -> dict[int, int]:
    """Return, by request, the rounds that its worker had run when it ended."""
    ends: dict[int, tuple[float, int]] = {}
    for stats in workers:
        rounds = 0
        for record in stats.timeline:
            rounds += int(record.rounds_A.max())
            for request_id in record.request_ids_A.tolist():
                if request_id not in ends or record.fetched_s > ends[request_id][0]:
                    ends[request_id] = record.fetched_s, rounds
    return {request_id: rounds for request_id, (_, rounds) in ends.items()}


def figures(team: MultiEngine) -> dict[str, float]:
    """Return the measurements of a rollout in rounds, and counts of its decisions."""
    ends = sorted(finish_rounds([engine.stats for engine in team.engines]).values())
    busy = [sum(e.stats.rounds.values()) for e in team.engines]
    starts = [a for d in team.decisions for a in d.actions if isinstance(a, Start)]
    return {
        "makespan_rounds": ends[-1],
        "tail_rounds": ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1],
        "idle_fraction": 1 - sum(busy) / (len(busy) * ends[-1]),
        "chunks": sum(isinstance(d.event, ChunkDone) for d in team.decisions),
        "moved_chunks": sum(a.kv is Kv.POOL for a in starts),
        "finished": sum(isinstance(d.event, Finished) for d in team.decisions),
    }


def same_decisions(team: MultiEngine) -> int:
    """Return how many decisions a replay with the measured durations takes as well."""
    pairs = zip(replay(team.make_scheduler(), team.decisions), team.decisions, strict=False)
    return sum((a.event, a.actions) == (b.event, b.actions) for a, b in pairs)


def measure(repeats: int) -> dict[str, Any]:
    """Run every policy on both workloads, `repeats` times in turn; return medians."""
    model, params = policy(BASE_POLICY)
    requests = group_requests(questions(GROUPS), GROUP_SIZE)
    sampling = SamplingConfig(max_new_tokens=LIMIT)
    workloads = {"tasks": model.eos_token_ids, "drawn": ()}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    tokens: dict[tuple[str, int], dict[int, list[int]]] = {}
    config = SchedConfig(workers=WORKERS, devices_per_worker=2, chunk_tokens=CHUNK_TOKENS)
    engines = make_engines(model, ENGINE, config, dtype=params.final_norm_D.dtype)
    different = same = decisions = 0
    for repeat in range(repeats):
        for workload, stop in workloads.items():
            these = requests if workload == "tasks" else drawn_lengths(requests, repeat)
            for name in POLICIES:
                named = dataclasses.replace(config, policy=name)
                team = MultiEngine(engines, named, seed=repeat, keeps_decisions=True)
                spec = RolloutSpec(params, sampling, step_key(0, repeat), stop)
                done = team.run(spec, these)
                rows = found.setdefault(workload, {}).setdefault(name, [])
                rows.append(figures(team))
                same, decisions = same + same_decisions(team), decisions + len(team.decisions)
                mine = {t.request_id: t.response_ids.tolist() for t in done}
                first = tokens.setdefault((workload, repeat), mine)
                different += sum(mine[r] != first[r] for r in mine)
    medians = {
        workload: {
            name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for name, rows in policies.items()
        }
        for workload, policies in found.items()
    }
    return {
        "workloads": medians,
        "differing_responses": different,
        "decisions": decisions,
        "same_decisions_fraction": same / decisions,
        "repeats": repeats,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rollouts of each policy")
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    jax.config.update("jax_num_cpu_devices", 2 * WORKERS)
    found = measure(arguments.repeats)
    rows = found["workloads"]
    shown = {
        f"{workload}_{name}_{key}_reduction": round(
            1 - rows[workload][name][key] / rows[workload]["group_fifo"][key], 3
        )
        for workload in rows
        for name in POLICIES[1:]
        for key in ("makespan_rounds", "tail_rounds")
    }
    shown["differing_responses"] = found["differing_responses"]
    shown["same_decisions_fraction"] = found["same_decisions_fraction"]
    record = environment.record("benchmarks.scheduling", PACKAGES)
    environment.show({"benchmark": "scheduling", **shown, **found, **record}, arguments, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
