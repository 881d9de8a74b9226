"""The picture of a run's workers: their busy times by version of the weights, joins and losses."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.engine.worker_record import WorkerEvent, WorkerPart, WorkerStep
from rl.reports.style import FAINT, INK, legend_below, plain_text, run_look, titles

if TYPE_CHECKING:
    from rl.reports.runs import Run

Span = tuple[float, float]
MAX_NAMED = 16  # lanes with the worker's name each
MAX_LEGEND = 8  # versions; more have a scale
BINS = 900  # of the time axis
VERSION_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#8C6BB1"),
)
IDLE_COLOR, JOINED_COLOR, LOST_COLOR = "#E9E9E9", "#1B7837", "#B2182B"


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Steps of a run on one axis: each leg follows the one before without a gap."""

    parts: list[WorkerPart]
    events: list[WorkerEvent]
    ends_s: list[float]  # of steps
    resumed_s: list[float]
    lane_of: dict[str, int]

    @functools.cached_property
    def end_s(self) -> float:
        busy = (end_s for part in self.parts for _, end_s in part.busy_s)
        return max([*self.ends_s, *busy], default=0.0) or 1.0

    @property
    def lost(self) -> list[WorkerEvent]:
        return [event for event in self.events if event.kind != "joined"]

    def present_s(self) -> dict[str, list[Span]]:
        """Return when each worker was present; a resumed run has none of the workers of before."""
        changes: dict[str, list[tuple[float, bool]]] = {name: [] for name in self.lane_of}
        for event in self.events:
            changes[event.name].append((event.at_s, event.kind == "joined"))
        spans: dict[str, list[Span]] = {}
        for name, own in changes.items():
            since_s = None if own else 0.0
            spans[name] = []
            own += [(t, False) for t in self.resumed_s]
            for at_s, joined in [*sorted(own), (self.end_s, False)]:
                if joined and since_s is None:
                    since_s = at_s
                elif not joined and since_s is not None:
                    spans[name].append((since_s, at_s))
                    since_s = None
        return spans

    @functools.cached_property
    def late(self) -> list[WorkerEvent]:
        """The joins after the first round of their leg."""
        rounds_s = sorted(start_s for part in self.parts for start_s, _ in part.busy_s)
        late = []
        for event in (e for e in self.events if e.kind == "joined"):
            leg_s = max([0.0, *(t for t in self.resumed_s if t <= event.at_s)])
            place = bisect.bisect_left(rounds_s, leg_s)
            first_s = rounds_s[place] if place < len(rounds_s) else leg_s
            if event.at_s > first_s + 0.02 * (self.end_s - leg_s):
                late.append(event)
        return late


@dataclasses.dataclass(frozen=True)
class WorkersTimeline:
    """A panel of the workers: for one run a lane each, for several runs the number at work."""

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
            self._legend(ax, lanes)
            return
        for index, run in enumerate(runs):
            if run.workers:
                color, style = run_look(index)
                ax.plot(*workers_busy(lanes_of(run.workers)), style, color=color, linewidth=1.2)
        ax.set_ylabel("workers in rounds")
        ax.set_ylim(bottom=0)

    def _lanes(self, ax: Any, lanes: Lanes) -> None:
        colors = version_colors({part.version for part in lanes.parts})
        boxes = [
            (lanes.lane_of[n], s, IDLE_COLOR) for n, ss in lanes.present_s().items() for s in ss
        ]
        for part in lanes.parts:
            boxes += [(lanes.lane_of[part.name], s, colors[part.version]) for s in part.busy_s]
        n = len(lanes.lane_of)
        _draw_boxes(ax, boxes, 0.4 if n <= MAX_NAMED else 0.5)
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
        if len(lanes.ends_s) <= 40:
            for end_s in lanes.ends_s[:-1]:
                ax.axvline(end_s, color="#888888", linewidth=0.7, linestyle=(0, (1, 3)))
        for start_s in lanes.resumed_s:
            ax.axvline(start_s, color=INK, linewidth=1.0, linestyle="--")
        is_named = len(lanes.lane_of) <= MAX_NAMED
        look: dict[str, Any] = {"markersize": 7 if is_named else 5, "markeredgecolor": "white"}
        look |= {"markeredgewidth": 0.8, "clip_on": False, "zorder": 4}
        free_s: dict[int, float] = {}  # by lane: the end of the last text
        for event in lanes.lost:
            y = lanes.lane_of[event.name]
            ax.plot(event.at_s, y, "X", color=LOST_COLOR, **look)
            if is_named and event.at_s >= free_s.get(y, -1.0):
                free_s[y] = _write_loss(ax, event, y, lanes.end_s)
        for event in lanes.late:
            ax.plot(event.at_s, lanes.lane_of[event.name], ">", color=JOINED_COLOR, **look)

    def _legend(self, ax: Any, lanes: Lanes) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        lost, late = len(lanes.lost), len(lanes.late)
        counts = f"{len(lanes.lane_of):,} workers, {len(lanes.ends_s)} steps"
        titles(ax, self.title, f"{counts}, {lost} lost, {late} joined later")
        colors = version_colors({part.version for part in lanes.parts})
        handles: list[Any] = []
        if len(colors) <= MAX_LEGEND:
            handles += [Patch(color=color, label=_weights(v)) for v, color in colors.items()]
        else:
            scale = Normalize(min(colors) - 0.5, max(colors) + 0.5)
            table = ScalarMappable(scale, ListedColormap(list(colors.values())))
            bar = ax.figure.colorbar(table, ax=ax, pad=0.02, aspect=25)
            bar.set_label("weights after step", color=FAINT)
            bar.outline.set_visible(False)
        marks = (
            (lost, {"color": LOST_COLOR, "marker": "X", "ls": "", "label": "lost"}),
            (late, {"color": JOINED_COLOR, "marker": ">", "ls": "", "label": "joined"}),
            (lanes.resumed_s, {"color": INK, "ls": "--", "label": "resumed"}),
        )
        handles += [Line2D([], [], **look) for is_shown, look in marks if is_shown]
        legend_below(ax, 4, handles=handles)


