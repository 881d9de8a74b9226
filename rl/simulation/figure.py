"""A picture of a simulated rollout: running requests and memory over time, by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rl.reports.style import STYLE
from sched.simulator.cluster import Record, WorkerSample

COLUMNS = 400  # of time bins
MOST_WORKERS = 64  # in a panel


def figure(records: Mapping[str, Record], path: Path, title: str) -> None:
    """Draw a panel for each policy, running requests by worker, and one of all positions held.

    A dashed line marks where the last tenth of the requests is left, a solid one the end.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    until_s = max(record.completion_s for record in records.values())
    grids = {name: grid(record, until_s) for name, record in records.items()}
    most = max(running.max() for running, _ in grids.values())
    with plt.rc_context(STYLE):
        picture, axes = plt.subplots(
            len(grids) + 1, 1, figsize=(10, 1.6 * len(grids) + 2.2), sharex=True
        )
        for axis, (name, (running, _)) in zip(axes, grids.items(), strict=False):
            shades = axis.imshow(
                running[:MOST_WORKERS],
                aspect="auto",
                interpolation="nearest",
                extent=(0, until_s, min(len(running), MOST_WORKERS) - 0.5, -0.5),
                vmin=0,
                vmax=most,
                cmap="Blues",
            )
            done_s = records[name].completion_s
            tail_s = records[name].tail_s
            axis.axvline(done_s, color="#222222", linewidth=1.5)
            axis.axvline(done_s - tail_s, color="#222222", linewidth=1, linestyle="--")
            axis.set_title(
                f"{name}: {done_s:,.0f} s, of which the last tenth of the requests (from the "
                f"dashed line) {tail_s:,.0f} s",
                fontsize="medium",
            )
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
        picture.tight_layout()
        bar = picture.colorbar(shades, ax=list(axes), shrink=0.5, pad=0.01)
        bar.set_label("running requests")
        picture.savefig(path)
        plt.close(picture)


def grid(record: Record, until_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (running requests, positions held) by worker and time; float [workers, COLUMNS]."""
    shape = (len(record.workers), COLUMNS)
    times = np.linspace(0, until_s, COLUMNS)
    running, positions = np.zeros(shape), np.zeros(shape)
    by_worker: dict[int, list] = {}
    for sample in record.samples:
        by_worker.setdefault(sample.worker_id, []).append(sample)
    for worker_id, samples in by_worker.items():
        begins = np.array([s.begin_s for s in samples])
        at = np.searchsorted(begins, times, side="right") - 1
        running[worker_id] = np.where(at >= 0, [samples[max(i, 0)].num_running for i in at], 0)
        positions[worker_id] = positions_at(samples, times)
    return running, positions


def positions_at(samples: Sequence[WorkerSample], times: np.ndarray) -> np.ndarray:
    """Return one worker's positions, on lines from what it held to what it next reached."""
    begins = [s.begin_s for s in samples]
    knots = np.repeat(begins, 2)
    values = np.array([x for s in samples for x in (s.reached_positions, s.positions)])
    return np.interp(times, knots, values, left=0.0)
