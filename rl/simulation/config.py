"""The configuration sections of `python -m rl.simulate`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from rl.warm_up.measured_run import read_profile
from sched.policies.registry import POLICIES
from sched.simulator.cluster import Cluster
from sched.simulator.roofline import ACCELERATORS, MODELS, Efficiency, Instance
from sched.simulator.workloads import Workload

if TYPE_CHECKING:
    Device: TypeAlias = str
    Model: TypeAlias = str
    Policy: TypeAlias = str
else:  # names in tables, which only a running program knows
    Device, Model = Literal[tuple(ACCELERATORS)], Literal[tuple(MODELS)]
    Policy = Literal[POLICIES]

PAPERS = ("seer", "rhymerl", "specactor", "tlt")


@dataclasses.dataclass(frozen=True)
class SimulatedClusterConfig:
    """The workers: `devices_per_worker` devices hold one copy of `model`.

    `profile` is the folder of a training run with several workers whose budget was `goodput`: a
    worker is as fast as its engine measured there, and `device` and `model` do not count.
    With `ranks_per_instance` above one a worker is a rank: that many consecutive ones share a
    copy's experts, and each has its own requests and cache.
    """

    profile: str | None = None
    device: Device = "H100"
    model: Model = "Qwen3-8B"
    workers: int = 8
    devices_per_worker: int = 1
    ranks_per_instance: int = 1
    max_requests: int = 1024  # running on a worker at once
    kv_tokens: int | None = None  # positions of a worker; None: as many as fit beside the weights

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
    """The policies, compared with the first of them, on the same rollouts, one for each seed.

    `trace` is the folder of a training run: lengths are those of its step `trace_step`, times
    `trace_scale`, instead of drawn ones. `reproduces` is the paper whose published figures are
    simulated instead, and printed beside them; `calibrated`: constants were fitted to them.
    """

    policies: tuple[Policy, ...] = POLICIES
    chunk_tokens: int = 8192
    seeds: tuple[int, ...] = (0,)
    trace: str | None = None
    trace_step: int = 1
    trace_scale: float = 1.0
    directory: str | None = None  # None: runs/simulate-NAME_OF_CONFIG
    reproduces: Literal["seer", "rhymerl", "specactor", "tlt"] | None = None
    calibrated: bool = False

    def __post_init__(self) -> None:
        if not self.policies or not self.seeds:
            raise ValueError(f"expected a policy and a seed, got {self.policies}, {self.seeds}")


@dataclasses.dataclass(frozen=True)
class GroupedDraftsConfig:
    """Seer's drafts: tokens a round by finished siblings, for one chain and for several paths."""

    finished_siblings: tuple[int, ...] = (0, 1, 5, 15)
    chain_tokens: tuple[float, ...] = (1.70, 2.04, 2.32, 2.53)
    paths_tokens: tuple[float, ...] = (1.85, 2.25, 2.59, 2.85)
    window: int = 8  # the longest chain
    paths: int = 4
    lookup_s: float = 5e-6  # of one request's draft tokens: O(p + s), in the engine's process

    def __post_init__(self) -> None:
        lengths = {len(self.finished_siblings), len(self.chain_tokens), len(self.paths_tokens)}
        if len(lengths) != 1 or self.finished_siblings[:1] != (0,):
            raise ValueError("expected tokens for each of finished_siblings, the first of them 0")


@dataclasses.dataclass(frozen=True)
class TrainingStepsConfig:
    """A run of steps over epochs of the same prompts, as in RhymeRL."""

    steps_per_epoch: int = 8
    epochs: int = 3  # the first is history only
    growth: float = 1.02  # of the mean length from epoch to epoch
    ranking_groups: int = 16
    devices: int = 128  # including those that train
    rollout_share: float = 0.91  # of the work of a step: figure 2
    acceptance: float = 0.72  # of draft tokens from history: 65 to 79%, figure 17
    found_tokens: float = 0.93  # share of the tokens that history has: figure 6


@dataclasses.dataclass(frozen=True)
class SpecActorConfig:
    """SpecActor's drafters and the acceptance of their draft tokens."""

    devices: int = 256
    drafters: tuple[Model, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
    accepted: float = 0.605  # share of drafted tokens: the middle of section 5.2's range
    spread: float = 0.1  # of p, the probability of a draft token, over requests
    ngram_acceptance: float = 0.2  # its mean p
    unplanned_draft_devices: int = 2  # of a unit, before reconfiguration plans them
    drafter_overhead_s: float = 2.3e-3  # of a draft token, instead of Efficiency.overhead_s
    reconfigure_tokens: int = 1000  # of a request between two plans of its own: section 4.1
    requests_per_helper: int = 8
    network_bytes_per_s: float = 50e9  # of a device, to other workers: 400 Gb/s, section 5.1
    step_s: float = 2.0  # of the simulation


@dataclasses.dataclass(frozen=True)
class TreeDraftsConfig:
    """TLT's tree drafts: tokens a round by draft tokens verified."""

    drafts: tuple[int, ...] = (16, 32, 48, 64)
    tokens: tuple[float, ...] = (7.57, 8.43, 8.67, 8.67)  # fitted to table 4; the last is table 1's
    depth: int = 10  # drafter steps
    top_k: int = 8  # nodes of each step
    step_s: float = 0.1e-3  # fixed seconds of a drafter's step, and what each device adds
    step_device_s: float = 0.2e-3
    positions: int = 1000  # of a request, where the tables do not say
    most_requests: int = 32  # with more running, rounds are plain

    def __post_init__(self) -> None:
        if len(self.drafts) != len(self.tokens):
            raise ValueError("expected tokens for each number of draft tokens")


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
    grouped_drafts: GroupedDraftsConfig = dataclasses.field(default_factory=GroupedDraftsConfig)
    training_steps: TrainingStepsConfig = dataclasses.field(default_factory=TrainingStepsConfig)
    specactor: SpecActorConfig = dataclasses.field(default_factory=SpecActorConfig)
    tree_drafts: TreeDraftsConfig = dataclasses.field(default_factory=TreeDraftsConfig)

    def __post_init__(self) -> None:
        kv_tokens = make_cluster(self).kv_tokens_per_worker
        needed = self.workload.prompt_tokens + self.workload.limit_tokens
        if kv_tokens < needed:
            raise ValueError(
                f"a worker holds {max(kv_tokens, 0):,} positions beside the weights, a request may "
                f"take {needed:,}; mend: more SimulatedCluster.devices_per_worker, or a lower "
                "Workload.limit_tokens"
            )


def make_cluster(config: SimulateRun) -> Cluster:
    """Return the workers that a configuration describes."""
    asked = config.simulated_cluster
    costs = make_instance(config) if asked.profile is None else read_profile(Path(asked.profile))
    return Cluster(costs, asked.workers, asked.max_requests, asked.kv_tokens)


def make_instance(config: SimulateRun) -> Instance:
    """Return a worker by the figures of its device and model."""
    asked = config.simulated_cluster
    return Instance(
        ACCELERATORS[asked.device],
        MODELS[asked.model],
        asked.devices_per_worker,
        config.efficiency,
        asked.ranks_per_instance,
    )
