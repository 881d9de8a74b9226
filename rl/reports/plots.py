"""The pictures of a report: a panel per question, and an overview of all panels."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reprise.rl.reports import style
from reprise.rl.reports.evaluations import EvalCurves
from reprise.rl.reports.style import INK, legend_below, plain_text, run_look, step_axis, titles
from reprise.rl.reports.timeline_plot import RolloutTimeline
from reprise.rl.reports.workers_plot import WorkersTimeline

if TYPE_CHECKING:
    from reprise.rl.reports.runs import Run

OVERVIEW_FILE = "report.png"

# Colors of the parts of a step: rollout, reward, score, update, checkpoint, then other parts.
PART_COLORS = ("#4477AA", "#CCBB44", "#66CCEE", "#EE6677", "#AA3377", "#228833", "#997700")
OTHER_COLOR = "#BBBBBB"
BANDIT = "bandit/"
SHARE = "/share"
MAX_ARMS = len(style.RUN_COLORS) - 1  # the last color is for all other arms


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel of one metric over steps; `band` names the metrics of the lower and upper bounds."""

    file: str
    title: str
    unit: str
    metric: str
    caption: str
    band: tuple[str, str] | None = None
    hides_zeros: bool = False  # hide a panel that has only zeros

    def shown(self, runs: Sequence[Run]) -> bool:
        values = [run.series(self.metric) for run in runs]
        if self.hides_zeros:
            return any(np.nan_to_num(x).any() for x in values)
        return any(np.isfinite(x).any() for x in values)

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        scale = 100 if self.unit.startswith("%") else 1
        for index, run in enumerate(runs):
            color, line = run_look(index)
            steps = run.steps
            values = run.series(self.metric) * scale
            bounds = [run.series(name) * scale for name in self.band or ()]
            if len(runs) == 1 and bounds:
                edge = {"edgecolor": color, "linewidth": 6} if len(steps) == 1 else {"linewidth": 0}
                ax.fill_between(steps, *bounds, facecolor=color, alpha=0.13, **edge)
            else:  # shaded areas of several runs would cover each other
                for bound in bounds:
                    ax.plot(steps, trailing_mean(bound, window), ":", color=color, linewidth=0.9)
            marker = "o" if len(steps) <= 15 else None
            if window > 1:
                ax.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
                values = trailing_mean(values, window)
            ax.plot(steps, values, line, color=color, linewidth=1.8, marker=marker, markersize=4)
        notes = [f"bold: mean of {window} steps"] if window > 1 else []
        notes += [f"{'shade' if len(runs) == 1 else 'dotted'}: min and max"] if self.band else []
        titles(ax, self.title, ", ".join(notes))
        ax.set_ylabel(self.unit)
        step_axis(ax)
        if max(map(abs, ax.get_ylim())) >= 1000:
            ax.yaxis.set_major_formatter("{x:,.0f}")
        # a metric that stops early keeps the axis of the other panels
        steps = np.concatenate([run.steps for run in runs])
        margin = 0.02 * np.ptp(steps) or 0.5
        ax.set_xlim(steps.min() - margin, steps.max() + margin)
        if not any(np.nan_to_num(run.series(self.metric)).any() for run in runs):
            ax.set_ylim(0, 1)  # draw zeros on the axis, not in the middle of a band


