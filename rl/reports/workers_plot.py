"""The picture of a run's workers: when each was busy, with which weights, who came and was lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.engine.worker_record import WorkerEvent, WorkerPart, WorkerStep
from rl.reports.style import FAINT, INK, plain_text, run_look

if TYPE_CHECKING:
    from rl.reports.runs import Run

MOST_LANES = 32  # more workers share lanes
MOST_NAMED = 16  # lanes with the name of each
BINS = 900  # of the time axis
MOST_COLORS = 8  # versions told apart by a legend; more by a scale
VERSION_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#8C6BB1"),
)
IDLE, ABSENT = np.array([0.915] * 3), np.ones(3)  # of a lane
JOINED_COLOR, LOST_COLOR = "#1B7837", "#B2182B"


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Steps of a run on one axis: legs follow one another, as if no time lay between them."""

    parts: list[WorkerPart]
    events: list[WorkerEvent]
    ends_s: list[float]  # of steps
    steps: list[int]
    resumed_s: list[float]
    lane_of: dict[str, int]
    workers_a_lane: int
    present_s: dict[str, list[tuple[float, float]]]

    @property
    def num_lanes(self) -> int:
        return max(self.lane_of.values(), default=-1) + 1

    @property
    def end_s(self) -> float:
        busy = (span[1] for part in self.parts for span in part.busy_s)
        return max([*self.ends_s, *busy], default=0.0) or 1.0


