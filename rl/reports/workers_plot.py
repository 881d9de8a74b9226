"""The picture of the workers of a run: busy times by weight version, joins and losses."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.rl.records.worker_record import WorkerEvent, WorkerPart, WorkerStep
from reprise.rl.reports.style import INK, RUN_COLORS, legend_below, plain_text, run_look, titles

if TYPE_CHECKING:
    from reprise.rl.reports.runs import Run

Span = tuple[float, float]
MAX_NAMED = 16  # lanes with worker names
MAX_LEGEND = len(RUN_COLORS)  # versions
BINS = 900  # of the time axis
IDLE_COLOR = "#E9E9E9"
JOINED_COLOR = "#1B7837"
LOST_COLOR = "#B2182B"


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Steps of a run on one time axis; each leg follows the previous leg without a gap."""

    parts: list[WorkerPart]
    events: list[WorkerEvent]
    ends_s: list[float]  # of steps
    resumed_s: list[float]
    lane_of: dict[str, int]

    @functools.cached_property
    def end_s(self) -> float:
        busy = (end_s for part in self.parts for _, end_s in part.busy_s)
        return max([*self.ends_s, *busy], default=0.0) or 1.0

    @functools.cached_property
    def colors(self) -> dict[int, str]:
        """Colors by weight version, in order and with repetition."""
        versions = sorted({part.version for part in self.parts})
        return {v: RUN_COLORS[i % len(RUN_COLORS)] for i, v in enumerate(versions)}

    @property
    def lost(self) -> list[WorkerEvent]:
        return [event for event in self.events if event.kind != "joined"]

    @functools.cached_property
    def late(self) -> list[WorkerEvent]:
        """Joins after the first round of a leg."""
        rounds_s = np.sort([start_s for part in self.parts for start_s, _ in part.busy_s])
        late = []
        for event in (e for e in self.events if e.kind == "joined"):
            resume_s = max([0.0, *(t for t in self.resumed_s if t <= event.at_s)])
            first_s = next(iter(rounds_s[np.searchsorted(rounds_s, resume_s) :]), resume_s)
            if event.at_s > first_s + 0.02 * (self.end_s - resume_s):
                late.append(event)
        return late

    def present_s(self) -> dict[str, list[Span]]:
        """Return the spans when each worker was present; a resumed run has new workers."""
        spans: dict[str, list[Span]] = {name: [] for name in self.lane_of}
        for name, own in spans.items():
            changes = [(e.at_s, e.kind == "joined") for e in self.events if e.name == name]
            since_s = None if changes else 0.0
            changes += [(t, False) for t in (*self.resumed_s, self.end_s)]
            for at_s, joined in sorted(changes):
                if joined and since_s is None:
                    since_s = at_s
                elif not joined and since_s is not None:
                    own.append((since_s, at_s))
                    since_s = None
        return spans


