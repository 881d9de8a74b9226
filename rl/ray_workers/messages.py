"""Settings of rollout workers in actors of Ray, and the messages between these and their run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from models.config import ModelConfig
from rl.drafting.workers import DraftsApart
from rl.engine.config import EngineConfig
from rl.engine.rollout_spec import RolloutSpec
from rl.speculation.config import DraftModelConfig, SpeculationConfig
from rl.warm_up.rollout_programs import Reach
from rl.weights.versions import Offer
from rl.workers.messages import Report
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.eagle.batch import HiddenStates
from spec.eagle.config import DrafterTrainingConfig, EagleConfig, TreeConfig
from spec.eagle.data_buffer import RequestSample


@dataclasses.dataclass(frozen=True, eq=False)
class LearnedSettings:
    """A learned drafter but for its weights, and its training: on draws at `temperature`."""

    config: EagleConfig
    tree: TreeConfig
    training: DrafterTrainingConfig
    draft_ids_U: np.ndarray | None
    temperature: float


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerSettings:
    """A worker as its run configures it.

    `model_here`: the draft model drafts on this worker's devices, and not only on others'.
    """

    number: int
    model: ModelConfig
    engine: EngineConfig
    dtype: str
    num_devices: int
    speculation: SpeculationConfig
    tuner: TunerConfig
    seed: int
    draft_model: DraftModelConfig | None
    model_here: bool
    model_apart: bool
    learned: LearnedSettings | None
    fetch_s: float  # deadline of values from Ray's store


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of the rollouts to come, in functions that can be sent.

    `batch` are the rows and tokens of micro-batches of drafter training, if the worker may train.
    """

    sampling: SamplingConfig
    reach: Reach
    batch: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The files that `rl.warm_up.measured_run` writes, and the worker's clock after that."""

    rounds: str
    moves: str
    clock_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutMessage:
    """A rollout for a worker in another program; `spec` has no sink, nor its `weights` and `key`.

    `name` is the same for all workers of a rollout, `sample` the requests whose hidden states the
    sink of number `sink` wants, `apart` the worker's drafting workers, `bandit` the state of its
    tuner for a program that has just started.
    """

    spec: RolloutSpec
    weights: Offer
    key: np.ndarray
    name: str
    sink: int
    sample: RequestSample | None
    apart: DraftsApart | None
    bandit: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
    """A worker's `Report`, of which `stats` has new rounds alone, as has `states` responses'.

    `states` have the numbers of their sinks, `rollout` counts the rollouts that were opened;
    `bandit` is the tuner's state of an idle worker.
    """

    report: Report
    rollout: int
    states: list[tuple[int, HiddenStates]]
    remarks: list[str]
    bandit: dict[str, Any] | None
