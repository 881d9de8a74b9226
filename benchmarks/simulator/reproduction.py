"""Published figures beside simulated ones: `python -m benchmarks.simulator.reproduction --json`

Every experiment is played with ten seeds. One workload of each paper is calibrated: constants that
no paper gives were fitted to its rows, or to those of TLT's microbenchmark. All other workloads are
predicted.

    error of a speedup   |log(simulated) / log(published) − 1|: of the gain, not of 1 + gain
    error of a share     |simulated − published|, in points
    null                 one constant for each paper: the geometric mean of its calibrated
                         speedups, the median of its calibrated shares (0.5 if it has none)
    an ordering          `holds` if nine of ten seeds are on the published side of 1

A row is the median over seeds; `low` and `high` are the 10th and the 90th percentile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.simulator import rhymerl, seer, specactor, tlt
from benchmarks.simulator.experiment import Experiment, Figure

PAPERS: dict[str, Any] = {"rhymerl": rhymerl, "seer": seer, "specactor": specactor, "tlt": tlt}
EXPERIMENTS: dict[str, tuple[str, Experiment]] = {
    name: (paper, experiment)
    for paper, module in PAPERS.items()
    for name, experiment in module.EXPERIMENTS.items()
}
CALIBRATED, PREDICTED = "calibrated", "predicted"
Nulls = Mapping[tuple[str, str], float]  # by paper and kind of figure


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure beside the simulator's, over seeds, and the null model's."""

    paper: str
    figure: Figure
    simulated: float
    low: float
    high: float
    null: float

    @property
    def role(self) -> str:
        return CALIBRATED if self.figure.calibrated else PREDICTED

    @property
    def holds(self) -> bool | None:
        """Return whether an ordering holds; None for other figures."""
        return self.low > 1 if self.figure.kind == "order" else None

    def error(self, value: float) -> float:
        """Return the error of `value` against the published figure: a ratio, or points."""
        if self.figure.kind == "share":
            return 100 * abs(value - self.figure.published)
        return gain_error(value, self.figure.published)

    def as_json(self) -> dict[str, Any]:
        figure = self.figure
        row: dict[str, Any] = {"paper": self.paper, "workload": figure.workload, "row": figure.row}
        row |= {"role": self.role, "published": figure.published}
        names = ("simulated", "low", "high", "null")
        row |= {name: round(getattr(self, name), 4) for name in names}
        return row if self.holds is None else row | {"holds": self.holds}


def gain_error(value: float, published: float) -> float:
    """Return |log(value) / log(published) − 1|: 0 if equal, 1 if `value` is no gain."""
    return abs(math.log(value) / math.log(published) - 1)


def figures_of(name: str) -> list[Figure]:
    """Return the published figures of an experiment."""
    paper, experiment = EXPERIMENTS[name]
    return list(PAPERS[paper].figures(experiment))


def play(name: str, seed: int) -> dict[str, float]:
    """Return an experiment's simulated values."""
    paper, experiment = EXPERIMENTS[name]
    return dict(PAPERS[paper].play(experiment, seed))


def reproduce(names: Sequence[str], seeds: Sequence[int], *, processes: int = 1) -> Iterator[Row]:
    """Yield the rows of these experiments, each as soon as its seeds are played."""
    tasks = [(name, seed) for name in names for seed in seeds]
    nulls = null_model(
        (EXPERIMENTS[name][0], figure) for name in EXPERIMENTS for figure in figures_of(name)
    )
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        played = pool.map(play, *zip(*tasks, strict=True))
        for name in names:
            values = [next(played) for _ in seeds]
            yield from rows_of(EXPERIMENTS[name][0], figures_of(name), values, nulls)


def null_model(figures: Iterable[tuple[str, Figure]]) -> Nulls:
    """Return the null model's constants from (paper, figure) of all experiments."""
    published: dict[tuple[str, str], list[float]] = {}
    for paper, figure in figures:
        if figure.kind != "order" and figure.calibrated:
            published.setdefault((paper, figure.kind), []).append(figure.published)
    return {
        (paper, kind): statistics.median(v) if kind == "share" else statistics.geometric_mean(v)
        for (paper, kind), v in published.items()
    }


def rows_of(
    paper: str, figures: Iterable[Figure], seeds: Sequence[Mapping[str, float]], nulls: Nulls
) -> Iterator[Row]:
    """Yield the rows of these figures from the simulated values of each seed."""
    for figure in figures:
        values = [figure.of(found) for found in seeds]
        low, high = np.percentile(values, (10, 90)).tolist()
        null = nulls.get((paper, figure.kind), 0.5 if figure.kind == "share" else 1.0)
        yield Row(paper, figure, statistics.median(values), low, high, null)


def constants() -> dict[str, dict[str, str]]:
    """Return the constants that no paper gives: {paper, or `all papers`: {name: values}}."""
    found: dict[str, dict[str, set[str]]] = {}
    for paper, experiment in EXPERIMENTS.values():
        efficiency = vars(experiment.instance.efficiency).items()
        physical = {f"efficiency.{name}": value for name, value in efficiency}
        physical["workload.group_share"] = experiment.workload.group_share
        assumed = PAPERS[paper].assumed(experiment)
        for title, values in (("all papers", physical), (paper, assumed)):
            for name, value in values.items():
                found.setdefault(title, {}).setdefault(name, set()).add(f"{value:g}")
    return {
        title: {name: " / ".join(sorted(values)) for name, values in names.items()}
        for title, names in found.items()
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return median errors, of the simulator and of the null model, and orderings, by role."""
    out: dict[str, Any] = {}
    for role in (PREDICTED, CALIBRATED):
        mine = [row for row in rows if row.role == role]
        for kind, title in (("gain", "gain_error"), ("share", "share_error_points")):
            if of := [row for row in mine if row.figure.kind == kind]:
                errors = [[row.error(x) for x in (row.simulated, row.null)] for row in of]
                median, null = np.median(errors, axis=0).round(4).tolist()
                out |= {f"{role}_median_{title}": median, f"{role}_null_median_{title}": null}
                out[f"{role}_rows_{title}"] = len(of)
        if orders := [row for row in mine if row.holds is not None]:
            failed = [row for row in orders if not row.holds]
            names = [f"{row.paper} {row.figure.workload}: {row.figure.row}" for row in failed]
            out |= {f"{role}_orderings": len(orders), f"{role}_orderings_failed": names}
            out[f"{role}_orderings_held"] = len(orders) - len(failed)
    return out


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    start_s, rows, names = time.monotonic(), list[dict[str, Any]](), arguments.experiments
    found = []
    for row in reproduce(names, range(arguments.seeds), processes=arguments.processes):
        found.append(row)
        rows.append(row.as_json())
        environment.progress(rows[-1])
    wall_s = round(time.monotonic() - start_s, 1)
    return {**summary(found), "wall_s": wall_s, "rows": rows, "constants": constants()}


if __name__ == "__main__":
    names, processes = tuple(EXPERIMENTS), os.cpu_count() or 1
    flags = {"experiments": names, "seeds": 10, "processes": processes}
    environment.run(__doc__, measure, ("numpy",), {"experiments": names}, **flags)
