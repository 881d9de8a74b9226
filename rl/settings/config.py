"""The configuration of a training run: its sections, as users set them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from reprise.models.config import LoraShape, LoraTarget, MeshConfig, ModelConfig
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.cluster.config import ClusterConfig
from reprise.rl.data.tasks import TaskConfig
from reprise.rl.drafter_training.config import DrafterConfig, shape_of
from reprise.rl.drafting.config import DraftingConfig
from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.gin.loader import load
from reprise.rl.gin.values import AUTO
from reprise.rl.learner.config import NumericsConfig, OptimizerConfig, TrainerConfig, TrainSpec
from reprise.rl.losses.algorithms import AlgorithmConfig, CriticConfig, DistillConfig
from reprise.rl.metrics.writer import MetricsConfig
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.runtime.user_files import files_of, is_user_name
from reprise.rl.runtime.waits import HANG_LIMIT_S
from reprise.rl.settings.eval_sets import EvalConfig
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.config import DraftModelConfig, ReuseConfig, SpeculationConfig
from reprise.rl.workers.config import SchedConfig
from reprise.spec.budget.config import TunerConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, EagleConfig

# Settings that may be "auto"; `rl.preflight.sizes` computes them from the device memory.
SIZES = ("Engine.slots", "Engine.pages", "Trainer.micro_batch_tokens")


MAX_STEPS = 2**26 - 1  # renewed noise of reuse is named by its step (spec.reuse.rollout_cache)
MAX_S = 10**9  # of a time limit; the operating system takes a few times as much
MAX_REQUESTS = 2**20  # of a step


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The run folder, the length of a run, its seed, and its time limits.

    A part of a run without a heartbeat for `hang_limit_s` is hung: the run names this part, and
    stops or continues without it. Steps with rewards that teach nothing (none, all equal, all cut
    off, no group left, all failed) are reported with the reason after three in a row.
    """

    directory: str | None = None
    """The run folder. None: runs/NAME_OF_CONFIG, numbered."""
    steps: int = 100
    """The number of training steps."""
    seed: int = 0
    """The seed of the data order, the sampling noise and the shuffles of minibatches."""
    hang_limit_s: float = HANG_LIMIT_S
    """Seconds without a heartbeat after which a part of the run is hung."""
    compile_limit_s: float = 3600.0
    """Seconds that the compilation of one program may take."""
    stop_limit_s: float = 8.0
    """Seconds from a stop request to the next save; later the run exits without saving."""
    time_limit_s: float | None = None
    """Save and stop before a step that would exceed this time at the pace of the last step;
    `--resume` continues with the same time again. None: until all steps are done."""
    no_update_limit_steps: int = 20
    """Consecutive steps without a learning signal after which the run saves and exits with status
    1."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps must be 1 to {MAX_STEPS:,}, got {self.steps}")
        if self.no_update_limit_steps < 1:
            raise ValueError(
                f"no_update_limit_steps must be at least 1, got {self.no_update_limit_steps}"
            )
        for field in ("hang_limit_s", "compile_limit_s", "stop_limit_s", "time_limit_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= MAX_S:
                raise ValueError(f"{field} must be above 0 and at most {MAX_S:,}, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in 0 … 2³¹−1, got {self.seed}")


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """The policy to start from, and its low-rank adapters.

    With adapters, the weights W are frozen and W + (lora_alpha / lora_rank) · B · A is trained.
    """

    directory: str = "policies/tiny"
    """A Hugging Face folder with its tokenizer, or a GGUF file."""
    lora_rank: int = 0
    """The rank of the adapters; 0 trains all weights."""
    lora_alpha: float = 32.0
    """The scale of the adapters is `lora_alpha / lora_rank`."""
    lora_targets: tuple[LoraTarget, ...] = ("attention", "mlp")
    """The layers with adapters: attention, mlp, head."""

    def __post_init__(self) -> None:
        if self.lora_rank:
            _ = self.lora  # raises for values that do not fit

    @property
    def lora(self) -> LoraShape | None:
        """The shape of the adapters; None if all weights are trained."""
        if not self.lora_rank:
            return None
        return LoraShape(self.lora_rank, self.lora_alpha, self.lora_targets)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The rollouts of one step: a group of responses to each prompt."""

    prompts_per_step: int = 16
    """The number of prompts in a step."""
    group_size: int = 8
    """The number of responses to each prompt, which are compared with one another."""
    max_prompt_tokens: int = 256
    """Examples with a longer prompt are left out of the run. Their number is logged at the start,
    or by each step (`rollout/left_out_prompts`) if there are more than
    `Task.stream_above_examples`."""
    cache_bytes: int = 2**30
    """Memory for last epoch's responses, compressed, which drafts and reuse need; the rest goes to
    the run folder."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            limit = 2**62 if field.name == "cache_bytes" else MAX_REQUESTS
            if not 1 <= value <= limit:
                raise ValueError(f"{field.name} must be 1 to {limit:,}, got {value}")
        if self.num_requests > MAX_REQUESTS:
            raise ValueError(
                f"prompts_per_step · group_size must be at most {MAX_REQUESTS:,}, got "
                f"{self.prompts_per_step:,} · {self.group_size:,}"
            )

    @property
    def num_requests(self) -> int:
        return self.prompts_per_step * self.group_size


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of `python -m rl.train`."""

    run: RunConfig
    policy: PolicyConfig
    task: TaskConfig
    reward: RewardConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    engine: EngineConfig
    sched: SchedConfig
    speculation: SpeculationConfig
    tuner: TunerConfig
    drafter: DrafterConfig
    draft_model: DraftModelConfig
    drafting: DraftingConfig
    drafter_training: DrafterTrainingConfig
    data_buffer: DataBufferConfig
    reuse: ReuseConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig
    distill: DistillConfig
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    numerics: NumericsConfig
    mesh: MeshConfig
    cluster: ClusterConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig

    def __post_init__(self) -> None:
        verified = self.reuse.couples_noise or self.sched.mode == "ahead"
        object.__setattr__(self, "sampling", self.sampling.with_scheme(verified=verified))

    @property
    def open_sizes(self) -> tuple[str, ...]:
        """The settings of `SIZES` that are "auto"."""
        return tuple(name for name in SIZES if self._size(name) == AUTO)

    def with_sizes(self, sizes: Mapping[str, int]) -> Self:
        """Return the configuration with the given sizes for settings of `SIZES`."""
        changed = self
        for name, size in sizes.items():
            section, field = name.lower().split(".")
            part = dataclasses.replace(getattr(changed, section), **{field: size})
            changed = dataclasses.replace(changed, **{section: part})
        return changed

    def with_sizes_of(self, before: TrainConfig) -> Self:
        """Return the configuration with the sizes of `before` in place of "auto"."""
        return self.with_sizes({name: before._size(name) for name in self.open_sizes})

    def on_day(self, date: str) -> Self:
        """Return the configuration with this date for chat templates, unless a date is set."""
        task = dataclasses.replace(self.task, date=self.task.date or date)
        return dataclasses.replace(self, task=task)

    def _size(self, name: str) -> Any:
        section, field = name.lower().split(".")
        return getattr(getattr(self, section), field)

    @property
    def user_names(self) -> dict[str, tuple[str, ...]]:
        """The names `PATH.py:name` of objects in files of the user, by setting."""
        algorithm = self.algorithm
        named = {
            "Reward.functions": self.reward.functions,
            "Environment.factory": (self.environment.factory or "",),
            "Speculation.sources": self.speculation.sources,
            "Speculation.budget": (self.speculation.budget,),
            "Sched.policy": (self.sched.policy,),
            "Algorithm.policy_loss": (algorithm.policy_loss or "",),
            "Algorithm.advantages": (algorithm.advantages or "",),
        }
        found = {setting: tuple(filter(is_user_name, names)) for setting, names in named.items()}
        return {setting: names for setting, names in found.items() if names}

    @property
    def user_files(self) -> dict[str, str]:
        """The path of each file of the user, by a description."""
        return files_of(name for names in self.user_names.values() for name in names)

    @property
    def draft_model_folder(self) -> Path | None:
        """The folder or file of the draft model, or None if no draft model drafts."""
        if not self.speculation.asks_model:
            return None
        return resolve_path(str(self.draft_model.directory)).resolve()

    @property
    def teacher_folder(self) -> Path | None:
        """The folder or file of the teacher, or None without distillation."""
        return (
            None if self.distill.teacher is None else resolve_path(self.distill.teacher).resolve()
        )

    @property
    def num_verifying(self) -> int:
        """The number of workers that answer requests, if the number of drafting workers is set."""
        return self.sched.workers - (self.drafting.workers or 0)

    @property
    def longest_tokens(self) -> int:
        """The maximum tokens of a prompt and its response together, or of an episode."""
        turn_tokens = self.sampling.max_any_new_tokens
        return self.rollout.max_prompt_tokens + self.environment.episode_tokens(turn_tokens)

    @property
    def correct_by(self) -> str:
        """The name of the reward function that makes a response correct (pass@k)."""
        named = self.eval.correct_by or self.reward.functions[0]
        names = dict(zip(self.reward.functions, self.reward.names, strict=True))
        return names.get(named, named)


