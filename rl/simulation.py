"""What `python -m rl.simulate` is asked for, and what it finds: configuration and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rl.metrics import Row, read_samples
from sched.cost_model import ACCELERATORS, MODELS, Efficiency, Instance
from sched.policies import POLICIES, make_scheduler
from sched.simulator import Cluster, Record, Simulation
from sched.workloads import Workload, asks_for, draw_lengths, recorded


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The workers: `devices_per_worker` devices hold one replica of `model`."""

    device: str = "H100"
    model: str = "Qwen3-8B"
    workers: int = 8
    devices_per_worker: int = 1
    max_requests: int = 1024  # that run on a worker at once
    kv_tokens: int | None = None  # positions a worker holds; None: what fits beside the weights

    def __post_init__(self) -> None:
        for what, name, known in (
            ("device", self.device, ACCELERATORS),
            ("model", self.model, MODELS),
        ):
            if name not in known:
                raise ValueError(f"expected a {what} of {', '.join(known)}, got {name!r}")
        if min(self.workers, self.devices_per_worker, self.max_requests) < 1:
            raise ValueError("expected at least one worker, one device of it and one request")


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
    """Which policies play the same rollouts, one for each seed; the first is compared with.

    `trace` is the folder of a training run: lengths are those of its step `trace_step`, times
    `trace_scale`, instead of drawn ones.
    """

    policies: tuple[str, ...] = POLICIES
    chunk_tokens: int = 8192
    seeds: tuple[int, ...] = (0,)
    trace: str | None = None
    trace_step: int = 1
    trace_scale: float = 1.0
    directory: str | None = None  # None: runs/simulate-NAME_OF_CONFIG

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies or not self.seeds:
            raise ValueError(
                f"expected policies of {', '.join(POLICIES)} and a seed, got {self.policies}, "
                f"{self.seeds}"
            )


@dataclasses.dataclass(frozen=True)
class SimulateRun:
    """A simulation: who plays, on what, and how long the responses are."""

    simulate: SimulateConfig = dataclasses.field(default_factory=SimulateConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    workload: Workload = dataclasses.field(
        default_factory=lambda: Workload(256, 8, mean_tokens=4000, limit_tokens=16384)
    )
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        kv_tokens = make_cluster(self).kv_tokens_per_worker
        needed = self.workload.prompt_tokens + self.workload.limit_tokens
        if kv_tokens < needed:
            raise ValueError(
                f"a worker holds {max(kv_tokens, 0):,} positions beside the weights, a request may "
                f"take {needed:,}; mend: more Cluster.devices_per_worker, or a lower "
                "Workload.limit_tokens"
            )


def make_cluster(config: SimulateRun) -> Cluster:
    """The workers that a configuration asks for."""
    asked = config.cluster
    instance = Instance(
        ACCELERATORS[asked.device],
        MODELS[asked.model],
        asked.devices_per_worker,
        config.efficiency,
    )
    return Cluster(instance, asked.workers, asked.max_requests, asked.kv_tokens)


def lengths_of_run(folder: str | Path, step: int, scale: float) -> np.ndarray:
    """Tokens of the responses of a run's step, times `scale`; int [groups, group size].

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
    return recorded(list(groups.values()))


def play(config: SimulateRun) -> Iterator[tuple[Row, Record]]:
    """Every policy on the rollout of every seed: (row of the table, its record)."""
    cluster, asked = make_cluster(config), config.simulate
    for seed in asked.seeds:
        workload, lengths = config.workload, draw_lengths(config.workload, seed=seed)
        if asked.trace is not None:
            lengths = lengths_of_run(asked.trace, asked.trace_step, asked.trace_scale)
            workload = dataclasses.replace(
                workload,
                num_groups=len(lengths),
                group_size=lengths.shape[1],
                mean_tokens=float(lengths.mean()),
                limit_tokens=int(max(lengths.max(), workload.limit_tokens)),
            )
        first: Record | None = None
        asks, by_number = asks_for(workload, lengths, known=True)
        for name in asked.policies:
            scheduler = make_scheduler(
                name,
                seed=seed,
                chunk_tokens=asked.chunk_tokens,
                prefer_pool=cluster.instance.prefers_copy,
            )
            record = Simulation(scheduler, cluster, by_number, keep_samples=True).run(asks)
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
    """Rows as aligned text: what a terminal shows."""
    columns = (
        ("policy", "policy", "{}"),
        ("seed", "seed", "{}"),
        ("completion_s", "seconds", "{:,.0f}"),
        ("speedup", "speedup", "{:.2f}×"),
        ("tokens_per_s", "tokens/s", "{:,.0f}"),
        ("tail_s", "tail s", "{:,.0f}"),
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
