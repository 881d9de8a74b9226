"""The runs of a report: their metrics as columns, and a summary of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.engine.stats import RoundRecord, load_timeline
from rl.engine.worker_record import WorkerStep, read_workers
from rl.metrics.writer import Row, read_metrics, read_samples, step_rows
from rl.runtime.run_files import EVAL_SAMPLES_FILE, METRICS_FILE

MOST = 1e100  # of a metric that is drawn: matplotlib adds and squares values for its axes


class ReportError(ValueError):
    """A run that cannot be reported on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, read: rows by ascending step, samples in the order written.

    `evals` are the rows that hold an evaluation; that before training has no other metrics, and is
    not among `rows`.
    """

    label: str
    rows: list[Row]
    samples: list[Row]
    evals: Sequence[Row] = ()
    eval_samples: Sequence[Row] = ()
    timeline: Sequence[RoundRecord] = ()  # of the rollout of `timeline_step`
    timeline_step: int = 0
    workers: Sequence[WorkerStep] = ()

    @property
    def steps(self) -> np.ndarray:
        """float64 [rows]."""
        return np.array([row["step"] for row in self.rows], dtype=float)

    def series(self, metric: str) -> np.ndarray:
        """float64 [rows]; nan where a row lacks the metric or holds null."""
        return np.array([_float(row.get(metric)) for row in self.rows], dtype=float)

    @property
    def eval_steps(self) -> np.ndarray:
        """float64 [evals]."""
        return np.array([row["step"] for row in self.evals], dtype=float)

    def eval_series(self, metric: str) -> np.ndarray:
        """float64 [evals]; nan where an evaluation lacks the metric."""
        return np.array([_float(row.get(metric)) for row in self.evals], dtype=float)

    def has(self, metric: str) -> bool:
        return bool(np.isfinite(self.series(metric)).any())

    def time_sections(self) -> list[str]:
        """Return the `time/*` metrics in the order of a step."""
        names = {name for row in self.rows for name in row if name.startswith("time/")}
        return sorted(names, key=lambda name: (_STEP_ORDER.get(name, len(_STEP_ORDER)), name))


_STEP_ORDER = {
    f"time/{part}": number
    for number, part in enumerate(("rollout", "reward", "score", "update", "checkpoint"))
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """One line of the page's table: a metric of a run, first, last and best."""

    metric: str
    label: str
    first: float
    last: float
    best: float | None  # None where neither high nor low values are better
    best_step: int | None
    low: float
    high: float


# Metrics of the table, and the better end of their range.
_DIRECTIONS: dict[str, Literal["max", "min", ""]] = {
    "reward": "max",
    "reward_std": "",
    "rewards/failures": "min",
    "frac_reward_zero_std": "min",
    "completions/mean_length": "",
    "completions/clipped_ratio": "min",
    "entropy": "",
    "kl": "",
    "clip_ratio/region_mean": "",
    "grad_norm": "",
    "sampling/sampling_logp_difference/max": "min",
    "spec/tokens_per_round": "max",
    "spec/accept_rate": "max",
    "spec/speculated_fraction": "max",
    "spec/accepted_tokens": "max",
    "spec/seconds_saved": "max",
    "spec/host_share": "min",
    "perf/throughput": "max",
    "step_time": "min",
    "eval_s": "",
    "num_tokens": "",
}


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Load the runs of run folders (or metrics.jsonl files).

    Raises ReportError for a folder without metrics, or with no row yet.
    """
    folders = [Path(path).parent if Path(path).is_file() else Path(path) for path in paths]
    runs = []
    for folder, label in zip(folders, run_labels(folders), strict=True):
        if not (folder / METRICS_FILE).is_file():
            raise ReportError(
                f"{folder}: no {METRICS_FILE} here; give the folder of a run (Run.directory)"
            )
        rows = {row["step"]: row for row in read_metrics(folder)}  # the last row of a step counts
        if not step_rows(list(rows.values())):
            raise ReportError(f"{folder / METRICS_FILE} has no rows yet: no step has finished")
        try:
            step, timeline = load_timeline(folder)
            workers = read_workers(folder)
        except ValueError as error:
            raise ReportError(str(error)) from error
        ordered = [rows[s] for s in sorted(rows)]
        evals = [row for row in ordered if "eval_s" in row]
        asked = read_samples(folder, EVAL_SAMPLES_FILE)
        samples = read_samples(folder)
        rest = timeline, step, workers
        runs.append(Run(label, step_rows(ordered), samples, evals, asked, *rest))
    return runs


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(p[-length:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{folder.resolve().name} #{number}" for number, folder in enumerate(folders, 1)]


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """Return a line per metric, in a fixed order, and run."""
    rewards = sorted(
        {name for run in runs for row in run.rows for name in row if _is_reward_mean(name)}
    )
    directions = {"reward": "max", **dict.fromkeys(rewards, "max"), **_DIRECTIONS}
    lines = []
    for metric, direction in directions.items():
        for run in runs:
            values = run.series(metric)
            finite = np.flatnonzero(np.isfinite(values))
            if len(finite) == 0:
                continue
            kept = values[finite]
            best = {"max": np.argmax, "min": np.argmin}.get(direction)
            index = None if best is None else int(best(kept))
            lines.append(
                Summary(
                    metric=metric,
                    label=run.label,
                    first=float(kept[0]),
                    last=float(kept[-1]),
                    best=None if index is None else float(kept[index]),
                    best_step=None if index is None else int(run.steps[finite[index]]),
                    low=float(kept.min()),
                    high=float(kept.max()),
                )
            )
    return lines


def _is_reward_mean(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _float(value: Any) -> float:
    """Return a metric as a number; nan where it is none, or too large to draw."""
    drawn = isinstance(value, (int, float)) and abs(value) < MOST
    return float(value) if drawn else float("nan")
