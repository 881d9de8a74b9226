"""The settings of how weights reach workers in other programs."""

from __future__ import annotations

import dataclasses
from typing import Literal

TransportName = Literal["jit", "transfer", "object_store"]
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
    """The way that weights take to workers, and how far behind a worker may be.

    `transport`: `jit` where one program has the devices of both; `transfer` from program to program
    by `jax.experimental.transfer`; `object_store` through a store of bytes. The publisher keeps the
    newest weights whole, and deltas of the last `kept_deltas` versions in `most_delta_mib` at most.
    Payloads move in parts of `part_mib`. A worker that is more than `most_versions_behind` behind
    has to fetch before it starts anything. A transfer is given up after `deadline_s` without
    progress; what was offered to a worker is kept for it for `lease_s`.
    """

    transport: TransportName = "transfer"
    kept_deltas: int = 8
    most_delta_mib: int = 1024
    part_mib: int = 64
    most_versions_behind: int = 1
    deadline_s: float = 120.0
    lease_s: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (
            ("kept_deltas", 0),
            ("most_delta_mib", 0),
            ("part_mib", 1),
            ("most_versions_behind", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Weights.{name}: expected {least} or more, got {getattr(self, name)}"
                )
        for name in ("deadline_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Weights.{name}: expected more than 0, got {getattr(self, name)}")

    @property
    def part_bytes(self) -> int:
        return self.part_mib * MIB
