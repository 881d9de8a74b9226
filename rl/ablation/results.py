"""The results of a grid of runs: rows, spreads over seeds, a table in Markdown, a figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rl.ablation.grid import Cell
from rl.metrics.writer import Row, read_metrics, step_rows
from rl.reports.style import RUN_COLORS, STYLE, plain_text, run_look

COLUMNS = (
    *("name", "seed", "epochs", "generated_tokens", "rollout_s", "verify_s", "final_reward"),
    *("reused_fraction", "clip_fraction", "kl", "entropy", "distinct_1", "self_bleu"),
)
MEANS = {  # columns that are means over steps, with their metrics
    "clip_fraction": "clip_ratio/region_mean",
    "kl": "mismatch_kl",
    "entropy": "entropy",
    "distinct_1": "diversity/distinct_1",
    "self_bleu": "diversity/self_bleu",
}
DIGITS = {"generated_tokens": 0, "rollout_s": 1, "verify_s": 1, "epochs": 1, "clip_fraction": 5}
PANELS = (  # (column, title, against the first variant)
    ("generated_tokens", "Generated tokens (first = 1)", True),
    ("rollout_s", "Rollout seconds (first = 1)", True),
    ("final_reward", "Reward, last epoch or whole run", False),
)
Spreads = Mapping[str, Mapping[str, "Spread"]]
Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # steps, mean rewards over seeds


def read_cell(cell: Cell, num_examples: int) -> dict[str, float | str | int]:
    """Return the run's row of the table, by `COLUMNS`; nan where a run has no such metric.

    Tokens and seconds are sums over all steps (no rollout seconds where they run ahead); the
    final reward is the mean over the last epoch, in which every prompt was answered once; reuse
    is from the second epoch on.
    """
    rows = step_rows(read_metrics(cell.folder))
    # dynamic sampling takes as many prompts as it needs
    per_step = float(cell.config.rollout.prompts_per_step)
    prompts = [float(row.get("dynamic_sampling/generated_groups") or per_step) for row in rows]
    ends = np.cumsum(prompts)
    later = [
        row for row, end, n in zip(rows, ends, prompts, strict=True) if end - n >= num_examples
    ]
    last = [row for row, end in zip(rows, ends, strict=True) if end > ends[-1] - num_examples]
    return {
        "name": cell.name,
        "seed": cell.seed,
        "epochs": round(sum(prompts) / num_examples, 2),
        "generated_tokens": _total(rows, "rollout/generated_tokens"),
        "rollout_s": _total(rows, "time/rollout") if "time/rollout" in rows[0] else math.nan,
        "verify_s": _total(rows, "spec/cached_seconds"),
        "final_reward": _mean(last, "reward"),
        "reused_fraction": _mean(later, "spec/reused_fraction") if later else math.nan,
        **{column: _mean(rows, metric) for column, metric in MEANS.items()},
    }


def _total(rows: Sequence[Row], metric: str) -> float:
    return float(sum(float(row.get(metric) or 0.0) for row in rows))


def _mean(rows: Sequence[Row], metric: str) -> float:
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    return float(np.mean(values)) if values else math.nan


def reward_curves(done: Sequence[Cell]) -> dict[str, tuple[list[int], list[float]]]:
    """Return each variant's steps and mean rewards, over the seeds that have the step."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell in done:
        by_step = found.setdefault(cell.name, {})
        for row in read_metrics(cell.folder):
            if row.get("reward") is not None:
                by_step.setdefault(int(row["step"]), []).append(float(row["reward"]))
    return {
        name: (sorted(by_step), [float(np.mean(by_step[step])) for step in sorted(by_step)])
        for name, by_step in found.items()
    }


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds; deviation nan for one seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        known = [v for v in values if not math.isnan(v)]
        if not known:
            return cls(math.nan, math.nan)
        deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
        return cls(float(np.mean(known)), deviation)


def by_variant(rows: Sequence[Mapping[str, float | str | int]]) -> dict[str, dict[str, Spread]]:
    """Return each variant's columns over its seeds, in the order of the rows."""
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    return {
        name: {
            column: Spread.of([float(row[column]) for row in rows if row["name"] == name])
            for column in COLUMNS[2:]
        }
        for name in names
    }


def markdown(spreads: Spreads) -> str:
    """Return a table with a row per variant: mean ± deviation over seeds, and ratios to the first.

    Columns without a value, or with zeros alone, are left out.
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
    """Return the value as it is shown, with 0 for nan."""
    return 0.0 if math.isnan(value) else round(value, DIGITS.get(column, 4))


def figure(spreads: Spreads, curves: Curves, path: Path) -> None:
    """Draw tokens, seconds and reward of every variant, with deviations, and reward by step."""
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
