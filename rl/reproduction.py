"""Published figures beside simulated ones: `python -m rl.simulate --reproduce`.

Every configuration in `configs/sim` that says `Simulate.reproduces` is played. A paper's files
share one set of constants; those that are fitted, or that the paper does not give, are listed
beside its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config import PROJECT_ROOT, load
from rl.simulation_config import SimulateRun

FOLDER = PROJECT_ROOT / "configs" / "sim"


@dataclasses.dataclass(frozen=True)
class ReproducedRow:
    """A figure of a paper, and what the simulator says; None where nothing was published.

    The error is a ratio, or a difference where `absolute`; at most `tolerance` is asked for, or
    at least `least` of a figure that was not published. `why` is said where that is missed.
    """

    paper: str
    workload: str
    row: str
    published: float | None
    simulated: float
    tolerance: float = 0.2
    absolute: bool = False
    least: float | None = None
    required: bool = True
    why: str = ""

    @property
    def error(self) -> float | None:
        if self.published is None:
            return None
        difference = self.simulated - self.published
        return difference if self.absolute else difference / self.published

    @property
    def within(self) -> bool:
        if self.error is None:
            return self.least is None or self.simulated >= self.least
        return abs(self.error) <= self.tolerance

    def as_json(self, fitted: Mapping[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "paper": self.paper,
            "workload": self.workload,
            "row": self.row,
            "published": self.published,
            "simulated": round(self.simulated, 4),
            "error": None if self.error is None else round(self.error, 4),
            "tolerance": None if self.error is None else self.tolerance,
            "absolute": self.absolute,
            "least": self.least,
            "required": self.required,
            "within": self.within,
            "fitted": dict(fitted),
        }
        return row if self.within or not self.why else row | {"why": self.why}


Experiment = Callable[[SimulateRun, str], Sequence[ReproducedRow]]  # (configuration, workload)


def fitted_constants(config: SimulateRun, names: Sequence[str]) -> dict[str, Any]:
    """Values of `section.field` names."""
    return {
        name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in names
    }


def configurations(folder: Path = FOLDER) -> list[tuple[str, SimulateRun]]:
    """(name, configuration) of every file that reproduces something, by paper."""
    found = [(path.stem, load(SimulateRun, [path])) for path in sorted(folder.glob("*.gin"))]
    return [(name, config) for name, config in found if config.simulate.reproduces]


def reproduce(
    found: Sequence[tuple[str, SimulateRun]],
) -> Iterator[tuple[ReproducedRow, dict[str, Any]]]:
    """(row, constants that were fitted or assumed) of these configurations."""
    from rl import reproduction_rhymerl, reproduction_seer, reproduction_specactor, reproduction_tlt

    papers = {
        "seer": reproduction_seer,
        "rhymerl": reproduction_rhymerl,
        "specactor": reproduction_specactor,
        "tlt": reproduction_tlt,
    }
    for _, config in found:
        assert config.simulate.reproduces is not None
        module = papers[config.simulate.reproduces]
        constants = fitted_constants(config, module.FITTED)
        for row in module.rows(config):
            yield row, constants


def lines_of(results: Sequence[tuple[ReproducedRow, Mapping[str, Any]]]) -> list[str]:
    """The table, then fitted constants by paper, then why rows are short."""
    lines = [
        f"{'paper':10} {'workload':14} {'row':42} {'published':>9} {'simulated':>9} "
        f"{'error':>8}  within"
    ]
    for row, _ in results:
        published = "-" if row.published is None else f"{row.published:.3g}"
        asked = "" if row.required else " (not asked for)"
        error = ""
        if row.error is not None:
            error = f"{100 * row.error:+.1f} pt" if row.absolute else f"{row.error:+.1%}"
        lines.append(
            f"{row.paper:10} {row.workload:14} {row.row:42} {published:>9} "
            f"{row.simulated:9.3f} {error:>8}  {'yes' if row.within else 'NO'}{asked}"
        )
    lines += ["", "simulated; constants that were fitted, or that a paper's text does not give:"]
    by_paper: dict[str, dict[str, set[str]]] = {}
    for row, constants in results:
        paper = by_paper.setdefault(row.paper, {})
        for name, value in constants.items():
            paper.setdefault(name, set()).add(f"{value:g}")
    for name, values in by_paper.items():
        shown = ", ".join(f"{key} {' / '.join(sorted(v))}" for key, v in values.items())
        lines.append(f"  {name}: {shown}")
    short = [row for row, _ in results if not row.within and row.why]
    lines += ["", "rows that are short:"] * bool(short)
    lines += [f"  {row.paper} {row.workload} {row.row}: {row.why}" for row in short]
    return lines
