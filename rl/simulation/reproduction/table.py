"""Published figures beside simulated ones: `python -m rl.simulate --reproduce`.

Every configuration in `configs/sim` that says `Simulate.reproduces` is played. One workload of
each paper is calibrated: constants that no paper gives were fitted to its rows, or to those of
TLT's microbenchmark. All other workloads are predicted.

    error of a speedup   |log(simulated) / log(published) − 1|: of the gain, not of 1 + gain
    error of a share     |simulated − published|, in points
    null                 one constant for each paper: the geometric mean of its calibrated
                         speedups, the median of its calibrated shares (0.5 where it has none)
    an ordering          `holds` where nine of ten seeds are on the published side of 1

A row is the median over seeds; `low` and `high` are the 10th and the 90th percentile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import math
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rl.config.loader import PROJECT_ROOT, load
from rl.simulation.config import PAPERS, SimulateRun
from rl.simulation.reproduction.rows import Figure

FOLDER = PROJECT_ROOT / "configs" / "sim"
PHYSICAL = (  # one set for all papers, which no paper gives
    "efficiency.bandwidth",
    "efficiency.operations",
    "efficiency.overhead_s",
    "efficiency.layer_sync_s",
    "efficiency.memory",
    "workload.group_share",
)
CALIBRATED, PREDICTED = "calibrated", "predicted"


@dataclasses.dataclass(frozen=True)
class ReproducedRow:
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

    def error(self, said: float) -> float:
        """Return the error of `said` instead of the published figure: a ratio, or points."""
        if self.figure.kind == "share":
            return 100 * abs(said - self.figure.published)
        return gain_error(said, self.figure.published)

    def as_json(self) -> dict[str, Any]:
        figure = self.figure
        row: dict[str, Any] = {"paper": self.paper, "workload": figure.workload, "row": figure.row}
        row |= {"role": self.role, "published": figure.published}
        row |= {
            name: round(getattr(self, name), 4) for name in ("simulated", "low", "high", "null")
        }
        return row if self.holds is None else row | {"holds": self.holds}


def module_of(paper: str | None) -> ModuleType:
    """Import a paper's `figures`, `play` and `ASSUMED`, and with them jax."""
    assert paper in PAPERS
    return importlib.import_module(f"rl.simulation.reproduction.{paper}")


def gain_error(said: float, published: float) -> float:
    """Return |log(said) / log(published) − 1|: 0 where right, 1 where `said` is no gain."""
    return abs(math.log(said) / math.log(published) - 1)


def configurations(folder: Path = FOLDER) -> list[tuple[str, SimulateRun]]:
    """Return (name, configuration) of every file that reproduces something."""
    found = [(path.stem, load(SimulateRun, [path])) for path in sorted(folder.glob("*.gin"))]
    return [(name, config) for name, config in found if config.simulate.reproduces]


def reproduce(
    found: Sequence[tuple[str, SimulateRun]], *, processes: int = 1
) -> Iterator[ReproducedRow]:
    """Yield the rows of these configurations, each as soon as its seeds are played."""
    tasks = [(config, seed) for _, config in found for seed in config.simulate.seeds]
    with contextlib.ExitStack() as stack:
        played: Iterator[dict[str, float]]
        if processes > 1:
            pool = concurrent.futures.ProcessPoolExecutor(
                processes, multiprocessing.get_context("spawn")
            )
            played = stack.enter_context(pool).map(_play, *zip(*tasks, strict=True))
        else:
            played = (_play(*task) for task in tasks)
        nulls = _nulls(_everything())
        for _, config in found:
            seeds = [next(played) for _ in config.simulate.seeds]
            yield from rows_of(config, seeds, nulls)


def _play(config: SimulateRun, seed: int) -> dict[str, float]:
    found: dict[str, float] = module_of(config.simulate.reproduces).play(config, seed)
    return found


def _everything() -> list[tuple[str, Figure]]:
    """Return (paper, figure) of all that ships; nulls do not depend on which files are played."""
    return [
        (config.simulate.reproduces, figure)
        for _, config in configurations()
        if config.simulate.reproduces is not None
        for figure in module_of(config.simulate.reproduces).figures(config)
    ]


def _nulls(everything: Iterable[tuple[str, Figure]]) -> dict[tuple[str, str], float]:
    """Return the null model's constants, by paper and kind of figure."""
    values: dict[tuple[str, str], list[float]] = {}
    for paper, figure in everything:
        if figure.kind != "order" and figure.calibrated:
            values.setdefault((paper, figure.kind), []).append(figure.published)
    return {
        (paper, kind): statistics.median(v) if kind == "share" else statistics.geometric_mean(v)
        for (paper, kind), v in values.items()
    }


def rows_of(
    config: SimulateRun,
    seeds: Sequence[Mapping[str, float]],
    nulls: Mapping[tuple[str, str], float],
) -> Iterator[ReproducedRow]:
    """Yield the rows of one configuration from the simulated values of each seed."""
    paper = config.simulate.reproduces
    assert paper is not None
    for figure in module_of(paper).figures(config):
        values = [figure.of(found) for found in seeds]
        low, high = np.percentile(values, (10, 90)).tolist()
        null = nulls.get((paper, figure.kind), 0.5 if figure.kind == "share" else 1.0)
        yield ReproducedRow(paper, figure, statistics.median(values), low, high, null)