@dataclasses.dataclass(frozen=True)
class WorkersTimeline:
    """A panel of the workers: for one run a lane each, for several runs the number at work."""

    file: str = "workers.png"
    title: str = "Workers"
    caption: str = (
        "Rounds of each rollout worker, coloured by the step whose weights it ran, and steps of "
        "workers that draft for others; grey lanes are idle, blank ones absent."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.workers for run in runs)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        ax.set_title(self.title)
        ax.set_xlabel("seconds since the first rollout")
        ax.grid(visible=False)
        if len(runs) > 1:
            for index, run in enumerate(runs):
                if run.workers:
                    lanes = lanes_of(run.workers)
                    shares, _ = occupancy(lanes, {})
                    times_s = np.linspace(0, lanes.end_s, BINS)
                    at_work = shares.sum(axis=0) * lanes.workers_a_lane
                    color, style = run_look(index)
                    ax.plot(times_s, at_work, style, color=color, linewidth=1.2)
            ax.set_ylabel("workers in rounds")
            ax.set_ylim(bottom=0)
            return
        lanes = lanes_of(runs[0].workers)
        self._lanes(ax, lanes)
        self._marks(ax, lanes)
        self._notes(ax, lanes)

    def _lanes(self, ax: Any, lanes: Lanes) -> None:
        versions = sorted({part.version for part in lanes.parts})
        colors = version_colors(versions)
        shares, tints = occupancy(lanes, colors)
        there = presence(lanes)[..., None]
        blank = there * IDLE + (1 - there) * ABSENT
        image = np.clip(tints + (1 - shares)[..., None] * blank, 0, 1)
        n = lanes.num_lanes
        extent = (0, lanes.end_s, n - 0.5, -0.5)
        ax.imshow(image, aspect="auto", extent=extent, interpolation="nearest", zorder=0)
        if n <= MOST_NAMED:
            for y in range(n + 1):
                ax.axhline(y - 0.5, color="white", linewidth=40 / (n + 4))
            names = dict(zip(lanes.lane_of.values(), lanes.lane_of, strict=True))
            ax.set_yticks(range(n), [plain_text(names[y], 24) for y in range(n)])
            ax.tick_params(axis="y", length=0)
        else:
            each = lanes.workers_a_lane
            of_each = f"{each} workers a line" if each > 1 else "a line each"
            ax.set_ylabel(f"{len(lanes.lane_of):,} workers, {of_each}")
            ax.set_yticks([])
        ax.spines["left"].set_visible(False)

    def _marks(self, ax: Any, lanes: Lanes) -> None:
        if len(lanes.ends_s) <= 40:
            for end_s in lanes.ends_s[:-1]:
                ax.axvline(end_s, color="#888888", linewidth=0.7, linestyle=(0, (1, 3)))
        for began_s in lanes.resumed_s:
            ax.axvline(began_s, color=INK, linewidth=1.0, linestyle="--")
        size = 7 if lanes.num_lanes <= MOST_NAMED else 5
        for event in lanes.events:
            y = lanes.lane_of[event.name]
            joined = event.kind == "joined"
            if joined and not came_late(lanes, event):
                continue
            color = JOINED_COLOR if joined else LOST_COLOR
            ax.plot(
                event.at_s, y, ">" if joined else "X", color=color, markersize=size,
                markeredgecolor="white", markeredgewidth=0.8, clip_on=False, zorder=4,
            )  # fmt: skip
        if lanes.num_lanes <= MOST_NAMED:
            self._reasons(ax, lanes)

    def _reasons(self, ax: Any, lanes: Lanes) -> None:
        """Write beside losses what they were, where there is room."""
        taken_s: dict[int, float] = {}  # by lane, up to where
        for event in (e for e in lanes.events if e.kind != "joined"):
            y, text = lanes.lane_of[event.name], str(event.kind)
            if event.requests:
                text += f": {event.requests} request{'s' * (event.requests > 1)} moved on"
            width_s = 0.0125 * (len(text) + 4) * lanes.end_s
            if event.at_s < taken_s.get(y, -1.0):
                continue
            right = event.at_s + width_s > lanes.end_s
            taken_s[y] = event.at_s + (0 if right else width_s)
            ax.annotate(
                text, (event.at_s, y), xytext=(-7 if right else 7, 0),
                textcoords="offset points", ha="right" if right else "left", va="center",
                fontsize=7, color=LOST_COLOR, zorder=5,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none",
                      "alpha": 0.85},
            )  # fmt: skip

    def _notes(self, ax: Any, lanes: Lanes) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        lost = sum(event.kind != "joined" for event in lanes.events)
        late = sum(e.kind == "joined" and came_late(lanes, e) for e in lanes.events)
        ax.set_title(
            f"{len(lanes.lane_of):,} workers, {len(lanes.ends_s)} steps, {lost} lost, "
            f"{late} joined later",
            loc="right", color=FAINT, fontsize=8, weight="normal",
        )  # fmt: skip
        versions = sorted({part.version for part in lanes.parts})
        colors = version_colors(versions)
        handles: list[Any] = []
        if len(versions) <= MOST_COLORS:
            handles += [Patch(color=colors[v], label=_of_version(v)) for v in versions]
        else:
            table = ListedColormap([colors[v] for v in versions])
            scale = ScalarMappable(Normalize(versions[0] - 0.5, versions[-1] + 0.5), table)
            bar = ax.figure.colorbar(scale, ax=ax, pad=0.02, aspect=25)
            bar.set_label("weights after step", color=FAINT)
            bar.outline.set_visible(False)
        for shown, marker, color, label in (
            (lost, "X", LOST_COLOR, "lost"),
            (late, ">", JOINED_COLOR, "joined"),
        ):
            if shown:
                handles.append(
                    Line2D([], [], color=color, marker=marker, linestyle="", label=label)
                )
        if lanes.resumed_s:
            handles.append(Line2D([], [], color=INK, linestyle="--", label="resumed"))
        ax.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, fontsize=8,
            handlelength=1, handleheight=1, columnspacing=1.2, labelcolor=INK,
        )  # fmt: skip


