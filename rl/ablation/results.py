"""The results of a grid: a row for each run, means and deviations over seeds, and a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from reprise.rl.ablation.grid import Cell
from reprise.rl.metrics.writer import Row, read_metrics, step_rows

COLUMNS = (
    *("name", "seed", "epochs", "generated_tokens", "rollout_s", "tail_s", "step_s", "verify_s"),
    *("tokens_per_round", "final_reward"),
    *("eval_reward", "eval_pass"),
    *("reused_fraction", "clip_fraction", "kl", "entropy", "distinct_1", "self_bleu"),
)
MEANS = {  # columns that are means over steps, with their metrics
    "clip_fraction": "clip_ratio/region_mean",
    "kl": "mismatch_kl",
    "entropy": "entropy",
    "distinct_1": "diversity/distinct_1",
    "self_bleu": "diversity/self_bleu",
}
PASS = "eval/pass@"
DIGITS = {
    **{"generated_tokens": 0, "tokens_per_round": 2},
    **{"rollout_s": 1, "tail_s": 1, "step_s": 1, "verify_s": 1},
    "epochs": 1,
    "clip_fraction": 5,
}
LEGEND = (
    "Mean ± deviation over seeds. tokens: generated, relative to the first row; speedup: the first "
    "row's rollout seconds over the row's; final_reward is the mean of the last epoch, or of all "
    "steps if there was less than one; eval_reward and eval_pass are mean reward and pass@k (the "
    "largest k) of the last evaluation, over all sets."
)
NOTES = {
    "tail_s": "tail_s, the seconds after nine tenths of a step's requests, is part of rollout_s.",
    "verify_s": "verify_s is part of rollout_s.",
    "tokens_per_round": "tokens_per_round is a request's, in rounds with draft tokens.",
    "reused_fraction": "reused_fraction is from the second epoch on.",
    "kl": "kl is trainer against sampler.",
}
PANELS = (  # (column, title, relative to the first variant)
    ("generated_tokens", "Generated tokens (first = 1)", True),
    ("rollout_s", "Rollout seconds (first = 1)", True),
    ("final_reward", "Reward, last epoch or whole run", False),
)


Spread = tuple[float, float]  # mean over seeds, sample deviation (nan for one seed)
Spreads = Mapping[str, Mapping[str, Spread]]  # by variant and column


def read_cell(cell: Cell, num_examples: int) -> dict[str, float | str | int]:
    """Return the table row of a run, by `COLUMNS`; nan for metrics that the run does not have.

    Tokens and seconds are sums over all steps; the final reward is the mean over the last epoch.
    """
    every = read_metrics(cell.folder)
    rows = step_rows(every)
    # dynamic sampling takes a varying number of prompts
    per_step = float(cell.config.rollout.prompts_per_step)
    prompts = [float(row.get("dynamic_sampling/generated_groups") or per_step) for row in rows]
    ends = np.cumsum(prompts)
    begins = ends - prompts
    later = [row for row, begin in zip(rows, begins, strict=True) if begin >= num_examples]
    last = [row for row, end in zip(rows, ends, strict=True) if end > ends[-1] - num_examples]
    passes = {name for row in every for name in row if re.fullmatch(PASS + "[0-9]{1,9}", name)}
    return {
        "name": cell.name,
        "seed": cell.seed,
        "epochs": round(sum(prompts) / num_examples, 2),
        "generated_tokens": _total(rows, "rollout/generated_tokens"),
        "rollout_s": _total(rows, "time/rollout") if "time/rollout" in rows[0] else math.nan,
        "tail_s": _total(rows, "rollout/tail_s"),
        "step_s": _total(rows, "step_time"),
        "verify_s": _total(rows, "spec/cached_seconds"),
        "tokens_per_round": _mean(rows, "spec/tokens_per_round"),
        "final_reward": _mean(last, "reward"),
        "eval_reward": _last(every, ["eval/mean_reward"]),
        "eval_pass": _last(every, sorted(passes, key=lambda name: int(name[len(PASS) :]))),
        "reused_fraction": _mean(later, "spec/reused_fraction"),
        **{column: _mean(rows, metric) for column, metric in MEANS.items()},
    }


def _total(rows: Sequence[Row], metric: str) -> float:
    return float(sum(float(row.get(metric) or 0.0) for row in rows))


def _last(rows: Sequence[Row], metrics: Sequence[str]) -> float:
    """Return the newest value of the last metric in `metrics`."""
    values = [row[name] for name in metrics[-1:] for row in rows if row.get(name) is not None]
    return float(values[-1]) if values else math.nan


def _mean(rows: Sequence[Row], metric: str) -> float:
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    return float(np.mean(values)) if values else math.nan


def reward_curves(done: Sequence[Cell]) -> dict[str, dict[int, float]]:
    """Return mean rewards by variant and step, over the seeds that have the step."""
    rewards: dict[str, dict[int, list[float]]] = {cell.name: {} for cell in done}
    for cell in done:
        for row in read_metrics(cell.folder):
            if row.get("reward") is not None:
                rewards[cell.name].setdefault(row["step"], []).append(row["reward"])
    return {
        name: {step: float(np.mean(by_step[step])) for step in sorted(by_step)}
        for name, by_step in rewards.items()
    }


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample deviation of the known values."""
    known = [v for v in values if not math.isnan(v)]
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return float(np.mean(known)) if known else math.nan, deviation