def load_config(*files: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of a run: its defaults, changed by `.gin` files, then overrides.

    An override is a text like `Sampling.temperature=0.7`. Raises ConfigError.
    """
    return load(TrainConfig, files, overrides)


def drafter_shape(config: TrainConfig, model: ModelConfig) -> EagleConfig | None:
    """Return the shape of the learned drafter, or None; raise the errors of `shape_of`."""
    if not config.speculation.learns:
        return None
    return shape_of(config.drafter, config.drafter_training, model)


def recipe(config: TrainConfig, model: ModelConfig, *, any_sampling: bool = False) -> TrainSpec:
    """Return the static part of the training steps.

    Responses have the sampling of the configuration, or with `any_sampling` any.
    """
    minibatches = min(config.trainer.minibatches, config.rollout.prompts_per_step)
    steps = config.run.steps * config.trainer.inner_updates * minibatches
    if steps >= 2**31:
        raise ValueError(
            f"expected fewer than 2³¹ optimizer steps, got Run.steps={config.run.steps:,} · "
            f"Trainer.inner_updates={config.trainer.inner_updates:,} · {minibatches:,} minibatches"
        )
    return TrainSpec(
        model,
        config.algorithm,
        config.trainer,
        config.optimizer,
        steps,
        critic=config.critic,
        distill=config.distill,
        may_cut=any_sampling or config.sampling.may_cut,
    )
