"""Configuration of the processes of a run (section `Cluster`)."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

Kind = Literal["local", "spmd", "ray"]
Rollouts = Literal["local", "mesh"]
AUTO = "auto"
MAX_DEADLINE_S = 1_000_000  # jax counts four times as much in milliseconds


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The processes of a run, and how they find one another."""

    kind: Kind = "local"
    """`local` (this process is the run), `spmd` (several processes run the same command, on devices
    that form one mesh) or `ray` (rollout workers are Ray actors)."""
    coordinator: str = AUTO
    """The address of process 0, "HOST:PORT". `auto`: jax finds it, the number of processes and
    their ids on TPU slices, under SLURM, Open MPI and in Kubernetes."""
    num_processes: int | None = None
    """The number of processes; with `ray`, of actors that train."""
    process_id: int | None = None
    """The index of this process."""
    rollouts: Rollouts = "local"
    """`local` (each process generates its share of the responses on its devices) or `mesh` (one
    engine spans the devices of all processes, for policies that no process can hold)."""
    address: str | None = None
    """The address of a Ray cluster that includes this host, "HOST:PORT"; None starts Ray on this
    host."""
    scorers: int = 0
    """With `ray`: actors, with `Reward.workers` processes each, that score on CPUs of the cluster;
    0: processes of this host score."""
    history_workers: int = 0
    """With `ray`: actors that keep the responses that history drafts from, and build the index of
    the next step; 0: rollout workers build one index each."""
    deadline_s: float = 60.0
    """The maximum time between heartbeats of a process, and to join."""

    def __post_init__(self) -> None:
        for field, hint in (("kind", Kind), ("rollouts", Rollouts)):
            known = typing.get_args(hint)
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"expected {field} of {', '.join(known)}, got {value!r}")
        if self.coordinator != AUTO:
            _parse_address(self.coordinator)
        if self.address is not None:
            if self.kind != "ray":
                raise ValueError(
                    f'address={self.address!r} is that of a Ray cluster: expected kind = "ray" '
                    f"with it, got {self.kind!r}"
                )
            _parse_address(self.address, "address")
        for field, instead in (
            ("scorers", "Reward.workers sets the processes of this host"),
            ("history_workers", "elsewhere the run indexes history itself"),
        ):
            if (count := getattr(self, field)) < 0:
                raise ValueError(f"{field} must be 0 or more, got {count}")
            if count and self.kind != "ray":
                raise ValueError(
                    f'{field}={count} are actors of Ray: expected kind = "ray" with them, got '
                    f"{self.kind!r}; {instead}"
                )
        if not 1 <= self.deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"deadline_s must be 1 to {MAX_DEADLINE_S:,}, got {self.deadline_s}")

    def refuse_unused(self) -> None:
        """Raise ValueError for multi-process fields in a new run of one process.

        A resumed run may have these fields, since one process may resume a multi-process run.
        """
        fields = self.coordinator, self.num_processes, self.process_id
        if self.kind == "local" and fields != (AUTO, None, None):
            raise ValueError(
                f"Cluster.coordinator={self.coordinator!r}, num_processes={self.num_processes} and "
                f"process_id={self.process_id} are of a run of several processes: expected "
                'Cluster.kind = "spmd" (or "ray", with num_processes alone) with one of them, got '
                '"local": each process would train by itself; set kind, or leave them out'
            )

    @property
    def num_trainers(self) -> int:
        """The number of processes that train in a run on Ray; 1 is the started process itself."""
        return (self.num_processes or 1) if self.kind == "ray" else 1

    @property
    def shared(self) -> ClusterConfig:
        """This configuration without the fields that differ between processes."""
        return dataclasses.replace(self, process_id=None)

    @property
    def host(self) -> str:
        return _parse_address(self.coordinator)[0]

    @property
    def port(self) -> int:
        return _parse_address(self.coordinator)[1]


def check(config: ClusterConfig) -> None:
    """Raise ValueError unless `process_id` and `num_processes` are set and valid, if needed."""
    if config.kind != "spmd" or config.coordinator == AUTO:
        return
    count = config.num_processes
    number = config.process_id
    if count is None or number is None:
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r} needs Cluster.num_processes and, another "
            f"for each process, Cluster.process_id, got {count} and {number}"
        )
    if count < 1 or not 0 <= number < count:
        raise ValueError(
            f"expected Cluster.process_id in 0 … Cluster.num_processes − 1, got {number} of {count}"
        )


def _parse_address(text: str, field: str = "coordinator") -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        other = ' or "auto"' if field == "coordinator" else ""
        raise ValueError(f'expected {field} = "HOST:PORT"{other}, got {text!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)
