"""Published figures, and the experiments whose simulated values are compared with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from reprise.sched.simulator.cluster import Cluster
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Instance
from reprise.sched.simulator.workloads import Workload

Kind = Literal["gain", "share", "order"]
Entry = tuple[str, float, str, str | None, Kind]  # row, published, value, over, kind


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure of a workload: the simulated `value`, over that of `over` if given.

    Its `kind` is a `gain` (a speedup), a `share`, or an `order`: `value` is more than `over`, so
    their ratio is above 1. `calibrated`: constants were fitted to it.
    """

    workload: str
    row: str
    published: float
    value: str
    over: str | None = None
    kind: Kind = "gain"
    calibrated: bool = False

    def of(self, values: Mapping[str, float]) -> float:
        """Return the simulated figure from the values of one seed."""
        return values[self.value] / (values[self.over] if self.over else 1.0)


def figures_of(workload: str, entries: Iterable[Entry], calibrated: bool = False) -> list[Figure]:
    """Return the figures of one workload from a table of them."""
    return [Figure(workload, *entry, calibrated) for entry in entries]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A workload of a paper on `workers` workers of several devices, or ranks of instances."""

    device: str
    model: str
    workers: int
    devices_per_worker: int
    workload: Workload
    calibrated: bool = False
    ranks_per_instance: int = 1

    @property
    def instance(self) -> Instance:
        device, model = ACCELERATORS[self.device], MODELS[self.model]
        return Instance(device, model, self.devices_per_worker, num_ranks=self.ranks_per_instance)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.instance, self.workers)
