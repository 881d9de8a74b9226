"""An ablation's table in Markdown, and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rl.ablation import COLUMNS, Spread
from rl.report_style import RUN_COLORS, STYLE, plain_text

Spreads = Mapping[str, Mapping[str, Spread]]
DIGITS = {"generated_tokens": 0, "rollout_s": 1, "verify_s": 1, "epochs": 1, "clip_fraction": 5}
PANELS = (  # (column, title, against the first variant)
    ("generated_tokens", "Generated tokens, of the first", True),
    ("rollout_s", "Rollout seconds, of the first", True),
    ("final_reward", "Reward in the last epoch", False),
)


def markdown(spreads: Spreads) -> str:
    """A row a variant: mean ± deviation over seeds, tokens and seconds also against the first."""
    columns = COLUMNS[2:]
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
        "seconds over those of the row; verify_s is part of rollout_s; final_reward is the last "
        "epoch's mean; reused_fraction is from the second epoch on; kl is trainer against sampler."
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


def figure(spreads: Spreads, path: Path) -> None:
    """Tokens, seconds and reward of every variant, with the deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(spreads)
    first = next(iter(spreads.values()))
    with plt.rc_context(STYLE):
        size = (11, 1.2 + 0.36 * len(names))
        picture, axes = plt.subplots(1, len(PANELS), figsize=size, sharey=True)
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
        picture.tight_layout()
        picture.savefig(path)
        plt.close(picture)
