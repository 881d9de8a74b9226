"""The picture of one rollout: when and how fast each request ran, and how many were alive."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.rl.records.stats import RoundRecord
from reprise.rl.reports.style import legend_below, run_look, titles

if TYPE_CHECKING:
    from reprise.rl.reports.runs import Run

BAR_COLORS = ("#BBBBBB", "#A6CFE8", "#56A0CC", "#0072B2", "#00416A")
BAR_LABELS = ("1 token per round", "2", "3–4", "5–8", "9 or more")


@dataclasses.dataclass(frozen=True)
class RolloutTimeline:
    """A panel of the last recorded rollout: a bar per request of one run, or requests alive."""

    file: str = "rollout.png"
    title: str = "Rollout"
    caption: str = (
        "Requests of the last recorded rollout; the number alive dips when a slot passes from one "
        "request to the next."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.timeline for run in runs)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        titles(ax, self.title)
        ax.set_xlabel("seconds since the rollout began")
        if len(runs) == 1:
            self._bars(ax, runs[0])
            return
        for index, run in enumerate(runs):
            if run.timeline:
                _draw_alive(ax, run.timeline, *run_look(index))
        ax.set_ylabel("requests alive")
        ax.set_ylim(bottom=0)

    def _bars(self, ax: Any, run: Run) -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.patches import Patch

        line_of = request_lines(run.timeline)
        lines = []
        colors = []
        for r in run.timeline:
            start_s, end_s = _span(run.timeline, r)
            tokens_A = np.rint(r.emitted_A / np.maximum(r.rounds_A, 1)).astype(int)
            for request_id, tokens in zip(r.request_ids_A.tolist(), tokens_A, strict=True):
                y = line_of[request_id]
                lines.append([(start_s, y), (end_s, y)])
                colors.append(bar_color(tokens))
        width = min(max(0.6, 150 / max(len(line_of), 1)), 6)
        ax.add_collection(LineCollection(lines, colors=colors, linewidths=width))
        ax.set_ylim(len(line_of) - 0.5, -0.5)
        ax.set_xlim(0, max(_span(run.timeline, r)[1] for r in run.timeline) or 1)
        ax.set_ylabel("one line per request, by start and end")
        ax.grid(visible=False)
        right = ax.twinx()
        _draw_alive(right, run.timeline, "#D55E00", "-")
        right.set_ylim(bottom=0)
        right.set_ylabel("requests alive (line)", color="#D55E00")
        right.grid(visible=False)
        right.spines["right"].set_visible(False)
        labels = zip(BAR_COLORS, BAR_LABELS, strict=True)
        patches = [Patch(color=color, label=label) for color, label in labels if color in colors]
        legend_below(ax, 5, handles=patches)
        titles(ax, self.title, f"step {run.timeline_step}")


def request_lines(rounds: Sequence[RoundRecord]) -> dict[int, int]:
    """Return the line of each request id, ordered by first round, then by last round."""
    ends: dict[int, tuple[int, int]] = {}
    for i, r in enumerate(rounds):
        for request_id in r.request_ids_A.tolist():
            ends[request_id] = ends.get(request_id, (i, i))[0], i
    return {r: line for line, r in enumerate(sorted(ends, key=lambda r: (*ends[r], r)))}


def bar_color(tokens: int) -> str:
    """Return the color of a round that gave a request `tokens` tokens."""
    return BAR_COLORS[min(max(int(tokens) - 1, 0).bit_length(), len(BAR_COLORS) - 1)]


def requests_alive(rounds: Sequence[RoundRecord]) -> tuple[list[float], list[int]]:
    """Return times since the start of the rollout, and the number of requests alive from each time.

    A request is alive from its first round to its last, on any worker.
    """
    spans: dict[int, tuple[float, float]] = {}
    for r in rounds:
        start_s, end_s = _span(rounds, r)
        for request_id in r.request_ids_A.tolist():
            first_s, last_s = spans.get(request_id, (start_s, end_s))
            spans[request_id] = min(first_s, start_s), max(last_s, end_s)
    changes: collections.Counter[float] = collections.Counter()
    for start_s, end_s in spans.values():
        changes[start_s] += 1
        changes[end_s] -= 1
    times_s = sorted(changes)
    return times_s, list(itertools.accumulate(changes[t] for t in times_s))


def _span(rounds: Sequence[RoundRecord], r: RoundRecord) -> tuple[float, float]:
    return r.began_s - rounds[0].began_s, r.ended_s - rounds[0].began_s


def _draw_alive(ax: Any, rounds: Sequence[RoundRecord], color: str, style: str) -> None:
    ax.step(*requests_alive(rounds), where="post", color=color, linestyle=style, linewidth=1.4)
