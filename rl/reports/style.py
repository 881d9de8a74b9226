"""The style of all pictures of a report: colours, lines, labels."""

from __future__ import annotations

# Okabe and Ito's colours, which colour-blind readers can tell apart, without black and yellow.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
RUN_STYLES = ("-", "--", ":", "-.")
INK, FAINT = "#222222", "#666666"

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
    "text.parse_math": False,  # names come from outside: `$` is a letter
}


def run_look(index: int) -> tuple[str, str]:
    """Return colour and line style of the index-th run."""
    style = RUN_STYLES[index // len(RUN_COLORS) % len(RUN_STYLES)]
    return RUN_COLORS[index % len(RUN_COLORS)], style


def plain_text(text: str, limit: int) -> str:
    """Return a label that matplotlib shows literally, cut at its front (ends tell runs apart)."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    short = clean if len(clean) <= limit else "…" + clean[1 - limit :]
    # a leading `_` would hide the label from legends
    return ("./" if short.startswith("_") else "") + short
