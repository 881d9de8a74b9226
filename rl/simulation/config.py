"""Configuration of simulated rollouts: schedulers, hardware and response lengths."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from reprise.rl.runtime.user_files import UserName
from reprise.rl.warm_up.measured_run import read_profile
from reprise.sched.policies.divided import POLICIES
from reprise.sched.simulator.cluster import Cluster
from reprise.sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from reprise.sched.simulator.workloads import Workload

if TYPE_CHECKING:
    Device: TypeAlias = str
    Model: TypeAlias = str
    Policy: TypeAlias = str
else:  # names in tables, known only at run time
    Device = Literal[tuple(ACCELERATORS)]
    Model = Literal[tuple(MODELS)]
    Policy = Literal[POLICIES]


@dataclasses.dataclass(frozen=True)
class SimulatedClusterConfig:
    """The workers of a simulated cluster, and the model that each holds."""

    profile: str | None = None
    """The folder of a training run with several workers and the budget `goodput`: workers are as
    fast as the engine of that run measured, and `device` and `model` do not count."""
    device: Device = "H100"
    """The device of the roofline."""
    model: Model = "Qwen3-8B"
    """The model of the roofline."""
    workers: int = 8
    """The number of workers."""
    devices_per_worker: int = 1
    """Devices that hold one copy of `model`."""
    ranks_per_instance: int = 1
    """Above 1, a worker is a rank with separate requests and cache, and this number of consecutive
    workers share the experts of a copy."""
    max_requests: int = 1024
    """Requests that run concurrently on a worker."""
    kv_tokens: int | None = None
    """Cache positions of a worker; None: the most that fit with the weights."""

    def __post_init__(self) -> None:
        if min(self.workers, self.devices_per_worker, self.max_requests) < 1:
            raise ValueError("expected at least one worker, one device of it and one request")
        if self.ranks_per_instance < 1 or self.workers % self.ranks_per_instance:
            raise ValueError(
                "expected workers in whole instances of ranks_per_instance, got "
                f"{self.workers} and {self.ranks_per_instance}"
            )


@dataclasses.dataclass(frozen=True)
class SimulateConfig:
    """The schedulers, compared with the first on the same rollouts, one rollout per seed."""

    policies: tuple[Policy | UserName, ...] = POLICIES
    """`group_fifo`, `divided_fifo`, `seer`, `oracle` (which knows all lengths), or a scheduler of
    yours, `PATH.py:NAME`."""
    chunk_tokens: int = 8192
    """Tokens that a request generates before the scheduler may move it."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of the rollouts."""
    trace: str | None = None
    """The folder of a training run, whose lengths replace drawn lengths."""
    trace_step: int = 1
    """The step of the trace."""
    trace_scale: float = 1.0
    """A factor of the lengths of the trace."""
    directory: str | None = None
    """The output folder. None: runs/simulate-NAME_OF_CONFIG."""

    def __post_init__(self) -> None:
        if not self.policies or not self.seeds:
            raise ValueError(f"expected a policy and a seed, got {self.policies}, {self.seeds}")


@dataclasses.dataclass(frozen=True)
class SimulateRun:
    """A simulation: policies, hardware and response lengths."""

    simulate: SimulateConfig = dataclasses.field(default_factory=SimulateConfig)
    simulated_cluster: SimulatedClusterConfig = dataclasses.field(
        default_factory=SimulatedClusterConfig
    )
    workload: Workload = dataclasses.field(
        default_factory=lambda: Workload(256, 8, mean_tokens=4000, limit_tokens=16384)
    )
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        kv_tokens = make_cluster(self).kv_tokens_per_worker
        needed = self.workload.prompt_tokens + self.workload.limit_tokens
        if kv_tokens < needed:
            raise ValueError(
                f"a worker holds {max(kv_tokens, 0):,} positions beside the weights, a request may "
                f"take {needed:,}; fix: more SimulatedCluster.devices_per_worker, or a lower "
                "Workload.limit_tokens"
            )


def make_cluster(config: SimulateRun) -> Cluster:
    """Return the workers that a configuration describes."""
    cluster = config.simulated_cluster
    if cluster.profile is not None:
        costs = read_profile(Path(cluster.profile))
        return Cluster(costs, cluster.workers, cluster.max_requests, cluster.kv_tokens)
    instance = Instance(
        device=ACCELERATORS[cluster.device],
        model=MODELS[cluster.model],
        num_devices=cluster.devices_per_worker,
        efficiency=config.efficiency,
        num_ranks=cluster.ranks_per_instance,
    )
    return Cluster(instance, cluster.workers, cluster.max_requests, cluster.kv_tokens)
