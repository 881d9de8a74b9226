"""Evaluations in a report: figures over steps, and before and after training."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.rl.reports.style import legend_below, number, plain_text, run_look, step_axis, titles

if TYPE_CHECKING:
    from reprise.rl.reports.runs import Run

MAX_SETS = 12  # drawn or listed
ALL = ""  # the name of all sets together
_FIGURE = re.compile(r"eval/(?:([A-Za-z0-9_-]{1,100})/)?(mean_reward|pass@[0-9]{1,9})")


def figures_of(run: Run) -> dict[str, list[str]]:
    """Return the figure names of each evaluated set of a run; all sets together come last."""
    names = {name for row in run.evals for name in row}
    matches = [match for name in sorted(names) if (match := _FIGURE.fullmatch(name))]
    figures: dict[str, list[str]] = {}
    for match in sorted(matches, key=lambda m: (m[1] is None, m[1] or "")):
        if np.isfinite(run.eval_series(match[0])).any():
            figures.setdefault(match[1] or ALL, []).append(match[2])
    if len(figures) == 2 and ALL in figures:  # which are equal
        del figures[ALL]
    return dict(list(figures.items())[-MAX_SETS:])


def metric(name: str, figure: str) -> str:
    return f"eval/{name}/{figure}" if name else f"eval/{figure}"


def with_bounds(run: Run, name: str, figure: str) -> list[np.ndarray]:
    """Return a figure and the bounds of its 95% interval; float64 [evals] each."""
    return [run.eval_series(metric(name, figure) + end) for end in ("", "_low", "_high")]


def eval_table(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row per run, set and figure, with values before and after training, and the best."""
    rows = []
    figures = [(r, name, f) for r in runs for name, fs in figures_of(r).items() for f in fs]
    for run, name, figure in figures:
        steps = run.eval_series("step")
        values = run.eval_series(metric(name, figure))
        known = np.flatnonzero(np.isfinite(values))
        first = known[0]
        last = known[-1]
        best = known[np.argmax(values[known])]
        bounds = zip(*with_bounds(run, name, figure), strict=True)
        cells = [f"{number(x)} [{number(low)}, {number(high)}]" for x, low, high in bounds]
        seen = run.eval_series(metric(name, "seen_in_training"))[last]
        row = {
            "set": name or "all sets",
            "run": run.label,
            "figure": figure,
            "questions": number(run.eval_series(metric(name, "questions"))[last]),
            "of them in training": "" if np.isnan(seen) else number(seen),
            "before": cells[first] if steps[first] == 0 and first != last else "",
            "last": cells[last],
            "best": f"{number(values[best])} (step {int(steps[best]):,})",
        }
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class EvalCurves:
    """A panel of the mean reward in evaluations, by set for one run, otherwise by run."""

    file: str = "evaluation.png"
    title: str = "Evaluation"
    caption: str = (
        "Mean reward on the questions of the evaluation with 95% intervals; step 0 is before "
        "training."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any("mean_reward" in figures for run in runs for figures in figures_of(run).values())

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        for index, (run, name, label) in enumerate(self._curves(runs)):
            color, style = run_look(index)
            values, low, high = with_bounds(run, name, "mean_reward")
            known = np.isfinite(values)
            steps = run.eval_series("step")[known]
            low = low[known]
            high = high[known]
            if len(steps) > 1:
                ax.fill_between(steps, low, high, facecolor=color, alpha=0.12)
            else:
                steps = steps + 0.06 * index  # bars of one step are side by side
                ax.vlines(steps, low, high, color=color, alpha=0.4)
            look = {"color": color, "linewidth": 1.8, "marker": "o", "markersize": 4}
            ax.plot(steps, values[known], style, label=label, **look)
        titles(ax, self.title, "shade: 95% interval")
        ax.set_ylabel("mean reward")
        step_axis(ax, "after training step")
        ax.margins(x=0.02)
        if len(runs) == 1:
            legend_below(ax, 4, handlelength=1.5)

    def _curves(self, runs: Sequence[Run]) -> list[tuple[Run, str, str]]:
        if len(runs) == 1:
            sets = [n for n, figures in figures_of(runs[0]).items() if "mean_reward" in figures]
            return [(runs[0], name, plain_text(name or "all sets", 30)) for name in sets]
        # `figures_of` leaves out ALL for a run of one set
        of_all = [(run, ALL, plain_text(run.label, 30)) for run in runs]
        return [c for c in of_all if np.isfinite(c[0].eval_series("eval/mean_reward")).any()]
