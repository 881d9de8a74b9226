"""A published figure, and which of a seed's simulated values stand beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Figure:
    """A speedup or, where `is_share`, a share: `value` of what a seed gave, over that of `over`."""

    workload: str
    row: str
    published: float
    value: str
    over: str | None = None
    calibrated: bool = False
    is_share: bool = False

    def of(self, found: Mapping[str, float]) -> float:
        return found[self.value] / (found[self.over] if self.over else 1.0)


@dataclasses.dataclass(frozen=True)
class Ordering:
    """`value` is more than `over`, as published: their ratio is above 1."""

    workload: str
    row: str
    published: float
    value: str
    over: str
    calibrated: bool = False

    def of(self, found: Mapping[str, float]) -> float:
        return found[self.value] / found[self.over]