@dataclasses.dataclass(frozen=True)
class WorkersTimeline:
    """A panel of the workers: a lane per worker of one run, or the number of busy workers."""

    file: str = "workers.png"
    title: str = "Workers"
    caption: str = (
        "Rounds of each rollout worker, colored by the step whose weights it ran, and steps of "
        "workers that draft for others; gray lanes are idle, blank ones absent."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.workers for run in runs)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        titles(ax, self.title)
        ax.set_xlabel("seconds since the first rollout")
        ax.grid(visible=False)
        if len(runs) == 1:
            lanes = lanes_of(runs[0].workers)
            self._lanes(ax, lanes)
            self._events(ax, lanes)
            return
        for index, run in enumerate(runs):
            if run.workers:
                color, style = run_look(index)
                ax.plot(*workers_busy(lanes_of(run.workers)), style, color=color, linewidth=1.2)
        ax.set_ylabel("workers in rounds")
        ax.set_ylim(bottom=0)

    def _lanes(self, ax: Any, lanes: Lanes) -> None:
        n = len(lanes.lane_of)
        half = 0.4 if n <= MAX_NAMED else 0.5

        def boxes(name: str, spans: Sequence[Span], color: str) -> None:
            lengths = [(start_s, end_s - start_s) for start_s, end_s in spans]
            ax.broken_barh(lengths, (lanes.lane_of[name] - half, 2 * half), color=color, lw=0)

        for name, spans in lanes.present_s().items():
            boxes(name, spans, IDLE_COLOR)
        for part in lanes.parts:
            boxes(part.name, part.busy_s, lanes.colors[part.version])
        ax.set_xlim(0, lanes.end_s)
        ax.set_ylim(n - 0.5, -0.5)
        if n <= MAX_NAMED:
            ax.set_yticks(range(n), [plain_text(name, 24) for name in lanes.lane_of])
            ax.tick_params(axis="y", length=0)
        else:
            ax.set_ylabel(f"{n:,} workers, a line each")
            ax.set_yticks([])
        ax.spines["left"].set_visible(False)

    def _events(self, ax: Any, lanes: Lanes) -> None:
        from matplotlib.patches import Patch

        if len(lanes.ends_s) <= 40:
            for end_s in lanes.ends_s[:-1]:
                ax.axvline(end_s, color="#888888", linewidth=0.7, linestyle=(0, (1, 3)))
        handles: list[Any] = []
        if len(lanes.colors) <= MAX_LEGEND:
            handles += [Patch(color=c, label=_weights(v)) for v, c in lanes.colors.items()]
        for i, start_s in enumerate(lanes.resumed_s):
            line = ax.axvline(start_s, color=INK, linewidth=1.0, ls="--", label="resumed")
            handles += [line] if not i else []
        look: dict[str, Any] = {
            "ls": "",
            "markersize": 7,
            "markeredgecolor": "white",
            "clip_on": False,
        }
        marks = (lanes.lost, "X", LOST_COLOR, "lost"), (lanes.late, ">", JOINED_COLOR, "joined")
        for events, marker, color, label in marks:
            if events:
                ys = [lanes.lane_of[event.name] for event in events]
                look |= {"marker": marker, "color": color, "label": label}
                handles += ax.plot([event.at_s for event in events], ys, zorder=4, **look)
        look = {"textcoords": "offset points", "fontsize": 7, "color": LOST_COLOR, "va": "center"}
        for event in lanes.lost if len(lanes.lane_of) <= MAX_NAMED else ():
            moved = f": {event.requests} requests moved on" if event.requests else ""
            ax.annotate(event.kind + moved, (event.at_s, lanes.lane_of[event.name]), (7, 0), **look)
        lost = len(lanes.lost)
        late = len(lanes.late)
        counts = f"{len(lanes.lane_of):,} workers, {len(lanes.ends_s)} steps"
        titles(ax, self.title, f"{counts}, {lost} lost, {late} joined later")
        legend_below(ax, 4, handles=handles)


def lanes_of(rows: Sequence[WorkerStep]) -> Lanes:
    """Return the steps of a run on one axis."""
    parts = []
    events = []
    ends_s = list[float]()
    resumed_s = list[float]()
    offset_s = 0.0
    leg = rows[0].leg
    for row in rows:
        if row.leg != leg:
            offset_s = ends_s[-1]
            leg = row.leg
            resumed_s.append(offset_s)
        for part in row.parts:
            spans = tuple((start + offset_s, end + offset_s) for start, end in part.busy_s)
            parts.append(dataclasses.replace(part, busy_s=spans))
        events += [dataclasses.replace(e, at_s=e.at_s + offset_s) for e in row.events]
        ends_s.append(max([row.ended_s + offset_s, *ends_s[-1:]]))

    def natural(name: str) -> list[tuple[str, int]]:  # worker 10 comes after worker 9
        return [(text, int(d or -1)) for text, d in re.findall("([^0-9]*)([0-9]*)", name)]

    names = sorted({p.name for p in parts} | {e.name for e in events}, key=natural)
    return Lanes(parts, events, ends_s, resumed_s, {name: i for i, name in enumerate(names)})


def workers_busy(lanes: Lanes) -> tuple[np.ndarray, np.ndarray]:
    """Return times, and the mean number of busy workers around each time; float64 [BINS] each."""
    edges = np.linspace(0, lanes.end_s, BINS + 1)
    spans = np.array([span for part in lanes.parts for span in part.busy_s]).reshape(-1, 2)

    def elapsed_s(points: np.ndarray) -> np.ndarray:
        """Return, for each edge, the sum of the seconds since all earlier points."""
        sums = np.concatenate([[0.0], np.cumsum(np.sort(points))])
        counts = np.searchsorted(np.sort(points), edges)
        return counts * edges - sums[counts]

    busy_s = np.diff(elapsed_s(spans[:, 0]) - elapsed_s(spans[:, 1]))
    return (edges[1:] + edges[:-1]) / 2, busy_s / np.diff(edges)


def _weights(version: int) -> str:
    return f"weights after step {version}" if version else "initial weights"
