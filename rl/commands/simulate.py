"""`python -m rl.simulate`: the rollout of a cluster under several schedulers, on a virtual clock.

Real runs use the same schedulers; seconds come from a roofline or from the measurements of a run,
so all results are simulated. Writes `results.json` and `figure.png`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from reprise.models.folder import replace_file
from reprise.rl.gin.command_line import config_parser, parse_command_line
from reprise.rl.gin.loader import load
from reprise.rl.metrics.writer import Row, read_samples
from reprise.rl.reports.style import STYLE
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import aligned, say
from reprise.rl.runtime.user_files import UserName, is_user_name
from reprise.rl.warm_up.measured_run import read_profile
from reprise.rl.workers.schedulers import check_scheduler, make_scheduler
from reprise.sched.policies.divided import POLICIES
from reprise.sched.simulator.cluster import Cluster, Record, Simulation, WorkerSample
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from reprise.sched.simulator.workloads import Workload, draw_lengths, make_requests

if TYPE_CHECKING:
    Device: TypeAlias = str
    Model: TypeAlias = str
    Policy: TypeAlias = str
else:  # names in tables, known only at run time
    Device = Literal[tuple(ACCELERATORS)]
    Model = Literal[tuple(MODELS)]
    Policy = Literal[POLICIES]

POLICIES_SETTING = "Simulate.policies"
COLUMNS = 400  # time bins of the figure
MAX_WORKERS = 64  # in a panel of the figure


# --- configuration ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SimulatedClusterConfig:
    """The workers of a simulated cluster, and the model that each holds."""

    profile: str | None = None
    """The folder of a training run with several workers and the budget `goodput`: workers are as
    fast as the engine of that run measured, and `device` and `model` do not count."""
    device: Device = "H100"
    """The device of the roofline."""
    model: Model = "Qwen3-8B"
    """The model of the roofline."""
    workers: int = 8
    """The number of workers."""
    devices_per_worker: int = 1
    """Devices that hold one copy of `model`."""
    ranks_per_instance: int = 1
    """Above 1, a worker is a rank with separate requests and cache, and this number of consecutive
    workers share the experts of a copy."""
    max_requests: int = 1024
    """Requests that run concurrently on a worker."""
    kv_tokens: int | None = None
    """Cache positions of a worker; None: the most that fit with the weights."""

    def __post_init__(self) -> None:
        if min(self.workers, self.devices_per_worker, self.max_requests) < 1:
            raise ValueError("expected at least one worker, one device of it and one request")
        if self.ranks_per_instance < 1 or self.workers % self.ranks_per_instance:
            raise ValueError(
                "expected workers in whole instances of ranks_per_instance, got "
                f"{self.workers} and {self.ranks_per_instance}"
            )


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
    """The schedulers, compared with the first on the same rollouts, one rollout per seed."""

    policies: tuple[Policy | UserName, ...] = POLICIES
    """`group_fifo`, `divided_fifo`, `seer`, `oracle` (which knows all lengths), or a scheduler of
    yours, `PATH.py:NAME`."""
    chunk_tokens: int = 8192
    """Tokens that a request generates before the scheduler may move it."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of the rollouts."""
    trace: str | None = None
    """The folder of a training run, whose lengths replace drawn lengths."""
    trace_step: int = 1
    """The step of the trace."""
    trace_scale: float = 1.0
    """A factor of the lengths of the trace."""
    directory: str | None = None
    """The output folder. None: runs/simulate-NAME_OF_CONFIG."""

    def __post_init__(self) -> None:
        if not self.policies or not self.seeds:
            raise ValueError(f"expected a policy and a seed, got {self.policies}, {self.seeds}")


@dataclasses.dataclass(frozen=True)
class SimulateRun:
    """A simulation: policies, hardware and response lengths."""

    simulate: SimulateConfig = dataclasses.field(default_factory=SimulateConfig)
    simulated_cluster: SimulatedClusterConfig = dataclasses.field(
        default_factory=SimulatedClusterConfig
    )
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
                f"take {needed:,}; fix: more SimulatedCluster.devices_per_worker, or a lower "
                "Workload.limit_tokens"
            )


def make_cluster(config: SimulateRun) -> Cluster:
    """Return the workers that a configuration describes."""
    cluster = config.simulated_cluster
    if cluster.profile is not None:
        costs = read_profile(Path(cluster.profile))
        return Cluster(costs, cluster.workers, cluster.max_requests, cluster.kv_tokens)
    instance = Instance(
        device=ACCELERATORS[cluster.device],
        model=MODELS[cluster.model],
        num_devices=cluster.devices_per_worker,
        efficiency=config.efficiency,
        num_ranks=cluster.ranks_per_instance,
    )
    return Cluster(instance, cluster.workers, cluster.max_requests, cluster.kv_tokens)


# --- rollouts ---------------------------------------------------------------------------


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