@dataclasses.dataclass(frozen=True)
class BanditArms:
    """A panel of the share of decisions by bandit arm in each step of one run."""

    file: str = "bandit.png"
    title: str = "Bandit's choices"
    caption: str = (
        "Share of decisions by arm (drafters, depth, draft tokens a request), with the last median "
        "of its rewards in tokens a second."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return len(runs) == 1 and bool(arm_shares(runs[0]))

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        (run,) = runs
        base = np.zeros(len(run.steps))
        for color, (arm, share) in zip(style.RUN_COLORS, arm_shares(run).items(), strict=False):
            look = {"color": color, "label": arm_label(run, arm), "linewidth": 0}
            ax.bar(run.steps, share, width=1.0, bottom=base, **look)
            base = base + share
        titles(ax, self.title)
        ax.set_ylabel("% of decisions")
        step_axis(ax)
        ax.margins(x=0)
        ax.grid(axis="x", visible=False)
        legend_below(ax, 2)


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
        titles(ax, self.title)
        names = list(dict.fromkeys(name for run in runs for name in run.time_sections()))
        if len(runs) == 1:
            self._over_steps(ax, runs[0], names)
        else:
            self._bars(ax, runs, names)
        legend_below(ax, 6)

    def _over_steps(self, ax: Any, run: Run, names: Sequence[str]) -> None:
        middles = (run.steps[1:] + run.steps[:-1]) / 2
        edges = np.concatenate([[run.steps[0] - 0.5], middles, [run.steps[-1] + 0.5]])
        base = np.zeros(len(run.steps))
        for index, (name, seconds) in enumerate(split(run, names).items()):
            look = {"color": part_color(name, index), "label": plain_text(name, 24)}
            ax.stairs(base + seconds, edges, baseline=base, fill=True, **look)
            base = base + seconds
        # A first step with compilation would make all other steps look flat.
        ordinary = ordinary_steps(base)
        above = np.flatnonzero(~ordinary)
        if len(above) and base[ordinary].max() > 0:
            ax.set_ylim(0, 1.25 * base[ordinary].max())
            slowest = above[np.argmax(base[above])]
            note = f"off the scale: step {int(run.steps[slowest])}, {base[slowest]:.1f} s"
            more = f", and {len(above) - 1} more" if len(above) > 1 else ""
            titles(ax, self.title, note + more)
        ax.set_ylabel("seconds per step")
        step_axis(ax)
        ax.margins(x=0)
        ax.grid(axis="x", visible=False)

    def _bars(self, ax: Any, runs: Sequence[Run], names: Sequence[str]) -> None:
        left = np.zeros(len(runs))
        means = [mean_split(run, names) for run in runs]
        parts = sorted(dict.fromkeys(p for m in means for p in m), key=lambda p: p == "other")
        for index, part in enumerate(parts):
            widths = np.array([mean.get(part, 0.0) for mean in means])
            color = part_color(part, index)
            label = plain_text(part, 24)
            ax.barh(range(len(runs)), widths, left=left, height=0.6, color=color, label=label)
            left += widths
        look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        for line, total in enumerate(left):
            ax.annotate(f"{total:.3g} s", (total, line), (4, 0), color=INK, **look)
        ax.set_yticks(range(len(runs)), [plain_text(run.label, 20) for run in runs])
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlabel("mean seconds per step, without steps of over 3 times the median")
        ax.grid(axis="y", visible=False)


Panel = Curve | TimeSplit | RolloutTimeline | WorkersTimeline | EvalCurves | BanditArms
# fmt: off
PANELS: tuple[Panel, ...] = (
    Curve("reward.png", "Reward", "mean reward", "reward",
          "Mean reward over all responses of a step, before any shaping."),
    EvalCurves(),
    Curve("failures.png", "Responses without a score", "responses per step", "rewards/failures",
          "Responses whose reward function raised, ran out of time or returned no number; the "
          "samples below give the reasons.", hides_zeros=True),
    Curve("no_signal.png", "Groups without signal", "% of groups", "frac_reward_zero_std",
          "Groups whose responses all have the same reward: nothing is learned from them."),
    Curve("length.png", "Response length", "tokens", "completions/mean_length",
          "Mean tokens of a response; the bounds are the shortest and the longest of the step.",
          ("completions/min_length", "completions/max_length")),
    Curve("turns.png", "Turns of an episode", "turns", "episodes/turns",
          "Mean turns of the policy in an episode."),
    Curve("episodes_done.png", "Finished episodes", "% of episodes", "episodes/ends/done",
          "Episodes that the environment finished; a limit stopped the others, or they failed."),
    Curve("environment.png", "Seconds of environments", "seconds per step", "perf/environment_s",
          "Seconds that environments worked, summed over calls, which run side by side."),
    Curve("reverse_kl.png", "Reverse KL to the teacher", "nats per token", "distill/reverse_kl",
          "KL from the sampling policy to the teacher, at the tokens that the policy drew."),
    Curve("entropy.png", "Entropy", "nats per token", "entropy",
          "Entropy of the next token; near 0 the policy has stopped exploring."),
    Curve("clip.png", "Clip fraction", "% of tokens", "clip_ratio/region_mean",
          "Tokens whose gradient was clipped because the update had moved them too far."),
    Curve("grad_norm.png", "Gradient norm", "norm before clipping", "grad_norm",
          "Norm of the gradient, mean over the step's optimizer steps."),
    Curve("learning_rate.png", "Learning rate", "learning rate", "lr",
          "Learning rate of the step's last optimizer step."),
    Curve("throughput.png", "Throughput", "tokens per second", "perf/throughput",
          "Response tokens over the seconds of the whole step, learning included."),
    Curve("spec_tokens.png", "Tokens per round", "tokens per request", "spec/tokens_per_round",
          "Tokens that a request gains in a round with drafts; plain decoding gains one."),
    Curve("spec_accept.png", "Accepted draft tokens", "%", "spec/accept_rate",
          "Draft tokens that the policy drew as well, of all that were verified."),
    Curve("spec_saved.png", "Seconds saved by drafts", "seconds per step", "spec/seconds_saved",
          "Estimated seconds of plain rounds for the same tokens, less the seconds of rounds with "
          "drafts and of drafting."),
    BanditArms(),
    Curve("drafting_rounds.png", "Rounds with a draft from drafting workers",
          "% of requests' rounds", "drafting/rounds_with_draft",
          "Requests' rounds with a draft of a drafting worker in time, in the run so far; without "
          "one a request decodes plainly."),
    Curve("drafting_accept.png", "Accepted of drafting workers", "% of draft tokens",
          "drafting/accept_probability",
          "Draft tokens of drafting workers that the policy drew as well, if all before them were "
          "accepted, in the run so far."),
    Curve("drafting_busy.png", "Drafting workers at work", "% of the time",
          "drafting/busy_fraction",
          "Share of the time since the row before, updates included, in which drafting workers "
          "drafted; the Workers picture has them step by step."),
    Curve("reused.png", "Reused", "% of response tokens", "spec/reused_fraction",
          "Tokens kept from the last epoch's response to the same prompt."),
    Curve("self_bleu.png", "Similarity of siblings", "Self-BLEU", "diversity/self_bleu",
          "Overlap of the responses to one prompt; at 1 they are all the same."),
    TimeSplit(),
    RolloutTimeline(),
    WorkersTimeline(),
)
# fmt: on
CAPTIONS = {panel.file: panel.caption for panel in PANELS}


def draw(runs: Sequence[Run], smooth_steps: int | None = None) -> dict[str, bytes]:
    """Return PNG images by file name: the overview, then each panel with data of some run.

    Curves are means over `smooth_steps` steps, drawn over the raw values; 1 is off, None depends on
    the length of the runs. Return {} if no run has data.
    """
    import matplotlib

    panels = [panel for panel in PANELS if panel.shown(runs)]
    if not panels:
        return {}
    # One window for all runs, so that curves are comparable; short runs are not smoothed.
    num_steps = max(len(run.rows) for run in runs)
    window = smooth_steps or (1 if num_steps < 40 else max(3, num_steps // 25))
    with matplotlib.rc_context(style.STYLE):
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
    for place, panel in enumerate(panels, start=1):
        panel.draw(figure.add_subplot(lines, columns, place), runs, window)
    if len(runs) > 1 and [type(panel) for panel in panels] != [TimeSplit]:
        looks = [run_look(index) for index in range(len(runs))]
        lines_of_runs = [Line2D([], [], color=c, linestyle=s, linewidth=2.2) for c, s in looks]
        names = [plain_text(run.label, 40) for run in runs]
        ncols = min(len(runs), 2 * columns)
        above = "outside upper left"  # titles of neighbors stay aligned
        figure.legend(lines_of_runs, names, loc=above, ncols=ncols, labelcolor=INK)
    elif columns > 1:
        look = {"x": 0.012, "ha": "left", "fontsize": 13, "color": INK, "weight": "bold"}
        figure.suptitle(plain_text(runs[0].label, 80), **look)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return trailing means over finite values, nan for a window without finite values; [n]."""
    ones = np.ones(min(window, len(values)))
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), ones)[: len(values)]
    counts = np.convolve(finite, ones)[: len(values)]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def arm_shares(run: Run) -> dict[str, np.ndarray]:
    """Return the percentage of decisions by step for each frequent arm, and for all `others`."""
    names = {n for row in run.rows for n in row if n.startswith(BANDIT) and n.endswith(SHARE)}
    shares = {name: 100 * np.nan_to_num(run.series(name)) for name in sorted(names)}
    ordered = sorted(shares, key=lambda name: -shares[name].sum())
    arms = {n.removeprefix(BANDIT).removesuffix(SHARE): shares[n] for n in ordered[:MAX_ARMS]}
    if rest := ordered[MAX_ARMS:]:
        arms["others"] = np.sum([shares[name] for name in rest], axis=0)
    return arms


def arm_label(run: Run, arm: str) -> str:
    rewards = run.series(f"{BANDIT}{arm}/tokens_per_s")
    known = rewards[np.isfinite(rewards)]
    name = plain_text(arm.replace("_", " "), 40)
    return f"{name}: {known[-1]:,.0f} tokens/s" if len(known) else name


def part_color(part: str, index: int) -> str:
    return OTHER_COLOR if part == "other" else PART_COLORS[index % len(PART_COLORS)]


def split(run: Run, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the seconds by part, float64 [rows]; the rest is `other` if above 1%."""
    parts = {name.removeprefix("time/"): np.nan_to_num(run.series(name)) for name in names}
    step_s = np.nan_to_num(run.series("step_time"))
    other_s = step_s - sum(parts.values())
    if np.median(other_s) > 0.01 * np.median(step_s):
        parts["other"] = np.maximum(other_s, 0.0)
    return parts


def mean_split(run: Run, names: Sequence[str]) -> dict[str, float]:
    """Return the mean seconds by part over the ordinary steps."""
    parts = split(run, names)
    is_ordinary = ordinary_steps(sum(parts.values(), np.zeros(len(run.rows))))
    return {name: float(seconds[is_ordinary].mean()) for name, seconds in parts.items()}


def ordinary_steps(step_s: np.ndarray) -> np.ndarray:
    """Return a mask of steps up to 3 times the median, bool [rows]; compilation takes longer."""
    return step_s <= 3 * np.median(step_s)
