"""The common style of all pictures of a report: colors, lines, labels, axes."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colors, which color-blind readers can distinguish, without black and yellow.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
RUN_STYLES = ("-", "--", ":", "-.")
INK = "#222222"
FAINT = "#666666"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "figure.dpi": 130,
    "text.parse_math": False,  # names are untrusted, so `$` is a plain letter
}


def run_look(index: int) -> tuple[str, str]:
    """Return the color and line style of a run; equal curves stay visible under each other."""
    return RUN_COLORS[index % len(RUN_COLORS)], RUN_STYLES[index % len(RUN_STYLES)]


def plain_text(text: str, limit: int) -> str:
    """Return a label that matplotlib shows literally, cut at the front since suffixes differ."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    short = clean if len(clean) <= limit else "…" + clean[1 - limit :]
    # a leading `_` would hide the label from legends
    return ("./" if short.startswith("_") else "") + short


def number(value: float) -> str:
    """Format a number with four significant digits or in thousands: 0.4125, 15,320, 1.2e-06."""
    try:
        value = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return "more than 1e308" if value > 0 else "less than -1e308"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def step_axis(ax: Any, label: str = "training step") -> None:
    """Label the x axis, with ticks at whole steps."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def titles(ax: Any, title: str, note: str = "") -> None:
    """Write the title of a panel, and a faint note on the right."""
    ax.set_title(title)
    ax.set_title(note, loc="right", color=FAINT, fontsize=8, weight="normal")


def legend_below(ax: Any, ncols: int, **options: Any) -> None:
    """Draw the legend below the x axis."""
    options = {"handlelength": 1, "handleheight": 1, "columnspacing": 1.2} | options
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
    ax.legend(**place, ncols=ncols, fontsize=8, labelcolor=INK, **options)