# --- reports ----------------------------------------------------------------------------


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
    return "\n".join(aligned(lines))


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a summary of the table: medians over seeds, and Seer's trade-off."""
    by_policy: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    (first, first_rows), *_ = by_policy.items()
    seeds = len(first_rows)
    lines = [f"over {first}, medians of {seeds} seeds; tail: only the last tenth still runs"]
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


def figure(records: Mapping[str, Record], path: Path, title: str) -> None:
    """Draw a panel of running requests by worker for each policy, and a panel of held positions.

    A dashed line marks the start of the tail, a solid line the end.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    until_s = max(record.completion_s for record in records.values())
    grids = {name: grid(record, until_s) for name, record in records.items()}
    max_running = max(running.max() for running, _ in grids.values())
    with rc_context(STYLE):
        picture = Figure(figsize=(10, 1.6 * len(grids) + 2.2), layout="constrained")
        axes = picture.subplots(len(grids) + 1, sharex=True)
        for axis, (name, (running, _)) in zip(axes, grids.items(), strict=False):
            extent = 0, until_s, min(len(running), MAX_WORKERS) - 0.5, -0.5
            look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "Blues"}
            look |= {"extent": extent, "vmin": 0, "vmax": max_running}
            shades = axis.imshow(running[:MAX_WORKERS], **look)
            done_s = records[name].completion_s
            tail_s = records[name].tail_s
            axis.axvline(done_s, color="#222222", linewidth=1.5)
            axis.axvline(done_s - tail_s, color="#222222", linewidth=1, linestyle="--")
            tail = f"the last tenth of the requests (from the dashed line) {tail_s:,.0f} s"
            axis.set_title(f"{name}: {done_s:,.0f} s, of which {tail}", fontsize="medium")
            axis.set_ylabel("worker")
            axis.grid(visible=False)
        times = np.linspace(0, until_s, COLUMNS)
        for name, (_, positions) in grids.items():
            axes[-1].plot(times, positions.sum(axis=0) / 1e6, label=name)
        axes[-1].set_ylabel("positions held, millions")
        axes[-1].set_xlabel("simulated seconds")
        axes[-1].set_xlim(0, 1.02 * until_s)  # the last line is not on the frame
        axes[-1].legend(loc="upper right")
        picture.suptitle(title)
        bar = picture.colorbar(shades, ax=list(axes), shrink=0.5, pad=0.01)
        bar.set_label("running requests")
        picture.savefig(path)


def grid(record: Record, until_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (running requests, positions held) by worker and time; float [workers, COLUMNS]."""
    times = np.linspace(0, until_s, COLUMNS)
    running, positions = np.zeros((2, len(record.workers), COLUMNS))
    by_worker: dict[int, list[WorkerSample]] = {}
    for sample in record.samples:
        by_worker.setdefault(sample.worker_id, []).append(sample)
    for worker_id, samples in by_worker.items():
        at = np.searchsorted([s.begin_s for s in samples], times, side="right") - 1
        running[worker_id] = np.where(at >= 0, [samples[max(i, 0)].num_running for i in at], 0)
        positions[worker_id] = positions_at(samples, times)
    return running, positions


def positions_at(samples: Sequence[WorkerSample], times: np.ndarray) -> np.ndarray:
    """Return the positions of a worker, interpolated from each sample to the next reached value."""
    knots = np.repeat([s.begin_s for s in samples], 2)
    values = np.array([x for s in samples for x in (s.reached_positions, s.positions)])
    return np.interp(times, knots, values, left=0.0)


# --- the command ------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Parse the command line, simulate and report; return the exit code."""
    parser = config_parser("simulate", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args, overrides = parse_command_line(parser, argv, SimulateRun)
    try:
        config = load(SimulateRun, args.gin_file, overrides)
        name = Path(args.gin_file[-1]).stem if args.gin_file else "default"
        return _report(config, name, as_json=args.json)
    except (ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE


def _report(config: SimulateRun, name: str, *, as_json: bool) -> int:
    folder = Path(config.simulate.directory or Path("runs") / f"simulate-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    played = list(play(config))
    rows = [row for row, _ in played]
    result = {"simulated": True, "rows": rows}
    replace_file(folder / "results.json", json.dumps(result, indent=1) + "\n")
    last = played[-len(config.simulate.policies) :]
    seed = config.simulate.seeds[-1]
    cluster = config.simulated_cluster
    hardware = cluster.profile or f"{cluster.model} on {cluster.device}, by a roofline"
    title = f"Simulated: {hardware}; {cluster.workers} workers, seed {seed}"
    figure({row["policy"]: record for row, record in last}, folder / "figure.png", title)
    if as_json:
        say(json.dumps(result))
    else:
        say("\n".join([table(rows), "", *remarks(rows)]))
        say(f"simulated; {folder / 'results.json'}; seed {seed} in {folder / 'figure.png'}")
    return 0
