"""Simulated rollouts: the lengths of the responses, and each scheduler on the same requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reprise.rl.metrics.writer import Row, read_samples
from reprise.rl.runtime.user_files import is_user_name
from reprise.rl.simulation.config import SimulateRun, make_cluster
from reprise.rl.workers.schedulers import check_scheduler, make_scheduler
from reprise.sched.simulator.cluster import Record, Simulation
from reprise.sched.simulator.workloads import Workload, draw_lengths, make_requests

POLICIES_SETTING = "Simulate.policies"


def lengths_of_run(folder: str | Path, step: int, scale: float) -> np.ndarray:
    """Return the response tokens in a step of a run, times `scale`; int [groups, size].

    Raises ValueError if the run has no such step, or groups of several sizes.
    """
    groups: dict[str, list[int]] = {}
    for row in read_samples(folder):
        if row["step"] == step:
            length = max(1, round(scale * row["num_tokens"]))
            groups.setdefault(row["example_id"], []).append(length)
    if not groups:
        raise ValueError(
            f"expected samples of step {step} in {folder}, got none; fix: a run with "
            "Metrics.samples_per_step=-1, and a step that it has"
        )
    sizes = {len(lengths) for lengths in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"expected groups of one size, got sizes {sorted(sizes)}")
    return np.asarray(list(groups.values()), np.int64)


def rollout_of(config: SimulateRun, seed: int) -> tuple[Workload, np.ndarray]:
    """Return the rollout of a seed, with drawn lengths or the lengths of the configured run."""
    workload = config.workload
    simulate = config.simulate
    if simulate.trace is None:
        return workload, draw_lengths(workload, seed=seed)
    lengths = lengths_of_run(simulate.trace, simulate.trace_step, simulate.trace_scale)
    workload = dataclasses.replace(
        workload,
        num_groups=len(lengths),
        group_size=lengths.shape[1],
        mean_tokens=float(lengths.mean()),
        limit_tokens=int(max(lengths.max(), workload.limit_tokens)),
    )
    return workload, lengths


def play(config: SimulateRun) -> Iterator[tuple[Row, Record]]:
    """Yield (table row, record) of every policy on the rollout of every seed."""
    cluster = make_cluster(config)
    for name in filter(is_user_name, config.simulate.policies):
        check_scheduler(name, setting=POLICIES_SETTING)
    for seed in config.simulate.seeds:
        requests, by_number = make_requests(*rollout_of(config, seed), known=True)
        first: Record | None = None
        for name in config.simulate.policies:
            scheduler = make_scheduler(
                name,
                seed=seed,
                chunk_tokens=config.simulate.chunk_tokens,
                prefer_pool=cluster.instance.prefers_copy,
                ranks_per_instance=cluster.instance.num_ranks,
                setting=POLICIES_SETTING,
            )
            record = Simulation(scheduler, cluster, by_number, keep_samples=True).run(requests)
            first = first or record
            yield _row(name, seed, record, first), record


def _row(name: str, seed: int, record: Record, first: Record) -> Row:
    return {
        "policy": name,
        "seed": seed,
        "completion_s": record.completion_s,
        "speedup": first.completion_s / record.completion_s,
        "tokens_per_s": record.tokens_per_s,
        "tail_s": record.tail_s,
        "tail_reduction": 1 - record.tail_s / first.tail_s if first.tail_s else 0.0,
        "idle_fraction": record.idle_fraction,
        "preemptions": record.preemptions,
        "migrations": record.migrations,
        "prefilled_tokens": sum(w.prefilled_tokens for w in record.workers),
        "copied_tokens": sum(w.copied_tokens for w in record.workers),
    }
