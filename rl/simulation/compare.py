"""Every policy on the same simulated rollouts, as rows of a table (`python -m rl.simulate`)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.metrics.writer import Row, read_samples
from rl.simulation.config import SimulateRun, make_cluster
from sched.policies.registry import make_scheduler
from sched.request import RequestSpec
from sched.simulator.cluster import Record, Simulation
from sched.simulator.worker import RoundModel
from sched.simulator.workloads import Workload, draw_lengths, make_requests


def lengths_of_run(folder: str | Path, step: int, scale: float) -> np.ndarray:
    """Return the tokens of the responses of a run's step, times `scale`; int [groups, size].

    Raises ValueError where the run has no such step, or groups of several sizes.
    """
    rows = [row for row in read_samples(folder) if row["step"] == step]
    if not rows:
        raise ValueError(
            f"expected samples of step {step} in {folder}, got none; mend: a run with "
            "Metrics.samples_per_step=-1, and a step that it has"
        )
    groups: dict[str, list[int]] = {}
    for row in rows:
        length = max(1, round(scale * row["num_tokens"]))
        groups.setdefault(row["example_id"], []).append(length)
    sizes = {len(lengths) for lengths in groups.values()}
    if len(sizes) != 1:
        raise ValueError(f"expected groups of one size, got sizes {sorted(sizes)}")
    return np.asarray(list(groups.values()), np.int64)


def rollout_of(config: SimulateRun, seed: int) -> tuple[Workload, np.ndarray]:
    """Return a seed's rollout: drawn lengths, or those of the run that is named."""
    workload, simulate = config.workload, config.simulate
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


def play_policy(
    config: SimulateRun,
    name: str,
    seed: int,
    requests: Sequence[RequestSpec],
    lengths: Mapping[int, int],
    round_model: RoundModel | None = None,
    *,
    keep_samples: bool = False,
) -> Record:
    """Play one policy on one rollout; `round_model`: rounds with drafts; None: plain rounds."""
    cluster = make_cluster(config)
    scheduler = make_scheduler(
        name,
        seed=seed,
        chunk_tokens=config.simulate.chunk_tokens,
        prefer_pool=cluster.instance.prefers_copy,
        ranks_per_instance=config.simulated_cluster.ranks_per_instance,
    )
    simulation = Simulation(
        scheduler, cluster, lengths, round_model=round_model, keep_samples=keep_samples
    )
    return simulation.run(requests)


def play(config: SimulateRun) -> Iterator[tuple[Row, Record]]:
    """Yield (row of the table, its record) of every policy on the rollout of every seed."""
    for seed in config.simulate.seeds:
        requests, by_number = make_requests(*rollout_of(config, seed), known=True)
        first: Record | None = None
        for name in config.simulate.policies:
            record = play_policy(config, name, seed, requests, by_number, keep_samples=True)
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


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the rows as aligned text for a terminal."""
    columns = (
        ("policy", "policy", "{}"),
        ("seed", "seed", "{}"),
        ("completion_s", "seconds", "{:,.1f}"),
        ("speedup", "speedup", "{:.2f}×"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
        ("tail_s", "tail s", "{:,.1f}"),
        ("idle_fraction", "idle", "{:.0%}"),
        ("preemptions", "pre-empted", "{:,}"),
        ("migrations", "migrated", "{:,}"),
    )
    lines = [[title for _, title, _ in columns]]
    lines += [[form.format(row[key]) for key, _, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that say what the table shows: medians over seeds, and Seer's trade."""
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    (first, mine), *_ = by_policy.items()
    lines = [f"over {first}, medians of {len(mine)} seeds; tail: only the last tenth still runs"]
    for name, of in by_policy.items():
        speedup = statistics.median(row["speedup"] for row in of)
        cut = statistics.median(row["tail_reduction"] for row in of)
        lines.append(f"  {name}: {speedup:.2f}× as fast, tail shorter by {cut:.0%}")
    if {"divided_fifo", "seer"} <= by_policy.keys():
        pairs = list(zip(by_policy["divided_fifo"], by_policy["seer"], strict=True))
        slower = sum(seer["completion_s"] > fifo["completion_s"] for fifo, seer in pairs)
        shorter = sum(seer["tail_s"] < fifo["tail_s"] for fifo, seer in pairs)
        lines.append(
            f"  seer ends after divided_fifo in {slower} of {len(pairs)} seeds, its tail is "
            f"shorter in {shorter}: probes cost it time, and long requests begin sooner"
        )
    return lines
