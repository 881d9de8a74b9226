"""Everything static that a compiled training step depends on, as one hashable value."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from rl.learner.algorithms import AlgorithmConfig, CriticConfig
from rl.learner.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """How a batch of trajectories becomes optimizer steps, and what they may use of the device.

    A batch is gone through `inner_updates` times, in `minibatches` optimizer steps
    each (whole groups, shuffled). Micro-batches hold about `micro_batch_tokens`
    positions, padding included; `logprob_chunk_tokens` of them have logits at a
    time. `compute_dtype` auto is float32 on a CPU and bfloat16 elsewhere, where rollouts are
    exact up to rounding only; float32 is in full precision on every backend. Master weights
    are always float32. `remat` computes each layer again in the backward pass instead of
    keeping what it made: less memory for a third more work; auto is False on a CPU and True
    elsewhere. An update with a loss or gradient that is not finite is never applied:
    `on_nonfinite` says whether it stops the run, or is left out and counted.
    """

    inner_updates: int = 1
    minibatches: int = 1
    micro_batch_tokens: int = 8192
    logprob_chunk_tokens: int = 1024
    remat: bool | Literal["auto"] = "auto"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        for field in (
            "inner_updates",
            "minibatches",
            "micro_batch_tokens",
            "logprob_chunk_tokens",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite must be 'stop' or 'skip', got {self.on_nonfinite!r}")
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                f"compute_dtype must be 'auto', 'float32' or 'bfloat16', got {self.compute_dtype!r}"
            )

    @property
    def dtype(self) -> Any:
        """What matrix products run in. Asks jax for its backend where it says auto."""
        if self.compute_dtype == "auto":
            return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return jnp.dtype(self.compute_dtype)

    @property
    def rematerialises(self) -> bool:
        """Whether layers are computed again. Asks jax for its backend where it says auto."""
        return jax.default_backend() != "cpu" if self.remat == "auto" else self.remat


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The model and the sections that training is made of; the one static argument of its steps.

    `total_steps` counts the optimizer steps that the whole run may make: schedules end there.
    Steps that are not made (nothing to learn from, not finite) move no schedule on, so that a
    run which leaves some out ends before its schedule does.
    """

    model: ModelConfig
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig, kw_only=True)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    total_steps: int = 1

    @property
    def scores_old(self) -> bool:
        """Whether batches are scored before their first update, for the later ones."""
        steps = self.trainer.inner_updates * self.trainer.minibatches
        return self.algorithm.resolved.old_logprobs == "recomputed" and steps > 1

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