def by_variant(rows: Sequence[Mapping[str, float | str | int]]) -> dict[str, dict[str, Spread]]:
    """Return the spread of each column by variant, over its seeds, in the order of the rows."""
    table: dict[str, dict[str, Spread]] = {}
    for name in dict.fromkeys(str(row["name"]) for row in rows):
        own = [row for row in rows if row["name"] == name]
        table[name] = {c: spread([float(row[c]) for row in own]) for c in COLUMNS[2:]}
    return table


def markdown(spreads: Spreads) -> str:
    """Return a table with a row per variant: mean ± deviation over seeds, and ratios to the first.

    Columns without values, or with only zeros, are left out.
    """
    digits = {column: DIGITS.get(column, 4) for column in COLUMNS[2:]}
    shown = [
        column
        for column, d in digits.items()
        if any(round(mean, d) for row in spreads.values() if not math.isnan(mean := row[column][0]))
    ]
    lines = [["name", "tokens", "speedup", *shown], ["---"] * (len(shown) + 3)]
    first = next(iter(spreads.values()))
    for name, row in spreads.items():
        tokens = _ratio(row["generated_tokens"][0], first["generated_tokens"][0])
        speedup = _ratio(first["rollout_s"][0], row["rollout_s"][0])
        times = "" if math.isnan(speedup) else f"{speedup:.2f}×"  # rollouts that ran ahead
        values = [_value(row[column], digits[column]) for column in shown]
        lines.append([name.replace("|", "\\|"), f"{tokens:.2f}", times, *values])
    notes = " ".join([LEGEND, *(note for column, note in NOTES.items() if column in shown)])
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", notes, ""])


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _value(spread: Spread, digits: int) -> str:
    mean, deviation = ("" if math.isnan(x) else f"{x:.{digits}f}" for x in spread)
    return f"{mean} ± {deviation}" if deviation else mean


def figure(spreads: Spreads, curves: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draw tokens, seconds and reward of every variant, with deviations, and reward by step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from reprise.rl.reports.style import INK, RUN_COLORS, STYLE, plain_text, run_look, step_axis

    names = list(spreads)
    with rc_context(STYLE):
        bars_inch = 1.2 + 0.36 * len(names)
        picture = Figure(figsize=(11, bars_inch + 3.6), layout="constrained")
        above, below = picture.subfigures(2, 1, height_ratios=(bars_inch, 3.6))
        axes = above.subplots(1, len(PANELS), sharey=True)
        for axis, (column, title, is_relative) in zip(axes, PANELS, strict=True):
            base = spreads[names[0]][column][0] if is_relative else 1.0
            means, errors = ([_ratio(spreads[n][column][i], base) for n in names] for i in (0, 1))
            colors = [RUN_COLORS[-1], *[RUN_COLORS[0]] * (len(names) - 1)]
            lines = {"xerr": np.nan_to_num(errors), "ecolor": INK}
            axis.barh(range(len(names)), means, color=colors, **lines)
            axis.set_title(title)
            axis.grid(axis="y", visible=False)
        axes[0].set_yticks(range(len(names)), [plain_text(n, 28) for n in names])
        axes[0].invert_yaxis()
        curve = below.subplots()
        for index, (name, rewards) in enumerate(curves.items()):
            color, style = run_look(index)
            look = {"color": color, "label": plain_text(name, 28)}
            curve.plot(list(rewards), list(rewards.values()), style, **look)
        curve.set_title("Reward by step, mean over seeds")
        step_axis(curve)
        curve.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        picture.savefig(path)
