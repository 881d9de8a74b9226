"""The comparison of several runs: seconds, tokens and rewards, as ratios to the first run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reprise.rl.reports.evaluations import ALL, figures_of, metric, with_bounds
from reprise.rl.reports.runs import Run
from reprise.rl.reports.style import number

NOTE = (
    "Over the steps that all of these runs have; of evaluations the last, with its 95% interval "
    "over questions. In parentheses: the ratio to the first run; of seconds, less is faster."
)
SUMS = {
    "rollout s": "time/rollout",
    "step s": "step_time",
    "generated tokens": "rollout/generated_tokens",
}


def comparison(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row per run, [] for one run: sums over common steps, mean reward, last evaluations.

    The sums and the mean reward cover the steps that all runs have.
    """
    if len(runs) < 2:
        return []
    common = set.intersection(*(set(run.steps.tolist()) for run in runs))
    values = [_values(run, common) for run in runs]
    names = list(dict.fromkeys(name for row in values for name in row))
    return [
        {"run": run.label, "steps": f"{len(common):,}"}
        | {name: _cell(row.get(name), values[0].get(name)) for name in names}
        for run, row in zip(runs, values, strict=True)
    ]


Value = tuple[float, str]  # a number, and its interval as text


def _values(run: Run, common: set[float]) -> dict[str, Value]:
    is_common = np.isin(run.steps, list(common))
    result: dict[str, Value] = {}
    for name, source in SUMS.items():
        seconds = run.series(source)[is_common]
        if np.isfinite(seconds).any():
            result[name] = float(np.nansum(seconds)), ""
    rewards = run.series("reward")[is_common]
    if np.isfinite(rewards).any():
        result["mean reward"] = float(np.nanmean(rewards)), ""
    figures = figures_of(run)
    for name in [ALL] if ALL in figures else list(figures):
        for figure in figures[name]:
            value, low, high = (x[np.isfinite(x)][-1:] for x in with_bounds(run, name, figure))
            interval = f" [{number(low[0])}, {number(high[0])}]" if len(low) and len(high) else ""
            result[metric(name, figure)] = float(value[0]), interval
    return result


def _cell(value: Value | None, first: Value | None) -> str:
    if value is None:
        return ""
    text = number(value[0]) + value[1]
    return text if first is None or first[0] <= 0 else f"{text} ({value[0] / first[0]:.2f})"
