"""`python -m rl.report RUN...`: what happened in one or several runs, as PNG and one HTML page.

Reads metrics.jsonl and samples.jsonl of each run folder, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.metrics import METRICS_FILE, Row, read_metrics, read_samples, spread

OVERVIEW_FILE = "report.png"
PAGE_FILE = "index.html"


class ReportError(ValueError):
    """A run that cannot be reported on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, read: rows by ascending step, samples in the order written."""

    label: str
    rows: list[Row]
    samples: list[Row]

    @property
    def steps(self) -> np.ndarray:
        """float64 [rows]."""
        return np.array([row["step"] for row in self.rows], dtype=float)

    def series(self, metric: str) -> np.ndarray:
        """float64 [rows]; nan where a row lacks the metric or holds null."""
        return np.array([_float(row.get(metric)) for row in self.rows], dtype=float)

    def has(self, metric: str) -> bool:
        return bool(np.isfinite(self.series(metric)).any())

    def time_sections(self) -> list[str]:
        """The `time/*` metrics, in the order of a step."""
        names = {name for row in self.rows for name in row if name.startswith("time/")}
        return sorted(names, key=lambda name: (_STEP_ORDER.get(name, len(_STEP_ORDER)), name))


_STEP_ORDER = {
    f"time/{part}": place
    for place, part in enumerate(("rollout", "reward", "score", "update", "checkpoint"))
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """One line of the page's table: a metric of a run, first, last and best."""

    metric: str
    label: str
    first: float
    last: float
    best: float | None  # None where neither high nor low is good in itself
    best_step: int | None
    low: float
    high: float


# Metrics of the table, and which end of their range is the good one.
_DIRECTIONS: dict[str, Literal["max", "min", ""]] = {
    "reward": "max",
    "reward_std": "",
    "frac_reward_zero_std": "min",
    "completions/mean_length": "",
    "completions/clipped_ratio": "min",
    "entropy": "",
    "kl": "",
    "clip_ratio/region_mean": "",
    "grad_norm": "",
    "sampling/sampling_logp_difference/max": "min",
    "perf/throughput": "max",
    "step_time": "min",
    "num_tokens": "",
}


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs behind run folders (or metrics.jsonl files).

    Raises ReportError for a folder without metrics, or with no row yet.
    """
    folders = [Path(path).parent if Path(path).is_file() else Path(path) for path in paths]
    runs = []
    for folder, label in zip(folders, run_labels(folders), strict=True):
        if not (folder / METRICS_FILE).is_file():
            raise ReportError(
                f"{folder}: no {METRICS_FILE} here; give the folder of a run (Run.directory)"
            )
        rows = {row["step"]: row for row in read_metrics(folder)}  # of one step the last counts
        if not rows:
            raise ReportError(f"{folder / METRICS_FILE} has no rows yet: no step has finished")
        runs.append(Run(label, [rows[step] for step in sorted(rows)], read_samples(folder)))
    return runs


def run_labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(p[-length:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{folder.resolve().name} #{number}" for number, folder in enumerate(folders, 1)]


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """First, last and best of each metric and run, metrics in a fixed order, runs within."""
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
            place = None if best is None else int(best(kept))
            lines.append(
                Summary(
                    metric=metric,
                    label=run.label,
                    first=float(kept[0]),
                    last=float(kept[-1]),
                    best=None if place is None else float(kept[place]),
                    best_step=None if place is None else int(run.steps[finite[place]]),
                    low=float(kept.min()),
                    high=float(kept.max()),
                )
            )
    return lines


def pick_samples(samples: Sequence[Row], wanted: int) -> list[Row]:
    """At most `wanted` samples, evenly spread, the last one among them; -1 is all."""
    total = len(samples)
    return [samples[total - 1 - index] for index in reversed(spread(total, wanted))]


def write_report(
    runs: Sequence[Run], output: Path, *, smooth_steps: int | None = None, max_samples: int = 60
) -> list[Path]:
    """Writes the overview PNG, one PNG a panel, and the page; returns their paths, page first.

    Raises ReportError where the runs hold nothing that can be drawn.
    """
    from rl import report_page, report_plots

    images = report_plots.draw(runs, smooth_steps)
    if not images:
        raise ReportError(f"{', '.join(run.label for run in runs)}: no metric that can be drawn")
    output.mkdir(parents=True, exist_ok=True)
    written = [output / PAGE_FILE]
    for name, png in images.items():
        (output / name).write_bytes(png)
        written.append(output / name)
    page = report_page.page(
        title=", ".join(run.label for run in runs),
        runs=[(run.label, len(run.rows), int(run.steps[-1])) for run in runs],
        images=[(name, png) for name, png in images.items() if name != OVERVIEW_FILE],
        summaries=summarize(runs),
        samples=[
            (run.label, row) for run in runs for row in pick_samples(run.samples, max_samples)
        ],
    )
    # A model may emit half a surrogate pair, which UTF-8 does not have.
    written[0].write_text(page, encoding="utf-8", errors="replace")
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0, or 2 with a message where there is nothing to report."""
    parser = argparse.ArgumentParser(prog="python -m rl.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are overlaid")
    parser.add_argument("--output", metavar="DIR", help="default: report/ in the first run folder")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="STEPS",
        help="draw the mean of so many steps over the raw values; 1 is off; default: by length",
    )
    parser.add_argument(
        "--samples", type=int, default=60, metavar="N", help="samples a run on the page; -1: all"
    )
    arguments = parser.parse_args(argv)
    if arguments.smooth is not None and arguments.smooth < 1:
        parser.error(f"--smooth {arguments.smooth}: expected at least 1 step")
    first = Path(arguments.runs[0])
    default = (first.parent if first.is_file() else first) / "report"
    try:
        written = write_report(
            load_runs(arguments.runs),
            Path(arguments.output) if arguments.output else default,
            smooth_steps=arguments.smooth,
            max_samples=arguments.samples,
        )
    except (OSError, ValueError) as error:
        print(f"rl.report: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def _is_reward_mean(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


if __name__ == "__main__":
    raise SystemExit(main())
