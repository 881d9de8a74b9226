"""An ablation's table in Markdown, and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.ablation.grid import COLUMNS, Spread
from rl.reports.style import RUN_COLORS, STYLE, plain_text, run_look

Spreads = Mapping[str, Mapping[str, Spread]]
DIGITS = {"generated_tokens": 0, "rollout_s": 1, "verify_s": 1, "epochs": 1, "clip_fraction": 5}
PANELS = (  # (column, title, against the first variant)
    ("generated_tokens", "Generated tokens (first = 1)", True),
    ("rollout_s", "Rollout seconds (first = 1)", True),
    ("final_reward", "Reward, last epoch or whole run", False),
)
Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # steps, mean rewards over seeds


def markdown(spreads: Spreads) -> str:
    """A row a variant: mean ± deviation over seeds, tokens and seconds also against the first.

    Columns that say nothing of these runs are left out: those without a value, or with zeros alone.
    """
    columns = [
        column
        for column in COLUMNS[2:]
        if any(_digits(row[column].mean, column) for row in spreads.values())
    ]
    lines = [
        "| " + " | ".join(["name", "tokens", "speedup", *columns]) + " |",
        "|---" * (len(columns) + 3) + "|",
    ]
    first = next(iter(spreads.values()))
    for name, row in spreads.items():
        tokens = _ratio(row["generated_tokens"].mean, first["generated_tokens"].mean)
        speedup = _ratio(first["rollout_s"].mean, row["rollout_s"].mean)
        cells = [_cell(row[column], DIGITS.get(column, 4)) for column in columns]
        shown = name.replace("|", "\\|")
        times = "" if math.isnan(speedup) else f"{speedup:.2f}×"  # rollouts that ran ahead
        lines.append("| " + " | ".join([shown, f"{tokens:.2f}", times, *cells]) + " |")
    legend = (
        "Mean ± deviation over seeds. tokens: generated, of the first row; speedup: its rollout "
        "seconds over those of the row; final_reward is the mean of the last epoch, of all steps "
        "where there was less than one."
    )
    explained = {
        "verify_s": "verify_s is part of rollout_s",
        "reused_fraction": "reused_fraction is from the second epoch on",
        "kl": "kl is trainer against sampler",
    }
    legend = " ".join(
        [legend, *(f"{text}." for column, text in explained.items() if column in columns)]
    )
    return "\n".join([*lines, "", legend, ""])


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _cell(spread: Spread, digits: int) -> str:
    if math.isnan(spread.mean):
        return ""
    if math.isnan(spread.deviation):
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.deviation:.{digits}f}"


def _digits(value: float, column: str) -> float:
    """The value as it is shown, for telling zeros: nan counts as one."""
    return 0.0 if math.isnan(value) else round(value, DIGITS.get(column, 4))


def figure(spreads: Spreads, curves: Curves, path: Path) -> None:
    """Tokens, seconds and reward of every variant, with deviations over seeds; reward by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(spreads)
    first = next(iter(spreads.values()))
    with plt.rc_context(STYLE):
        bars_inch = 1.2 + 0.36 * len(names)
        picture = plt.figure(figsize=(11, bars_inch + 3.6), layout="constrained")
        above, below = picture.subfigures(2, 1, height_ratios=(bars_inch, 3.6))
        axes = above.subplots(1, len(PANELS), sharey=True)
        for axis, (column, title, relative) in zip(axes, PANELS, strict=True):
            base = first[column].mean if relative else 1.0
            values = [_ratio(spreads[n][column].mean, base) for n in names]
            errors = [_ratio(spreads[n][column].deviation, base) for n in names]
            errors = [0.0 if math.isnan(e) else e for e in errors]
            colors = [RUN_COLORS[-1], *[RUN_COLORS[0]] * (len(names) - 1)]
            axis.barh(range(len(names)), values, xerr=errors, color=colors, ecolor="#222222")
            axis.set_title(title)
            axis.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(names)), [plain_text(n, 28) for n in names])
        axes[0].invert_yaxis()
        curve = below.subplots()
        for index, (name, (steps, rewards)) in enumerate(curves.items()):
            color, style = run_look(index)
            curve.plot(steps, rewards, style, color=color, label=plain_text(name, 28))
        curve.set_title("Reward by step, mean over seeds")
        curve.set_xlabel("training step")
        curve.xaxis.get_major_locator().set_params(integer=True)
        curve.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        picture.savefig(path)
        plt.close(picture)
