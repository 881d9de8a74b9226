"""Evaluations in a report: figures with their intervals over steps, and before against after."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.reports.style import FAINT, INK, plain_text, run_look

if TYPE_CHECKING:
    from rl.reports.runs import Run

MOST_SETS = 12  # that are drawn or listed
_FIGURE = re.compile(r"eval/(?:([A-Za-z0-9_-]{1,100})/)?(mean_reward|pass@[0-9]{1,9})")
ALL = ""  # the name of all sets together


@dataclasses.dataclass(frozen=True)
class EvalLine:
    """One figure of one set of a run, before and after training; `best` with its step."""

    label: str
    name: str
    figure: str
    questions: float
    seen: float  # in training; nan where it is not known
    before: tuple[float, float, float] | None  # mean, and the bounds of its 95% interval
    after: tuple[float, float, float]
    best: float
    best_step: int


def figures_of(run: Run) -> dict[str, list[str]]:
    """Return the figures of each set that a run was asked, all sets together last."""
    names = {name for row in run.evals for name in row}
    matches = [match for name in sorted(names) if (match := _FIGURE.fullmatch(name))]
    found: dict[str, list[str]] = {}
    for match in sorted(matches, key=lambda m: (m[1] is None, m[1] or "")):
        if np.isfinite(run.eval_series(match[0])).any():
            found.setdefault(match[1] or ALL, []).append(match[2])
    if len(found) == 2 and ALL in found:  # the same figures
        del found[ALL]
    return dict(list(found.items())[-MOST_SETS:])


def metric(name: str, figure: str) -> str:
    return f"eval/{name}/{figure}" if name else f"eval/{figure}"


def eval_lines(runs: Sequence[Run]) -> list[EvalLine]:
    """Return a line per run, set and figure that was evaluated."""
    lines = []
    for run in runs:
        for name, figures in figures_of(run).items():
            for figure in figures:
                values, low, high = (
                    run.eval_series(metric(name, figure) + end) for end in ("", "_low", "_high")
                )
                there = np.flatnonzero(np.isfinite(values))
                first, last = int(there[0]), int(there[-1])
                best = int(there[np.argmax(values[there])])

                def bounds(i: int, parts: Any = (values, low, high)) -> tuple[float, float, float]:
                    mean, below, above = (float(part[i]) for part in parts)
                    return mean, below, above

                steps = run.eval_steps
                lines.append(
                    EvalLine(
                        label=run.label,
                        name=name or "all sets",
                        figure=figure,
                        questions=float(run.eval_series(metric(name, "questions"))[last]),
                        seen=float(run.eval_series(metric(name, "seen_in_training"))[last]),
                        before=bounds(first) if steps[first] == 0 and first != last else None,
                        after=bounds(last),
                        best=float(values[best]),
                        best_step=int(steps[best]),
                    )
                )
    return lines


@dataclasses.dataclass(frozen=True)
class EvalCurves:
    """A panel of the mean reward of evaluations: by set for one run, else by run."""

    file: str = "evaluation.png"
    title: str = "Evaluation"
    caption: str = (
        "Mean reward on the questions of the evaluation with 95% intervals; step 0 is before "
        "training."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any("mean_reward" in figures for run in runs for figures in figures_of(run).values())

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        from matplotlib.ticker import MaxNLocator

        for index, (run, name, label) in enumerate(self._curves(runs)):
            color, style = run_look(index)
            values, low, high = (
                run.eval_series(metric(name, "mean_reward") + end) for end in ("", "_low", "_high")
            )
            there = np.isfinite(values)
            steps = run.eval_steps[there]
            shift = 0.0 if len(steps) > 1 else 0.06 * index  # bars of one step lie side by side
            ax.plot(
                steps + shift, values[there], style, color=color, linewidth=1.8, marker="o",
                markersize=4, label=label,
            )  # fmt: skip
            if len(steps) > 1:
                ax.fill_between(steps, low[there], high[there], facecolor=color, alpha=0.12)
            else:
                ax.vlines(steps + shift, low[there], high[there], color=color, alpha=0.4)
        ax.set_title(self.title)
        ax.set_title("shade: 95% interval", loc="right", color=FAINT, fontsize=8, weight="normal")
        ax.set_ylabel("mean reward")
        ax.set_xlabel("after training step")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        ax.margins(x=0.02)
        if len(runs) == 1:
            ax.legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, fontsize=8,
                handlelength=1.5, labelcolor=INK,
            )  # fmt: skip

    def _curves(self, runs: Sequence[Run]) -> list[tuple[Run, str, str]]:
        if len(runs) == 1:
            sets = [n for n, figures in figures_of(runs[0]).items() if "mean_reward" in figures]
            return [(runs[0], name, plain_text(name or "all sets", 30)) for name in sets]
        # a run of one set has no line for all of them
        of_all = [(run, ALL, plain_text(run.label, 30)) for run in runs]
        return [c for c in of_all if np.isfinite(c[0].eval_series("eval/mean_reward")).any()]