def lanes_of(rows: Sequence[WorkerStep]) -> Lanes:
    """Return the steps of a run on one axis."""
    parts, events, ends_s, resumed_s = [], [], list[float](), list[float]()
    offset_s, leg = 0.0, rows[0].leg
    for row in rows:
        if row.leg != leg:
            offset_s, leg = ends_s[-1], row.leg
            resumed_s.append(offset_s)
        for part in row.parts:
            spans = tuple((start + offset_s, end + offset_s) for start, end in part.busy_s)
            parts.append(dataclasses.replace(part, busy_s=spans))
        events += [dataclasses.replace(e, at_s=e.at_s + offset_s) for e in row.events]
        ends_s.append(max([row.ended_s + offset_s, *ends_s[-1:]]))
    names = sorted({p.name for p in parts} | {e.name for e in events}, key=_natural)
    return Lanes(parts, events, ends_s, resumed_s, {name: i for i, name in enumerate(names)})


def workers_busy(lanes: Lanes) -> tuple[np.ndarray, np.ndarray]:
    """Return times, and the mean number of busy workers around each; float64 [BINS] each."""
    edges = np.linspace(0, lanes.end_s, BINS + 1)
    spans = np.array([span for part in lanes.parts for span in part.busy_s]).reshape(-1, 2)

    def elapsed_since(points: np.ndarray) -> np.ndarray:
        """Return at each edge the seconds since each earlier point, summed."""
        sums = np.concatenate([[0.0], np.cumsum(np.sort(points))])
        counts = np.searchsorted(np.sort(points), edges)
        return counts * edges - sums[counts]

    busy_s = np.diff(elapsed_since(spans[:, 0]) - elapsed_since(spans[:, 1]))
    return (edges[1:] + edges[:-1]) / 2, busy_s / np.diff(edges)


def version_colors(versions: Iterable[int]) -> dict[int, Any]:
    """Return the color of each version: far apart for a few, a scale for many."""
    ordered = sorted(versions)
    if len(ordered) <= MAX_LEGEND:
        return dict(zip(ordered, VERSION_COLORS, strict=False))
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    return {v: scale(0.93 * i / (len(ordered) - 1))[:3] for i, v in enumerate(ordered)}


def _draw_boxes(ax: Any, boxes: Sequence[tuple[int, Span, Any]], half: float) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(start, y - half), (end, y - half), (end, y + half), (start, y + half)]
        for y, (start, end), _ in boxes
    ]
    colors = [color for *_, color in boxes]
    ax.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0, snap=False))


def _write_loss(ax: Any, event: WorkerEvent, y: int, end_s: float) -> float:
    """Write how a worker was lost next to its mark; return the right end of the text."""
    text = str(event.kind)
    if event.requests:
        text += f": {event.requests} request{'s' * (event.requests > 1)} moved on"
    text_end_s = event.at_s + 0.0125 * (len(text) + 4) * end_s
    fits = text_end_s <= end_s
    look = {"fontsize": 7, "color": LOST_COLOR, "zorder": 5, "va": "center"}
    box = {"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.85}
    place = {"xytext": (7, 0), "ha": "left"} if fits else {"xytext": (-7, 0), "ha": "right"}
    ax.annotate(text, (event.at_s, y), textcoords="offset points", bbox=box, **place, **look)
    return text_end_s if fits else event.at_s


def _weights(version: int) -> str:
    return f"weights after step {version}" if version else "initial weights"


def _natural(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts worker 10 after worker 9."""
    return [(text, int(d or -1)) for text, d in re.findall("([^0-9]*)([0-9]*)", name)]
