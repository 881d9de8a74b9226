"""Schedules of SPEC-RL's lenience over a run, by name, as pure functions of plain numbers.

The paper keeps it constant; the other two are ours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

SCHEDULES = "constant, linear:END:STEPS, clip_fraction:TARGET"
GAIN = 0.1  # the largest change of log λ a step
LARGEST_LOG = 2.0  # log λ of `clip_fraction`; the smallest is its negative


@dataclasses.dataclass(frozen=True)
class LenienceSchedule:
    """The course of the lenience λ.

    `linear` moves from the first lenience to `end` in `steps`. `clip_fraction` changes log λ by
    `GAIN` · (target − fraction) / max(target, fraction), where `fraction` is the policy's clip
    fraction.
    """

    name: Literal["constant", "linear", "clip_fraction"]
    end: float = 1.0
    steps: int = 1
    target: float = 0.0

    def at(self, first: float, log_lenience: float, step: int) -> float:
        """Return log λ of a step (from 1 on); `log_lenience` is that of `after`, or log first."""
        if self.name != "linear":
            return log_lenience
        part = min(1.0, (step - 1) / self.steps)
        return log(first + (self.end - first) * part)

    def after(self, log_lenience: float, clip_fraction: float) -> float:
        """Return log λ after a step whose updates clipped this fraction of the tokens."""
        if self.name != "clip_fraction":
            return log_lenience
        error = (self.target - clip_fraction) / max(self.target, clip_fraction)
        return min(max(log_lenience + GAIN * error, -LARGEST_LOG), LARGEST_LOG)


def log(lenience: float) -> float:
    """Return log λ; −∞ at 0."""
    return math.log(lenience) if lenience else -math.inf


def parse_schedule(text: str) -> LenienceSchedule:
    """Return the schedule of that name; raises ValueError for an unknown name or a bad number."""
    name, *values = text.split(":")
    try:
        if text == "constant":
            return LenienceSchedule("constant")
        if name == "linear" and len(values) == 2:
            end, steps = float(values[0]), int(values[1])
            if 0 <= end < math.inf and steps >= 1:
                return LenienceSchedule("linear", end=end, steps=steps)
        if name == "clip_fraction" and len(values) == 1 and 0 < float(values[0]) < 1:
            return LenienceSchedule("clip_fraction", target=float(values[0]))
    except ValueError:
        pass
    raise ValueError(
        f"schedule must be one of {SCHEDULES} (END a finite lenience, TARGET between 0 and 1), "
        f"got {text!r}"
    )
