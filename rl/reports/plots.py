"""The pictures of a report: a panel per question, and an overview of all panels."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.reports.bandit_plot import BanditArms
from rl.reports.evaluations import EvalCurves
from rl.reports.style import FAINT, INK, STYLE, plain_text, run_look
from rl.reports.timeline_plot import RolloutTimeline
from rl.reports.workers_plot import WorkersTimeline

if TYPE_CHECKING:
    from rl.reports.runs import Run

OVERVIEW_FILE = "report.png"

# Of the parts of a step: rollout, reward, score, update, checkpoint, then any others.
PART_COLORS = ("#4477AA", "#CCBB44", "#66CCEE", "#EE6677", "#AA3377", "#228833", "#997700")
OTHER_COLOR = "#BBBBBB"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel of one metric over steps; `band` names the metrics of its lower and upper bound."""

    file: str
    title: str
    unit: str
    metric: str
    caption: str
    band: tuple[str, str] | None = None
    scale: float = 1.0

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.has(self.metric) for run in runs)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        for index, run in enumerate(runs):
            color, style = run_look(index)
            steps, values = run.steps, run.series(self.metric) * self.scale
            bounds = [run.series(name) * self.scale for name in self.band or ()]
            if len(runs) == 1 and bounds:
                lone = {"edgecolor": color, "linewidth": 6} if len(steps) == 1 else {"linewidth": 0}
                ax.fill_between(steps, *bounds, facecolor=color, alpha=0.13, **lone)
            else:  # shades of several runs would cover each other
                for bound in bounds:
                    ax.plot(steps, trailing_mean(bound, window), ":", color=color, linewidth=0.9)
            marker = "o" if len(steps) <= 15 else None
            if window > 1:
                ax.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
                values = trailing_mean(values, window)
            ax.plot(steps, values, style, color=color, linewidth=1.8, marker=marker, markersize=4)
        notes = []
        if window > 1:
            notes.append(f"bold: mean of {window} steps")
        if self.band is not None:
            notes.append(f"{'shade' if len(runs) == 1 else 'dotted'}: min and max")
        self._label(ax, ", ".join(notes))
        if not any(np.nan_to_num(run.series(self.metric)).any() for run in runs):
            ax.set_ylim(0, 1)  # zeros lie on the axis, not in the middle of a band about them

    def _label(self, ax: Any, note: str) -> None:
        from matplotlib.ticker import StrMethodFormatter

        ax.set_title(self.title)
        ax.set_title(note, loc="right", color=FAINT, fontsize=8, weight="normal")
        ax.set_ylabel(self.unit)
        _step_axis(ax)
        if max(map(abs, ax.get_ylim())) >= 1000:
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.margins(x=0.02)


@dataclasses.dataclass(frozen=True)
class TimeSplit:
    """A panel of the seconds of each part of a step: over steps for one run, else bars of means."""

    file: str = "time.png"
    title: str = "Time split"
    caption: str = (
        "Seconds of a step by part: generating, scoring the last responses, learning, saving."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return any(run.has(name) for run in runs for name in run.time_sections())

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        ax.set_title(self.title)
        names = sorted({n for run in runs for n in run.time_sections()}, key=_part_order(runs))
        if len(runs) == 1:
            self._over_steps(ax, runs[0], names)
        else:
            self._bars(ax, runs, names)
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=6, fontsize=8,
            handlelength=1, handleheight=1, columnspacing=1.2, labelcolor=INK,
        )  # fmt: skip

    def _over_steps(self, ax: Any, run: Run, names: Sequence[str]) -> None:
        parts = split(run, names)
        edges = _step_edges(run.steps)
        base = np.zeros(len(run.steps))
        for index, (name, seconds) in enumerate(parts.items()):
            top = base + seconds
            look = {"color": part_color(name, index), "label": plain_text(name, 24)}
            ax.stairs(top, edges, baseline=base, fill=True, **look)
            base = top
        # A first step that compiles would make all others look flat.
        ordinary = ordinary_steps(base)
        above = np.flatnonzero(~ordinary)
        if len(above) and base[ordinary].max() > 0:
            ax.set_ylim(0, 1.25 * base[ordinary].max())
            longest = above[np.argmax(base[above])]
            note = f"off the scale: step {int(run.steps[longest])}, {base[longest]:.1f} s"
            if len(above) > 1:
                note += f", and {len(above) - 1} more"
            ax.set_title(note, loc="right", color=FAINT, fontsize=8, weight="normal")
        ax.set_ylabel("seconds per step")
        _step_axis(ax)
        ax.margins(x=0)
        ax.grid(axis="x", visible=False)

    def _bars(self, ax: Any, runs: Sequence[Run], names: Sequence[str]) -> None:
        left = np.zeros(len(runs))
        means = [mean_split(run, names) for run in runs]
        parts = list(dict.fromkeys(part for one in means for part in one))
        parts.sort(key=lambda part: part == "other")
        for index, part in enumerate(parts):
            widths = np.array([one.get(part, 0.0) for one in means])
            color = part_color(part, index)
            label = plain_text(part, 24)
            ax.barh(range(len(runs)), widths, left=left, height=0.6, color=color, label=label)
            left += widths
        for line, total in enumerate(left):
            ax.annotate(
                f"{total:.3g} s", (total, line), xytext=(4, 0), textcoords="offset points",
                va="center", color=INK, fontsize=8,
            )  # fmt: skip
        ax.set_yticks(range(len(runs)), [plain_text(run.label, 20) for run in runs])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlabel("mean seconds per step, without steps of over 3 times the median")
        ax.grid(axis="y", visible=False)


