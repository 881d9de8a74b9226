"""The picture of one rollout: when each request ran, among how many, and how fast."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.engine.stats import RoundRecord
from rl.reports.style import FAINT, INK, run_look

if TYPE_CHECKING:
    from rl.reports.runs import Run

PLAIN_COLOR = "#BBBBBB"
BAR_COLORS = ("#A6CFE8", "#56A0CC", "#0072B2", "#00416A")  # 2, 3–4, 5–8 and more tokens per round
BAR_LABELS = ("1 token per round", "2", "3–4", "5–8", "9 or more")


@dataclasses.dataclass(frozen=True)
class RolloutTimeline:
    """A panel of the last recorded rollout, compilation and prompts included.

    For one run it draws a bar per request, coloured by tokens per round, for several runs the
    number of requests alive.
    """

    file: str = "rollout.png"
    title: str = "Rollout"
    caption: str = (
        "Requests of the last recorded rollout; the number alive dips where a slot passes from one "
        "request to the next."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.timeline for run in runs)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        ax.set_title(self.title)
        ax.set_xlabel("seconds since the rollout began")
        if len(runs) == 1:
            self._bars(ax, runs[0])
            return
        for index, run in enumerate(runs):
            if run.timeline:
                color, style = run_look(index)
                _draw_alive(ax, run.timeline, color, style)
        ax.set_ylabel("requests alive")
        ax.set_ylim(bottom=0)

    def _bars(self, ax: Any, run: Run) -> None:
        from matplotlib.collections import LineCollection
        from matplotlib.patches import Patch

        line_of = request_lines(run.timeline)
        lines, colors = [], []
        for r in run.timeline:
            began_s, ended_s = _span(run.timeline, r)
            per_round = np.rint(r.emitted_A / np.maximum(r.rounds_A, 1))
            for request_id, tokens in zip(
                r.request_ids_A.tolist(), per_round.tolist(), strict=True
            ):
                y = line_of[request_id]
                lines.append([(began_s, y), (ended_s, y)])
                colors.append(bar_color(int(tokens)))
        height = max(0.6, 150 / max(len(line_of), 1))
        ax.add_collection(LineCollection(lines, colors=colors, linewidths=min(height, 6)))
        ax.set_ylim(len(line_of) - 0.5, -0.5)
        ax.set_xlim(0, max(_span(run.timeline, r)[1] for r in run.timeline) or 1)
        ax.set_ylabel("one line per request, by start and end")
        ax.grid(visible=False)
        beside = ax.twinx()
        _draw_alive(beside, run.timeline, "#D55E00", "-")
        beside.set_ylim(bottom=0)
        beside.set_ylabel("requests alive (line)", color="#D55E00")
        beside.grid(visible=False)
        beside.spines["right"].set_visible(False)
        colors_used = dict.fromkeys(colors)
        patches = [
            Patch(color=color, label=label)
            for color, label in zip((PLAIN_COLOR, *BAR_COLORS), BAR_LABELS, strict=True)
            if color in colors_used
        ]
        ax.legend(
            handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, fontsize=8,
            handlelength=1, handleheight=1, columnspacing=1.2, labelcolor=INK,
        )  # fmt: skip
        ax.set_title(f"step {run.timeline_step}", loc="right", color=FAINT, fontsize=8)


def request_lines(rounds: Sequence[RoundRecord]) -> dict[int, int]:
    """Return the line of each request id: ordered by first round, then by last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, r in enumerate(rounds):
        for request_id in r.request_ids_A.tolist():
            first.setdefault(request_id, i)
            last[request_id] = i
    order = sorted(first, key=lambda request_id: (first[request_id], last[request_id], request_id))
    return {request_id: line for line, request_id in enumerate(order)}


def bar_color(tokens: int) -> str:
    """Return the colour of a round that gave a request `tokens` tokens."""
    if tokens <= 1:
        return PLAIN_COLOR
    return BAR_COLORS[min((tokens - 1).bit_length() - 1, len(BAR_COLORS) - 1)]


def _span(rounds: Sequence[RoundRecord], r: RoundRecord) -> tuple[float, float]:
    start_s = rounds[0].began_s
    return r.began_s - start_s, r.ended_s - start_s


def _draw_alive(ax: Any, rounds: Sequence[RoundRecord], color: str, style: str) -> None:
    times_s, alive = requests_alive(rounds)
    ax.step(times_s, alive, where="post", color=color, linestyle=style, linewidth=1.4)


def requests_alive(rounds: Sequence[RoundRecord]) -> tuple[list[float], list[int]]:
    """Return seconds since the rollout began, and the number of requests alive from then on.

    A request is alive from its first round to its last, on any worker.
    """
    spans: dict[int, tuple[float, float]] = {}
    for r in rounds:
        began_s, ended_s = _span(rounds, r)
        for request_id in r.request_ids_A.tolist():
            first_s, last_s = spans.get(request_id, (began_s, ended_s))
            spans[request_id] = min(first_s, began_s), max(last_s, ended_s)
    changes: collections.Counter[float] = collections.Counter()
    for began_s, ended_s in spans.values():
        changes[began_s] += 1
        changes[ended_s] -= 1
    times_s = sorted(changes)
    return times_s, list(itertools.accumulate(changes[t] for t in times_s))