def lanes_of(rows: Sequence[WorkerStep]) -> Lanes:
    """Return the steps of a run on one axis."""
    parts, events, ends_s, resumed_s = [], [], list[float](), list[float]()
    offset_s, leg = 0.0, None
    for row in rows:
        if leg is not None and row.leg != leg:
            offset_s = ends_s[-1]
            resumed_s.append(offset_s)
        leg = row.leg
        for part in row.parts:
            spans = tuple((s + offset_s, e + offset_s) for s, e in part.busy_s)
            parts.append(dataclasses.replace(part, busy_s=spans))
        events += [dataclasses.replace(e, at_s=e.at_s + offset_s) for e in row.events]
        ends_s.append(max([row.ended_s + offset_s, *ends_s[-1:]]))
    names = sorted({p.name for p in parts} | {e.name for e in events}, key=_natural)
    each = -(-len(names) // MOST_LANES)
    lane_of = {name: i // each for i, name in enumerate(names)}
    lanes = Lanes(parts, events, ends_s, [r.step for r in rows], resumed_s, lane_of, each, {})
    lanes.present_s.update(_present(lanes))
    return lanes


def _present(lanes: Lanes) -> dict[str, list[tuple[float, float]]]:
    """Return when each worker was there; a resumed run has none of the workers of before."""
    changes: dict[str, list[tuple[float, bool]]] = {name: [] for name in lanes.lane_of}
    for event in lanes.events:
        changes[event.name].append((event.at_s, event.kind == "joined"))
    found: dict[str, list[tuple[float, float]]] = {}
    for name, its in changes.items():
        its += [(t, False) for t in lanes.resumed_s]
        spans, since_s = [], None if its else 0.0
        for at_s, joined in sorted(its):
            if joined and since_s is None:
                since_s = at_s
            elif not joined and since_s is not None:
                spans.append((since_s, at_s))
                since_s = None
        if since_s is not None:
            spans.append((since_s, lanes.end_s))
        found[name] = spans
    return found


def came_late(lanes: Lanes, event: WorkerEvent) -> bool:
    """Return whether a worker came after the first round of its leg."""
    begins_s = max([0.0, *(t for t in lanes.resumed_s if t <= event.at_s)])
    rounds = (s for part in lanes.parts for s, _ in part.busy_s if s >= begins_s)
    return event.at_s > min(rounds, default=begins_s) + 0.02 * (lanes.end_s - begins_s)


def presence(lanes: Lanes) -> np.ndarray:
    """Return the share of each lane's workers that were there; float64 [lanes, bins]."""
    there = np.zeros((lanes.num_lanes, BINS))
    for name, spans in lanes.present_s.items():
        for span in spans:
            _fill(there[lanes.lane_of[name]], span, lanes.end_s)
    return np.clip(there / _sizes(lanes)[:, None], 0, 1)


def occupancy(lanes: Lanes, colors: dict[int, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of each lane that was busy, and the colours of that; [lanes, bins(, 3)]."""
    from matplotlib.colors import to_rgb

    shares = np.zeros((lanes.num_lanes, BINS))
    tints = np.zeros((lanes.num_lanes, BINS, 3))
    for part in lanes.parts:
        own = np.zeros(BINS)
        for span in part.busy_s:
            _fill(own, span, lanes.end_s)
        lane = lanes.lane_of[part.name]
        shares[lane] += own
        if part.version in colors:
            tints[lane] += own[:, None] * np.array(to_rgb(colors[part.version]))
    sizes = _sizes(lanes)[:, None]
    over = np.maximum(shares / sizes, 1)  # of clocks that do not agree
    return shares / sizes / over, tints / sizes[..., None] / over[..., None]


def version_colors(versions: Sequence[int]) -> dict[int, Any]:
    """Return the colour of each version: far apart for a few, a scale for many."""
    if len(versions) <= MOST_COLORS:
        return {v: VERSION_COLORS[i % len(VERSION_COLORS)] for i, v in enumerate(versions)}
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    return {v: scale(0.93 * i / (len(versions) - 1))[:3] for i, v in enumerate(versions)}


def _fill(row: np.ndarray, span: tuple[float, float], end_s: float) -> None:
    """Add to each bin the share of it that a span covers."""
    first, last = (np.clip(x / end_s, 0, 1) * BINS for x in span)
    begin, end = int(first), min(int(last), BINS - 1)
    if begin >= end:
        row[min(begin, BINS - 1)] += last - first
        return
    row[begin] += begin + 1 - first
    row[begin + 1 : end] += 1
    row[end] += last - end


def _sizes(lanes: Lanes) -> np.ndarray:
    return np.bincount(list(lanes.lane_of.values()), minlength=lanes.num_lanes).astype(float)


def _of_version(version: int) -> str:
    return f"weights after step {version}" if version else "initial weights"


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which worker 10 comes after worker 9."""
    found, digits = list[tuple[bool, int, str]](), ""
    for c in name + " ":
        if c in "0123456789":
            digits += c
            continue
        if digits:
            found.append((True, int(digits), ""))
            digits = ""
        found.append((False, 0, c))
    return found