Panel = Curve | TimeSplit | RolloutTimeline | WorkersTimeline | EvalCurves | BanditArms
PANELS: tuple[Panel, ...] = (
    Curve(
        "reward.png",
        "Reward",
        "mean reward",
        "reward",
        "Mean reward over all responses of a step, before any shaping.",
    ),
    EvalCurves(),
    Curve(
        "failures.png",
        "Responses without a score",
        "responses per step",
        "rewards/failures",
        "Responses whose reward function raised, ran out of time or returned no number; the "
        "samples below give the reasons.",
    ),
    Curve(
        "length.png",
        "Response length",
        "tokens",
        "completions/mean_length",
        "Mean tokens of a response; the bounds are the shortest and the longest of the step.",
        band=("completions/min_length", "completions/max_length"),
    ),
    Curve(
        "entropy.png",
        "Entropy",
        "nats per token",
        "entropy",
        "Entropy of the next token; near 0 the policy has stopped exploring.",
    ),
    Curve(
        "clip.png",
        "Clip fraction",
        "% of tokens",
        "clip_ratio/region_mean",
        "Tokens whose gradient was clipped because the update had moved them too far.",
        scale=100.0,
    ),
    Curve(
        "throughput.png",
        "Throughput",
        "tokens per second",
        "perf/throughput",
        "Response tokens over the seconds of the whole step, learning included.",
    ),
    Curve(
        "spec_tokens.png",
        "Tokens per round",
        "tokens per request",
        "spec/tokens_per_round",
        "Tokens that a request gains in a round with drafts; plain decoding gains one.",
    ),
    Curve(
        "spec_accept.png",
        "Accepted draft tokens",
        "%",
        "spec/accept_rate",
        "Draft tokens that the policy drew as well, of all that were verified.",
        scale=100.0,
    ),
    Curve(
        "spec_saved.png",
        "Seconds saved by drafts",
        "seconds per step",
        "spec/seconds_saved",
        "Seconds that plain rounds would have taken for the same tokens, as measured before the "
        "run, less those of rounds with drafts and of looking for drafts: an estimate.",
    ),
    BanditArms(),
    Curve(
        "drafting_rounds.png",
        "Rounds with a draft from drafting workers",
        "% of requests' rounds",
        "drafting/rounds_with_draft",
        "Requests' rounds in which a draft of a drafting worker was there in time, in the run so "
        "far; without one a request decodes plainly.",
        scale=100.0,
    ),
    Curve(
        "drafting_accept.png",
        "Accepted of drafting workers",
        "% of draft tokens",
        "drafting/accept_probability",
        "Draft tokens of drafting workers that the policy drew as well, where all before them were "
        "accepted, in the run so far.",
        scale=100.0,
    ),
    Curve(
        "drafting_busy.png",
        "Drafting workers at work",
        "% of the time",
        "drafting/busy_fraction",
        "Of the seconds since the row before, updates included, those in which drafting workers "
        "drafted; the Workers picture has them step by step.",
        scale=100.0,
    ),
    Curve(
        "reused.png",
        "Reused",
        "% of response tokens",
        "spec/reused_fraction",
        "Tokens kept from the last epoch's response to the same prompt.",
        scale=100.0,
    ),
    Curve(
        "self_bleu.png",
        "Similarity of siblings",
        "Self-BLEU",
        "diversity/self_bleu",
        "Overlap of the responses to one prompt; at 1 they are all the same.",
    ),
    TimeSplit(),
    RolloutTimeline(),
    WorkersTimeline(),
)
CAPTIONS = {panel.file: panel.caption for panel in PANELS}


