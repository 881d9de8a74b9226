"""A published figure, and which of a seed's simulated values are compared with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

Kind = Literal["gain", "share", "order"]
Entry = tuple[str, float, str, str | None, Kind]  # row, published, value, over, kind


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure of a workload: the simulated `value`, over that of `over` if given.

    Its `kind` is a `gain` (a speedup), a `share`, or an `order`: `value` is more than `over`, so
    that their ratio is above 1. `calibrated`: constants were fitted to it.
    """

    workload: str
    row: str
    published: float
    value: str
    over: str | None = None
    kind: Kind = "gain"
    calibrated: bool = False

    def of(self, found: Mapping[str, float]) -> float:
        """Return the simulated figure from the values of one seed."""
        return found[self.value] / (found[self.over] if self.over else 1.0)


def figures_of(workload: str, entries: Iterable[Entry], calibrated: bool = False) -> list[Figure]:
    """Return the figures of one workload from a table of them."""
    return [Figure(workload, *entry, calibrated) for entry in entries]
