"""The runs of a report: metrics as columns, and a summary of each run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reprise.rl.metrics.writer import Row, read_metrics, read_samples, step_rows
from reprise.rl.records.stats import RoundRecord, load_timeline
from reprise.rl.records.worker_record import WorkerStep, read_workers
from reprise.rl.reports.style import number
from reprise.rl.runtime.run_files import EVAL_SAMPLES_FILE, METRICS_FILE, SAMPLES_FILE

MAX_DRAWN = 1e100  # of a metric: matplotlib adds and squares values for its axes
TIME_PARTS = [f"time/{part}" for part in ("rollout", "reward", "score", "update", "checkpoint")]
# Metrics of the summary. With + the highest value is best, with - the lowest.
SUMMARIZED = (
    *("reward_std", "-rewards/failures", "-frac_reward_zero_std", "completions/mean_length"),
    *("-completions/clipped_ratio", "entropy", "kl", "clip_ratio/region_mean", "grad_norm"),
    *("-sampling/sampling_logp_difference/max", "+spec/tokens_per_round", "+spec/accept_rate"),
    *("+spec/speculated_fraction", "+spec/accepted_tokens", "+spec/seconds_saved"),
    *("-spec/host_share", "+perf/throughput", "-step_time", "eval_s", "num_tokens"),
)


class ReportError(ValueError):
    """A report on this run is impossible; the message says why."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of a run folder: rows by ascending step, samples in the order written.

    `evals` are the rows with an evaluation. The evaluation before training is not among `rows`.
    """

    label: str
    rows: list[Row]
    samples: list[Row]
    evals: Sequence[Row] = ()
    eval_samples: Sequence[Row] = ()
    timeline: Sequence[RoundRecord] = ()  # of the rollout of `timeline_step`
    timeline_step: int = 0
    workers: Sequence[WorkerStep] = ()
    warnings: Sequence[str] = ()

    @property
    def steps(self) -> np.ndarray:
        """The step of each row; float64 [rows]."""
        return self.series("step")

    def series(self, metric: str) -> np.ndarray:
        """Return a metric, float64 [rows]; nan if a row lacks the metric or holds null."""
        return _series(self.rows, metric)

    def eval_series(self, metric: str) -> np.ndarray:
        """Return a metric, float64 [evals]; nan if an evaluation lacks the metric."""
        return _series(self.evals, metric)

    def has(self, metric: str) -> bool:
        return bool(np.isfinite(self.series(metric)).any())

    def time_sections(self) -> list[str]:
        """Return the `time/*` metrics in the order of a step."""
        names = sorted({name for row in self.rows for name in row if name.startswith("time/")})
        known = [name for name in TIME_PARTS if name in names]
        return known + [name for name in names if name not in known]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Load the runs of run folders (or metrics.jsonl files).

    Raises ReportError for a folder without metrics, or without rows.
    """
    folders = [Path(path).parent if Path(path).is_file() else Path(path) for path in paths]
    return [_load(*each) for each in zip(folders, run_labels(folders), strict=True)]


def _load(folder: Path, label: str) -> Run:
    if not (folder / METRICS_FILE).is_file():
        raise ReportError(
            f"{folder}: no {METRICS_FILE} here; give the folder of a run (Run.directory)"
        )
    torn = list[str]()
    # keep the last row of each step
    by_step = {row["step"]: row for row in read_metrics(folder, torn.append)}
    ordered = [by_step[step] for step in sorted(by_step)]
    rows = step_rows(ordered)
    if not rows:
        raise ReportError(f"{folder / METRICS_FILE} has no rows yet: no step has finished")
    try:
        step, timeline = load_timeline(folder)
        workers = read_workers(folder)
    except ValueError as error:
        raise ReportError(str(error)) from error
    evals = [row for row in ordered if "eval_s" in row]
    samples, eval_samples = (
        read_samples(folder, name, torn.append) for name in (SAMPLES_FILE, EVAL_SAMPLES_FILE)
    )
    warnings = [f"{line}: it is left out" for line in torn]
    return Run(label, rows, samples, evals, eval_samples, timeline, step, workers, warnings)


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the runs."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(p[-length:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{folder.resolve().name} #{number}" for number, folder in enumerate(folders, 1)]


def summary_table(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row per metric (in a fixed order) and run, with first, last and best values."""
    names = {name for run in runs for row in run.rows for name in row}
    rewards = sorted(n for n in names if n.startswith("rewards/") and n.endswith("/mean"))
    table = []
    wanted = [*(f"+{name}" for name in ("reward", *rewards)), *SUMMARIZED]
    for name, run in itertools.product(wanted, runs):
        metric = name.lstrip("+-")
        values = run.series(metric)
        finite = np.isfinite(values)
        if not finite.any():
            continue
        known = values[finite]
        steps = run.steps[finite]
        best = None
        if name != metric:
            best = np.argmax(known if name[0] == "+" else -known)
        row = {
            "metric": metric,
            "run": run.label,
            "first": number(known[0]),
            "last": number(known[-1]),
            "best": "" if best is None else f"{number(known[best])} (step {int(steps[best])})",
            "lowest": number(known.min()),
            "highest": number(known.max()),
        }
        table.append(row)
    return table


def _series(rows: Sequence[Row], metric: str) -> np.ndarray:
    values = [row.get(metric) for row in rows]
    drawn = [isinstance(x, (int, float)) and abs(x) < MAX_DRAWN for x in values]
    return np.array([x if ok else np.nan for x, ok in zip(values, drawn, strict=True)], float)
