"""The summary of a run in a few lines: time by part, and accepted drafts."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from reprise.rl.metrics.writer import Row


def summary_lines(rows: Sequence[Row], evals: Sequence[Row] = ()) -> list[str]:
    """Return a line on time, and a line on drafts if the run could draft.

    `rows` are rows of training steps, `evals` are rows with an evaluation.
    """
    step_s = _total(rows, "step_time")
    if not step_s:
        return []
    seconds = collections.Counter[str]()
    for row in rows:
        parts = {name.removeprefix("time/"): name for name in row if name.startswith("time/")}
        seconds.update({part: _number(row[name]) for part, name in parts.items()})
    shares = ", ".join(f"{part} {s / step_s:.0%}" for part, s in seconds.most_common())
    lines = [f"time: {duration(step_s)} in {len(rows):,} steps ({shares})"]
    if eval_s := _total(evals, "eval_s"):
        lines[0] += f", {duration(eval_s)} in evaluations"
    if any("spec/seconds_saved" in row for row in rows):
        rounds_s = seconds["rollout"] - _total(rows, "spec/disturbed_seconds")
        lines.append(_drafts_line(rows, rounds_s))
    return lines


def _drafts_line(rows: Sequence[Row], rollout_s: float) -> str:
    accepted = _total(rows, "spec/accepted_tokens")
    saved_s = _total(rows, "spec/seconds_saved")
    reused = sum(
        _number(row.get("spec/verified_prefix_tokens")) * _number(row.get("spec/cached_responses"))
        for row in rows
    )
    tokens = _total(rows, "rollout/generated_tokens") + reused
    if not any("spec/accept_rate" in row for row in rows) and not accepted and not reused:
        return (
            "drafts: none were verified; they pay if rounds of several tokens cost little "
            "more than rounds of one, and if text repeats (docs/will_it_help.md)"
        )
    text = f"drafts: {accepted / max(tokens, 1):.0%} of {tokens:,.0f} response tokens were accepted"
    text += f" draft tokens, {reused / tokens:.0%} were reused" if reused else " draft tokens"
    verb = "saved" if saved_s >= 0 else "lost"
    plain_s = rollout_s + saved_s
    text += f"; by measured rounds drafts {verb} about {duration(abs(saved_s))}"
    if any(name.startswith("workers/") for row in rows for name in row):
        return f"{text}, summed over workers"  # since rollouts overlap
    return text + (f", {abs(saved_s) / plain_s:.0%} of plain rollouts" if plain_s > 0 else "")


def duration(seconds: float) -> str:
    """Return seconds as text: 0.4 s, 41 s, 9 min 31 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    seconds = round(seconds) if seconds < 1e9 else seconds
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:,.0f} min {seconds % 60:.0f} s"


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(_number(row.get(name)) for row in rows)


def _number(value: Any) -> float:
    """Return a metric as a number; 0 if not a number or implausibly large."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else 0.0