def constants(found: Sequence[tuple[str, SimulateRun]]) -> dict[str, dict[str, str]]:
    """Return the constants that no paper gives: {paper, or `all papers`: {name: values}}."""

    def value(config: SimulateRun, name: str) -> str:
        section, field = name.split(".")
        return f"{getattr(getattr(config, section), field):g}"

    out: dict[str, dict[str, set[str]]] = {}
    for _, config in found:
        paper = config.simulate.reproduces
        assert paper is not None
        for title, names in (("all papers", PHYSICAL), (paper, module_of(paper).ASSUMED)):
            for name in names:
                out.setdefault(title, {}).setdefault(name, set()).add(value(config, name))
    return {
        title: {name: " / ".join(sorted(values)) for name, values in names.items()}
        for title, names in out.items()
    }


def summary(rows: Sequence[ReproducedRow]) -> dict[str, Any]:
    """Return median errors, the simulator's and the null's, and which orderings hold, by role."""
    out: dict[str, Any] = {}
    for role in (PREDICTED, CALIBRATED):
        mine = [row for row in rows if row.role == role]
        for kind, title in (("gain", "gain_error"), ("share", "share_error_points")):
            of = [row for row in mine if row.figure.kind == kind]
            if of:
                out[f"{role}_median_{title}"] = _median(row.error(row.simulated) for row in of)
                out[f"{role}_null_median_{title}"] = _median(row.error(row.null) for row in of)
                out[f"{role}_rows_{title}"] = len(of)
        orders = [row for row in mine if row.holds is not None]
        if orders:
            out[f"{role}_orderings"] = len(orders)
            out[f"{role}_orderings_held"] = sum(bool(row.holds) for row in orders)
            out[f"{role}_orderings_failed"] = [
                f"{row.paper} {row.figure.workload}: {row.figure.row}"
                for row in orders
                if not row.holds
            ]
    return out


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def lines_of(rows: Sequence[ReproducedRow], found: Sequence[tuple[str, SimulateRun]]) -> list[str]:
    """Return the table, the constants that it rests on, its failures, and its summary."""
    wide = max(len(row.figure.row) for row in rows)
    form = f"{{:9}} {{:24}} {{:{wide}}} {{:10}} {{:>9}} {{:>9}} {{:>15}} {{:>6}} {{:>7}} {{:>7}}"
    titles = ("paper", "workload", "row", "role", "published", "simulated", "10th to 90th")
    lines = [form.format(*titles, "null", "error", "null's")]
    bad = []
    for row in rows:
        figure = row.figure
        if row.holds is None:
            unit, most = ("{:.0f} pt", 15) if figure.kind == "share" else ("{:.0%}", 0.5)
            errors = [unit.format(row.error(x)) for x in (row.simulated, row.null)]
            if row.error(row.simulated) > most:
                bad.append(
                    f"  {row.role}: {row.paper}, {figure.workload}, {figure.row}: "
                    f"published {figure.published:.3g}, simulated {row.simulated:.3g}"
                )
        else:
            errors = ["holds" if row.holds else "FAILS", ""]
        lines.append(
            form.format(
                *(row.paper, figure.workload, figure.row, row.role, f"{figure.published:.3g}"),
                *(f"{row.simulated:.3f}", f"{row.low:.3f} … {row.high:.3f}", f"{row.null:.2f}"),
                *errors,
            ).rstrip()
        )
    lines += ["", "Simulated by a roofline. Constants that no paper gives:"]
    for title, values in constants(found).items():
        lines.append(f"  {title}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    lines += ["", "What fails (a gain wrong by more than half, a share by more than 15 points):"]
    return [*lines, *(bad or ["  nothing"]), "", *summary_lines(summary(rows))]


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """Return `summary` in words."""
    lines = []
    for role in (PREDICTED, CALIBRATED):
        words = []
        for kind, form in (("gain_error", "{:.0%}"), ("share_error_points", "{:.0f} points")):
            if f"{role}_median_{kind}" in found:
                mine, null = (
                    form.format(found[f"{role}_{name}_{kind}"])
                    for name in ("median", "null_median")
                )
                what = "gain" if kind == "gain_error" else "shares"
                words.append(
                    f"median error of the {what} {mine} over {found[f'{role}_rows_{kind}']} rows "
                    f"(null model {null})"
                )
        if f"{role}_orderings" in found:
            held, of = found[f"{role}_orderings_held"], found[f"{role}_orderings"]
            words.append(f"{held} of {of} orderings hold")
            if found[f"{role}_orderings_failed"]:
                words[-1] += ", not: " + "; ".join(found[f"{role}_orderings_failed"])
        if words:
            lines.append(f"{role}: " + "; ".join(words))
    return lines
