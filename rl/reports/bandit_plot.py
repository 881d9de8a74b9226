"""The picture of a bandit's choices: which of its arms it took, and what the rounds brought."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.reports.style import RUN_COLORS, plain_text

if TYPE_CHECKING:
    from rl.reports.runs import Run

PREFIX, SHARE, REWARD = "bandit/", "/share", "/tokens_per_s"
MOST_ARMS = len(RUN_COLORS) - 1  # the last colour is that of all others


@dataclasses.dataclass(frozen=True)
class BanditArms:
    """A panel of the share of decisions that each arm had in a step, of one run."""

    file: str = "bandit.png"
    title: str = "Bandit's choices"
    caption: str = (
        "Share of decisions by arm (drafters, depth, draft tokens a request), with the last median "
        "of its rewards in tokens a second."
    )

    def shown(self, runs: Sequence[Run]) -> bool:
        return len(runs) == 1 and bool(arm_shares(runs[0]))

    def draw(self, ax: Any, runs: Sequence[Run], window: int) -> None:
        from matplotlib.ticker import MaxNLocator

        (run,) = runs
        base = np.zeros(len(run.steps))
        for index, (arm, share) in enumerate(arm_shares(run).items()):
            look = {"color": RUN_COLORS[index], "label": _label(run, arm), "linewidth": 0}
            ax.bar(run.steps, share, width=1.0, bottom=base, **look)
            base = base + share
        ax.set_title(self.title)
        ax.set_ylabel("% of decisions")
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        ax.margins(x=0)
        ax.grid(axis="x", visible=False)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8)


def arm_shares(run: Run) -> dict[str, np.ndarray]:
    """Return the percentages of decisions by step, of the arms that had most; of others together.

    {} where no bandit decided.
    """
    names = {name for row in run.rows for name in row if name.startswith(PREFIX)}
    arms = {n.removeprefix(PREFIX).removesuffix(SHARE) for n in names if n.endswith(SHARE)}
    shares = {arm: 100 * np.nan_to_num(run.series(PREFIX + arm + SHARE)) for arm in sorted(arms)}
    ordered = sorted(shares, key=lambda arm: -shares[arm].sum())
    found = {arm: shares[arm] for arm in ordered[:MOST_ARMS]}
    if rest := ordered[MOST_ARMS:]:
        found["others"] = np.sum([shares[arm] for arm in rest], axis=0)
    return found


def _label(run: Run, arm: str) -> str:
    rewards = run.series(PREFIX + arm + REWARD)
    known = rewards[np.isfinite(rewards)]
    name = plain_text(arm.replace("_", " "), 40)
    return f"{name}: {known[-1]:,.0f} tokens/s" if len(known) else name
