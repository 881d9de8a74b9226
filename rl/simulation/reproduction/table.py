"""Published figures beside simulated ones: `python -m rl.simulate --reproduce`.

Every configuration in `configs/sim` that says `Simulate.reproduces` is played. One workload of
each paper is calibrated: constants that no paper gives were fitted to its rows, or to those of
TLT's microbenchmark. All other workloads are predicted.

    error of a speedup   |log(simulated) / log(published) − 1|: of the gain, not of 1 + gain
    error of a share     |simulated − published|, in points
    null                 what one constant a paper says: the geometric mean of its calibrated
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
from rl.simulation.reproduction.rows import Figure, Ordering

FOLDER = PROJECT_ROOT / "configs" / "sim"
PHYSICAL = (  # one set for all papers, which no paper gives
    "efficiency.bandwidth",
    "efficiency.operations",
    "efficiency.overhead_s",
    "efficiency.layer_sync_s",
    "efficiency.memory",
    "workload.sigma",
    "workload.group_share",
)
CALIBRATED, PREDICTED = "calibrated", "predicted"


@dataclasses.dataclass(frozen=True)
class ReproducedRow:
    """A published figure, and what the simulator and one constant say; `holds`: of orderings."""

    paper: str
    workload: str
    row: str
    role: str
    published: float
    simulated: float
    low: float
    high: float
    null: float
    is_share: bool = False
    holds: bool | None = None

    def error(self, said: float) -> float:
        """Of what is said in the place of what was published: a ratio, or points of a share."""
        if self.is_share:
            return 100 * abs(said - self.published)
        return gain_error(said, self.published)

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            name: getattr(self, name) for name in ("paper", "workload", "row", "role", "published")
        }
        row |= {
            name: round(getattr(self, name), 4) for name in ("simulated", "low", "high", "null")
        }
        return row if self.holds is None else row | {"holds": self.holds}


def module_of(paper: str | None) -> ModuleType:
    """`figures`, `play` and `ASSUMED` of a paper; loads jax, which other simulations do without."""
    assert paper in PAPERS
    return importlib.import_module(f"rl.simulation.reproduction.{paper}")


def gain_error(said: float, published: float) -> float:
    """|log(said) / log(published) − 1|: 0 where right, 1 where it says that nothing is gained."""
    return abs(math.log(said) / math.log(published) - 1)


def configurations(folder: Path = FOLDER) -> list[tuple[str, SimulateRun]]:
    """(name, configuration) of every file that reproduces something."""
    found = [(path.stem, load(SimulateRun, [path])) for path in sorted(folder.glob("*.gin"))]
    return [(name, config) for name, config in found if config.simulate.reproduces]


def reproduce(
    found: Sequence[tuple[str, SimulateRun]], *, processes: int = 1
) -> Iterator[ReproducedRow]:
    """Rows of these configurations, each as soon as its seeds are played."""
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


def _everything() -> list[tuple[str, Figure | Ordering]]:
    """(paper, figure) of all that ships: nulls do not depend on which files are played."""
    return [
        (config.simulate.reproduces, figure)
        for _, config in configurations()
        if config.simulate.reproduces is not None
        for figure in module_of(config.simulate.reproduces).figures(config)
    ]


def _nulls(everything: Iterable[tuple[str, Figure | Ordering]]) -> dict[tuple[str, bool], float]:
    """The constant of each paper, by (paper, whether of shares)."""
    values: dict[tuple[str, bool], list[float]] = {}
    for paper, figure in everything:
        if isinstance(figure, Figure) and figure.calibrated:
            values.setdefault((paper, figure.is_share), []).append(figure.published)
    return {
        (paper, is_share): statistics.median(v) if is_share else statistics.geometric_mean(v)
        for (paper, is_share), v in values.items()
    }


def rows_of(
    config: SimulateRun,
    seeds: Sequence[Mapping[str, float]],
    nulls: Mapping[tuple[str, bool], float],
) -> Iterator[ReproducedRow]:
    """Rows of one configuration from what each seed gave."""
    paper = config.simulate.reproduces
    assert paper is not None
    for figure in module_of(paper).figures(config):
        is_order = isinstance(figure, Ordering)
        is_share = not is_order and figure.is_share
        values = [figure.of(found) for found in seeds]
        low, high = np.percentile(values, (10, 90)).tolist()
        null = 1.0 if is_order else nulls.get((paper, is_share), 0.5 if is_share else 1.0)
        yield ReproducedRow(
            paper,
            figure.workload,
            figure.row,
            CALIBRATED if figure.calibrated else PREDICTED,
            figure.published,
            statistics.median(values),
            low,
            high,
            null,
            is_share,
            low > 1 if is_order else None,
        )


def constants(found: Sequence[tuple[str, SimulateRun]]) -> dict[str, dict[str, str]]:
    """By paper, and `all papers`: constants that no paper gives, and values derived from one."""

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
    """Medians of errors, the simulator's and the null's, and which orderings hold; by role."""
    out: dict[str, Any] = {}
    for role in (PREDICTED, CALIBRATED):
        mine = [row for row in rows if row.role == role]
        orders = [row for row in mine if row.holds is not None]
        figures = [row for row in mine if row.holds is None]
        for kind, of in (
            ("gain_error", [row for row in figures if not row.is_share]),
            ("share_error_points", [row for row in figures if row.is_share]),
        ):
            if of:
                out[f"{role}_median_{kind}"] = _median(row.error(row.simulated) for row in of)
                out[f"{role}_null_median_{kind}"] = _median(row.error(row.null) for row in of)
                out[f"{role}_rows_{kind}"] = len(of)
        if orders:
            out[f"{role}_orderings"] = len(orders)
            out[f"{role}_orderings_held"] = sum(bool(row.holds) for row in orders)
            out[f"{role}_orderings_failed"] = [
                f"{row.paper} {row.workload}: {row.row}" for row in orders if not row.holds
            ]
    return out


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def lines_of(rows: Sequence[ReproducedRow], found: Sequence[tuple[str, SimulateRun]]) -> list[str]:
    """The table, what fails, the constants that it rests on, and how good it is in all."""
    wide = max(len(row.row) for row in rows)
    form = f"{{:9}} {{:24}} {{:{wide}}} {{:10}} {{:>9}} {{:>9}} {{:>15}} {{:>6}} {{:>7}} {{:>7}}"
    titles = ("paper", "workload", "row", "role", "published", "simulated", "10th to 90th")
    lines = [form.format(*titles, "null", "error", "null's")]
    for row in rows:
        if row.holds is None:
            unit = "{:.0f} pt" if row.is_share else "{:.0%}"
            scale = 1.0
            errors = [unit.format(scale * row.error(x)) for x in (row.simulated, row.null)]
        else:
            errors = ["holds" if row.holds else "FAILS", ""]
        lines.append(
            form.format(
                *(row.paper, row.workload, row.row, row.role, f"{row.published:.3g}"),
                *(f"{row.simulated:.3f}", f"{row.low:.3f} … {row.high:.3f}", f"{row.null:.2f}"),
                *errors,
            ).rstrip()
        )
    lines += ["", "Simulated by a roofline. Constants that no paper gives:"]
    for title, values in constants(found).items():
        lines.append(f"  {title}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    bad = [row for row in rows if row.holds is None and _is_far(row)]
    lines += ["", "What fails (a gain wrong by more than half, a share by more than 15 points):"]
    lines += [
        f"  {row.role}: {row.paper}, {row.workload}, {row.row}: "
        f"published {row.published:.3g}, simulated {row.simulated:.3g}"
        for row in bad
    ] or ["  nothing"]
    lines += ["", *summary_lines(summary(rows))]
    return lines


def _is_far(row: ReproducedRow) -> bool:
    return row.error(row.simulated) > (15 if row.is_share else 0.5)


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """`summary` in words."""
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
