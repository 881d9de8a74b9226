"""Drafting workers in programs of their own, as verifying workers of other programs know them."""

from __future__ import annotations

import dataclasses
import math

from rl.drafting.config import MOST_WINDOW, DraftingConfig
from rl.drafting.plans import MeasuredSeconds, Planner
from sched.simulator.measured_costs import MeasuredCosts
from spec.round_times import RoundTimes

NO_MOVES = {1: (0.0, 0.0)}  # seconds of moves between workers, by which no window is planned


@dataclasses.dataclass(frozen=True)
class Address:
    """The name of a program; each program that takes its place has the next `start`."""

    series: str
    start: int

    def name(self, later: int = 0) -> str:
        """Return its name, or that of one that took its place."""
        return f"{self.series}-{self.start + later}"


@dataclasses.dataclass(frozen=True)
class Apart:
    """Where the drafts of one verifying worker come from, and what plans are made of.

    `num_workers`, `num_requests` and `most_window` are those of `rl.drafting.plans.Planner`,
    `draft_s` is that of `MeasuredSeconds`.
    """

    addresses: tuple[Address, ...]
    config: DraftingConfig
    num_workers: int
    num_requests: int
    most_window: int
    draft_s: float

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("expected the address of a drafting program, got none")
        if not (1 <= self.most_window <= MOST_WINDOW and 0 <= self.draft_s < math.inf):
            raise ValueError(
                f"expected a window of 1 … {MOST_WINDOW} and seconds of 0 or more, got "
                f"{self.most_window} and {self.draft_s}"
            )

    def planner(self) -> Planner:
        """Return the planner of a verifying worker's program, which has seen nothing yet."""
        shape = self.num_workers, self.num_requests, self.most_window
        planner = Planner(self.config, *shape)
        planner.drafting_workers = self.config.workers or 0
        return planner

    def seconds(self, times: RoundTimes | None) -> MeasuredSeconds | None:
        """Return the seconds that plans go by; None where no rounds are measured."""
        if times is None:
            return None
        costs = MeasuredCosts(times.rounds, NO_MOVES)
        longest = max(positions for _, _, positions in times.rounds)
        return MeasuredSeconds(costs, times, longest / 2, self.draft_s)
