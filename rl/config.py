"""A training run as users set it: its sections, and the inputs they name.

Nothing here touches a device, so that `--dry_run` can open and check all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from models import hf, tokenizer
from models.config import MeshConfig, ModelConfig
from models.token_text import TokenBytes
from models.tokenizer import Tokenizer
from rl import config_checks
from rl.checkpoint.config import CheckpointConfig
from rl.cluster.config import ClusterConfig
from rl.data.prompts import MOST_PASSED_OVER, DataOrder, encode_prompt
from rl.data.tasks import Example, Task, TaskConfig, data_digest, data_files, open_tasks
from rl.drafter_training.config import DrafterConfig, shape_of
from rl.drafting.config import DraftingConfig
from rl.engine.config import EngineConfig
from rl.eval_sets import EvalConfig, EvalSets, open_sets
from rl.gin.loader import resolve_path
from rl.gin.values import AUTO
from rl.learner.algorithms import AlgorithmConfig, CriticConfig
from rl.learner.config import OptimizerConfig, TrainerConfig, TrainSpec
from rl.metrics.writer import MetricsConfig
from rl.rewards.config import RewardConfig, validate
from rl.runtime.waits import HANG_LIMIT_S
from rl.speculation.config import DraftModelConfig, ReuseConfig, SpeculationConfig, check_coupling
from rl.workers.config import SchedConfig
from spec.budget.config import TunerConfig
from spec.config import SamplingConfig
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, EagleConfig

# Settings that may be "auto": `rl.preflight.sizes` finds numbers by a device's memory.
SIZES = ("Engine.slots", "Engine.pages", "Trainer.micro_batch_tokens")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run's folder, its length, and the seed of its data order and noise.

    What shows no sign of life for `hang_limit_s` hangs: it is named, and the run ends or does
    without it; compiling has `compile_limit_s` for each program. Asked to stop, a run that has not
    come to its next save within `stop_limit_s` ends without one. With `time_limit_s` a run saves
    and ends before a step that, at the pace of the last one, would end later than that after the
    start; `--resume` continues it, with as much time again.
    """

    directory: str | None = None  # None: runs/NAME_OF_CONFIG, numbered
    steps: int = 100
    seed: int = 0
    hang_limit_s: float = HANG_LIMIT_S
    compile_limit_s: float = 3600.0
    stop_limit_s: float = 8.0
    time_limit_s: float | None = None  # None: until all steps are done

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        for field in ("hang_limit_s", "compile_limit_s", "stop_limit_s", "time_limit_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field} must be above 0 and finite, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in 0 … 2³¹−1, got {self.seed}")


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """The policy to start from: a Hugging Face folder with its tokenizer, or a GGUF file."""

    directory: str = "policies/tiny"


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """The rollouts of one step: `group_size` responses to each of `prompts_per_step` prompts.

    Examples whose prompt has more than `max_prompt_tokens` are left out of the
    run; how many is said at the start, or by each step (`rollout/left_out_prompts`) if there are
    more than `Task.stream_above_examples`. Last epoch's responses, for drafts and reuse,
    take `cache_bytes` of memory, compressed; what is beyond goes to the run folder.
    """

    prompts_per_step: int = 16
    group_size: int = 8
    max_prompt_tokens: int = 256
    cache_bytes: int = 2**30

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name} must be at least 1, got {getattr(self, field.name)}"
                )

    @property
    def num_requests(self) -> int:
        return self.prompts_per_step * self.group_size


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that `python -m rl.train` can be told."""

    run: RunConfig
    policy: PolicyConfig
    task: TaskConfig
    reward: RewardConfig
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
    trainer: TrainerConfig
    optimizer: OptimizerConfig
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
        """Return the configuration with these numbers for settings of `SIZES`."""
        changed = self
        for name, size in sizes.items():
            section, field = name.lower().split(".")
            part = dataclasses.replace(getattr(changed, section), **{field: size})
            changed = dataclasses.replace(changed, **{section: part})
        return changed

    def with_sizes_of(self, before: TrainConfig) -> Self:
        """Return the configuration with the sizes of an earlier one where its own are "auto"."""
        return self.with_sizes({name: before._size(name) for name in self.open_sizes})

    def _size(self, name: str) -> Any:
        section, field = name.lower().split(".")
        return getattr(getattr(self, section), field)

    @property
    def draft_model_folder(self) -> Path | None:
        """The folder or file of the draft model, if one drafts."""
        if not self.speculation.asks_model:
            return None
        return resolve_path(str(self.draft_model.directory)).resolve()

    @property
    def num_verifying(self) -> int:
        """The workers that answer requests, where it is set how many draft for them."""
        return self.sched.workers - (self.drafting.workers or 0)

    @property
    def longest_tokens(self) -> int:
        """Prompt and response together, at most."""
        return self.rollout.max_prompt_tokens + self.sampling.longest_new_tokens

    @property
    def eval_prompt_tokens(self) -> int:
        """The longest prompt of an evaluation."""
        return self.eval.max_prompt_tokens or self.rollout.max_prompt_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """The longest prompt that the engine is given, in training or in an evaluation."""
        evaluated = self.eval_prompt_tokens if self.eval.num_prompts else 0
        return max(self.rollout.max_prompt_tokens, evaluated)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs that a configuration names, opened and checked; `task` holds the usable
    examples, or all of them where prompts are looked at as they come (`left_out` is None).
    `evals` holds the questions of evaluations.
    """

    policy: Path
    model: ModelConfig
    tokenizer: Tokenizer
    task: Task
    left_out: int | None
    data_digest: str = ""  # of the files that the task is read from
    evals: EvalSets = dataclasses.field(default_factory=EvalSets)

    @functools.cached_property
    def shape_name(self) -> str:
        """Names the shape of the policy and its vocabulary: whose tokens cached responses hold."""
        words = sorted(self.tokenizer.backend.get_vocab().items())
        digest = hashlib.sha256(repr((self.model, words)).encode()).hexdigest()
        return f"{self.model.architecture}-{digest[:16]}"

    def words_for(self, sampling: SamplingConfig) -> TokenBytes | None:
        """The text of the tokens, where a rollout of this sampling needs it."""
        has_strings = any(one.stop for one in sampling.variants)
        return self.tokenizer.token_bytes if has_strings else None

    def encode(self, example: Example, config: TaskConfig) -> tuple[int, ...]:
        return encode_prompt(self.tokenizer, example, config)


