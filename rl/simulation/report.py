"""The report of a simulation: a table, a summary, and a figure of requests by worker and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reprise.rl.reports.style import STYLE
from reprise.rl.runtime.progress import aligned
from reprise.sched.simulator.cluster import Record, WorkerSample

COLUMNS = 400  # time bins of the figure
MAX_WORKERS = 64  # in a panel of the figure


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