def draw(runs: Sequence[Run], smooth_steps: int | None = None) -> dict[str, bytes]:
    """Return PNGs by file name: the overview, then each panel that some run has data for.

    Curves are means of `smooth_steps` steps over the raw values; 1 is off, None depends on the
    length of the runs. {} where no run has anything to show.
    """
    import matplotlib

    panels = [panel for panel in PANELS if panel.shown(runs)]
    if not panels:
        return {}
    # One window for all runs, so that they can be compared.
    window = smooth_steps or automatic_window(max(len(run.rows) for run in runs))
    with matplotlib.rc_context(STYLE):
        images = {OVERVIEW_FILE: _figure(panels, runs, window, columns=2)}
        for panel in panels:
            images[panel.file] = _figure([panel], runs, window, columns=1)
    return images


def _figure(panels: Sequence[Panel], runs: Sequence[Run], window: int, columns: int) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(6.2 * columns, 3.3 * lines + 0.3), layout=layout)
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, start=1):
        panel.draw(figure.add_subplot(lines, columns, number), runs, window)
    alone = [type(panel) for panel in panels] == [TimeSplit]
    if len(runs) > 1 and not alone:
        looks = [run_look(index) for index in range(len(runs))]
        figure.legend(
            [Line2D([], [], color=color, linestyle=style, linewidth=2.2) for color, style in looks],
            [plain_text(run.label, 40) for run in runs],
            loc="outside lower left",  # titles of neighbours stay in line
            ncols=min(len(runs), 2 * columns),
            labelcolor=INK,
        )
    elif columns > 1:
        figure.suptitle(
            plain_text(runs[0].label, 80), x=0.012, ha="left", fontsize=13, color=INK, weight="bold"
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def part_color(part: str, index: int) -> str:
    return OTHER_COLOR if part == "other" else PART_COLORS[index % len(PART_COLORS)]


def automatic_window(steps: int) -> int:
    """Return how many steps to average in a run of `steps` steps; 1 for a short run."""
    return 1 if steps < 40 else max(3, steps // 25)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the means of the finite among the last `window` values, nan where none is; [n]."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    count = counts[ends] - counts[starts]
    total = sums[ends] - sums[starts]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def split(run: Run, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the seconds by part, float64 [rows]; the rest is `other` if it is over 1%."""
    parts = {name.removeprefix("time/"): np.nan_to_num(run.series(name)) for name in names}
    step_s = np.nan_to_num(run.series("step_time"))
    other_s = step_s - sum(parts.values())
    if np.median(other_s) > 0.01 * np.median(step_s):
        parts["other"] = np.maximum(other_s, 0.0)
    return parts


def mean_split(run: Run, names: Sequence[str]) -> dict[str, float]:
    """Return the mean seconds by part over the ordinary steps."""
    parts = split(run, names)
    kept = ordinary_steps(sum(parts.values(), np.zeros(len(run.rows))))
    return {name: float(seconds[kept].mean()) for name, seconds in parts.items()}


def ordinary_steps(step_s: np.ndarray) -> np.ndarray:
    """Mask the steps of at most 3 times the median, bool [rows]; one that compiles takes more."""
    return step_s <= 3 * np.median(step_s)


def _part_order(runs: Sequence[Run]) -> Callable[[str], int]:
    order = list(dict.fromkeys(name for run in runs for name in run.time_sections()))
    return order.index


def _step_axis(ax: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("training step")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def _step_edges(steps: np.ndarray) -> np.ndarray:
    """Return the edges of each step's bar, in the middle between neighbouring steps."""
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[steps[0] - 0.5], middles, [steps[-1] + 0.5]])