@dataclasses.dataclass(frozen=True, eq=False)
class _Subset:
    """Some examples of a task."""

    task: Task
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        return self.task[self.indices[index]]


def open_inputs(config: TrainConfig) -> Inputs:
    """Open policy, tokenizer and tasks, and check that they fit together.

    Raises ValueError or FileNotFoundError with expected, got and mend.
    """
    policy, model, words = open_policy(config.policy.directory)
    check_sections(config, model)
    config_checks.check_stops(config.sampling, model, words)
    if config.speculation.asks_model:
        from rl.speculation import draft_model

        for one in config.draft_model.each:
            draft_model.check(one, model, words, config.longest_tokens)
    validate(config.reward)
    task = open_tasks(config.task, config.run.seed)
    inputs = Inputs(policy, model, words, task, 0, data_digest(config.task))
    streams = len(task) > config.task.stream_above_examples
    inputs = (_open_stream if streams else _open_whole)(config, inputs)
    evals = open_sets(
        config.eval,
        config.task,
        config.eval_prompt_tokens,
        lambda example: inputs.encode(example, config.task),
        lambda: inputs.task,
    )
    return dataclasses.replace(inputs, evals=evals)


def check_sections(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ValueError where sections do not fit one another, or the policy's shape."""
    config_checks.check_lengths(config, model)
    config_checks.check_layout(config, model)
    config_checks.check_sampling(config)
    config_checks.check_algorithm(config)
    config_checks.check_cluster(config)
    drafter_shape(config, model)
    config_checks.check_tuner(config)
    config_checks.check_drafting(config)


def _open_whole(config: TrainConfig, inputs: Inputs) -> Inputs:
    """Look at all prompts, and keep those that fit."""
    task, limit = inputs.task, config.rollout.max_prompt_tokens
    lengths = [len(inputs.encode(task[i], config.task)) for i in range(len(task))]
    usable = tuple(i for i, n in enumerate(lengths) if n <= limit)
    if not usable:
        raise ValueError(
            f"every one of {len(task)} prompts is longer than Rollout.max_prompt_tokens={limit} "
            f"(the shortest has {min(lengths)}): raise the limit"
        )
    _check_coupling(config, len(usable))
    if len(usable) == len(task):
        return inputs
    return dataclasses.replace(inputs, task=_Subset(task, usable), left_out=len(task) - len(usable))


def _open_stream(config: TrainConfig, inputs: Inputs) -> Inputs:
    """Look at as many prompts as it takes to find one that fits, in the order of the run."""
    task, limit = inputs.task, config.rollout.max_prompt_tokens
    first = DataOrder(len(task), config.run.seed).indices(0, MOST_PASSED_OVER)
    if not any(len(inputs.encode(task[int(i)], config.task)) <= limit for i in first):
        raise ValueError(
            f"the first {len(first)} prompts of the data order are longer than "
            f"Rollout.max_prompt_tokens={limit}: raise the limit"
        )
    _check_coupling(config, len(task))
    return dataclasses.replace(inputs, left_out=None)


def _check_coupling(config: TrainConfig, num_examples: int) -> None:
    phases = 1 + (config.algorithm.resolved.max_extra_phases or 0)
    prompts, size = phases * config.rollout.prompts_per_step, config.rollout.group_size
    # in a pipeline those of two steps take turns
    scattered = config.sched.mode == "pipeline" and phases > 1 and 2 * prompts > num_examples
    check_coupling(config.reuse, num_examples, prompts, size, most_times=2 + scattered)


def open_policy(directory: str) -> tuple[Path, ModelConfig, Tokenizer]:
    """A policy's folder, shape and tokenizer; the shape names an end token.

    Raises ValueError or FileNotFoundError where they are missing or do not fit together.
    """
    policy = resolve_path(directory)
    model = hf.check(policy)
    words = tokenizer.load(policy)
    tokenizer.check_vocabulary(words, model)
    # a chat's turn may end in another token than a text does, and a folder may name each in a file
    ends = tuple(dict.fromkeys((*model.eos_token_ids, *words.eos_token_ids)))
    model = dataclasses.replace(model, eos_token_ids=ends)
    if not ends:
        raise ValueError(
            f"neither the config of {policy} nor its tokenizer names an end token: no response "
            "could end; set eos_token_id in config.json"
        )
    return policy, model, words


def drafter_shape(config: TrainConfig, model: ModelConfig) -> EagleConfig | None:
    """Return the shape of the run's learned drafter, None without one; raises as `shape_of`."""
    if not config.speculation.learns:
        return None
    return shape_of(config.drafter, config.drafter_training, model)


def remarks(config: TrainConfig, inputs: Inputs) -> list[str]:
    """Return remarks on a run that are worth knowing before it begins; none is an error."""
    found = []
    if not config.speculation.enabled:
        found.append(
            'speculation: off in this configuration; Speculation.budget = "goodput" drafts where '
            "measured seconds say that it pays"
        )
    if config.trainer.minibatches > (groups := config.rollout.prompts_per_step):
        found.append(
            f"Trainer.minibatches={config.trainer.minibatches} becomes {groups}: a minibatch holds "
            "whole groups, and a step has Rollout.prompts_per_step of them"
        )
    for spec in config.task.specs:
        if len(paths := data_files(spec)) > 1:
            found.append(f"{spec}: {len(paths)} files, {paths[0]} … {paths[-1].name}")
        elif paths and str(paths[0]) not in spec:
            found.append(f"{spec}: the file {paths[0]}")
    template = inputs.tokenizer.chat_template
    for name, _ in config.task.chat_template_kwargs:
        if not re.search(rf"\b{name}\b", template):
            has = "does not mention it" if template else "does not exist: the tokenizer has none"
            found.append(
                f"Task.chat_template_kwargs sets {name}, and the policy's chat template {has}; "
                "it changes nothing"
            )
    if inputs.left_out:
        found.append(f"{inputs.left_out} examples are left out: prompt too long")
    if inputs.left_out is None:
        found.append(
            f"{len(inputs.task):,} examples, above Task.stream_above_examples: they are read, "
            "checked and tokenized as they come"
        )
    return found + inputs.evals.remarks()


def recipe(config: TrainConfig, model: ModelConfig) -> TrainSpec:
    """The static part of the training steps."""
    minibatches = min(config.trainer.minibatches, config.rollout.prompts_per_step)
    steps = config.run.steps * config.trainer.inner_updates * minibatches
    return TrainSpec(
        model, config.algorithm, config.trainer, config.optimizer, steps, critic=config.critic
    )
