"""The inputs that a configuration names, opened and checked: policy, tokenizer, task, evaluations.

Nothing here touches a device, so `--dry_run` opens and checks every input.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.models.config import LoraShape, ModelConfig
from reprise.models.formats import hf
from reprise.models.formats.hf_files import shown
from reprise.models.text import tokenizer as tokenizers
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.prompts import MAX_PASSED_OVER, DataOrder, encode_prompt, is_rendered
from reprise.rl.data.tasks import Example, Task, TaskConfig, data_digest, data_files, open_tasks
from reprise.rl.environments.config import validate as validate_environment
from reprise.rl.rewards.config import validate
from reprise.rl.rewards.findings import Reading
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings import checks, identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.eval_sets import EvalSets, open_sets
from reprise.rl.speculation.config import check_age, check_coupling
from reprise.spec.config import SamplingConfig

if TYPE_CHECKING:
    from reprise.models.text.token_bytes import TokenBytes

_DIGESTED = 64  # prompts; a change of template, day, library or host shows in all prompts
_MIN_COMPARED = 8  # prompts, with their answers
_AROUND = " \n.$}"  # stripped around an answer


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs that a configuration names, opened and checked.

    `task` holds the usable examples, or all examples if prompts are checked as they are drawn
    (`left_out` is None). `evals` holds the questions of evaluations.
    """

    policy: Path
    model: ModelConfig
    tokenizer: Tokenizer
    task: Task
    left_out: int | None
    data_digest: str = ""  # of the files that the task is read from
    prompts_digest: str = ""  # of the tokens of the first prompts
    contents: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # rl.settings.identity.contents
    evals: EvalSets = dataclasses.field(default_factory=EvalSets)
    teacher: ModelConfig | None = None  # of distillation

    @functools.cached_property
    def shape_name(self) -> str:
        """Return a name for the policy shape and vocabulary, which cached responses depend on."""
        vocabulary = sorted(self.tokenizer.vocabulary.items())
        digest = hashlib.sha256(repr((self.model, vocabulary)).encode()).hexdigest()
        return f"{self.model.architecture}-{digest[:16]}"

    def token_bytes_for(self, sampling: SamplingConfig) -> TokenBytes | None:
        """Return the text of the tokens if a rollout with this sampling needs the text."""
        has_strings = any(one.stop for one in sampling.variants)
        return self.tokenizer.token_bytes if has_strings else None

    def encode(self, example: Example, config: TaskConfig) -> tuple[int, ...]:
        return encode_prompt(self.tokenizer, example, config)

    def read(self, text: str, sampling: SamplingConfig) -> Reading:
        """Return a response of this text as rewards receive it: encoded, cut off and decoded."""
        try:
            ids = self.tokenizer.encode(text)
        except ValueError as error:
            return Reading("", f"tokenizer: {error}")
        ends = {*self.model.eos_token_ids, *sampling.stop_ids}
        length = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
        if length > (limit := sampling.max_new_tokens):
            change = f"Sampling.max_new_tokens={limit}: it takes {length} tokens; raise the limit"
            return Reading(self.tokenizer.decode(ids[:limit]), change)
        read = self.tokenizer.decode(ids[:length])
        for stop in sampling.stop:
            if stop in read:
                end = read.index(stop) + len(stop)
                change = f"Sampling.stop={stop!r}: it ends there; leave that out"
                return Reading(read[:end], change if end < len(read) else "")
        change = (
            f"tokenizer: it reads {shown(text)} back as {shown(read)}; write the data like that"
        )
        return Reading(read, change if read != text else "")


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

    Raises ValueError or FileNotFoundError with expected, got and how to fix.
    """
    policy, model, tokenizer = open_policy(config.policy.directory, config.task, config.policy.lora)
    checks.check_sections(config, model)
    checks.check_stops(config.sampling, model, tokenizer)
    if config.speculation.asks_model:
        from reprise.rl.speculation.device_drafters import check_draft_model

        for one in config.draft_model.each:
            check_draft_model(one, model, tokenizer, config.longest_tokens)
    teacher = None
    if config.distill.teacher is not None:
        from reprise.rl.losses.teachers import open_teacher

        teacher = open_teacher(config.distill.teacher, model, tokenizer, config.longest_tokens)
    validate(config.reward)
    validate_environment(config.environment)
    if config.user_names.keys() - {"Reward.functions", "Environment.factory"}:
        from reprise.rl.settings.user_names import check_user_names

        check_user_names(config)
    task = open_tasks(config.task, config.run.seed)
    inputs = Inputs(policy, model, tokenizer, task, 0, data_digest(config.task))
    streams = len(task) > config.task.stream_above_examples
    inputs = (_open_stream if streams else _open_whole)(config, inputs)
    first = [inputs.encode(task[i], config.task) for i in range(min(len(task), _DIGESTED))]
    digest = hashlib.sha256(repr(first).encode()).hexdigest()
    evals = open_sets(
        config.eval,
        config.task,
        config.rollout.max_prompt_tokens,
        lambda example: inputs.encode(example, config.task),
        lambda: inputs.task,
    )
    contents = identity.contents(config, policy)
    return dataclasses.replace(
        inputs,
        evals=evals,
        prompts_digest=digest,
        contents=contents,
        teacher=teacher,
    )


def _open_whole(config: TrainConfig, inputs: Inputs) -> Inputs:
    """Check all prompts, and keep the prompts that fit."""
    task = inputs.task
    limit = config.rollout.max_prompt_tokens
    lengths = [len(inputs.encode(task[i], config.task)) for i in range(len(task))]
    usable = tuple(i for i, n in enumerate(lengths) if n <= limit)
    if not usable:
        raise ValueError(
            f"every one of {len(task)} prompts is longer than Rollout.max_prompt_tokens={limit} "
            f"(the shortest has {min(lengths)}): raise the limit"
        )
    _check_reuse(config, len(usable))
    if len(usable) == len(task):
        return inputs
    return dataclasses.replace(inputs, task=_Subset(task, usable), left_out=len(task) - len(usable))


def _open_stream(config: TrainConfig, inputs: Inputs) -> Inputs:
    """Check prompts in the order of the run until one fits."""
    task = inputs.task
    limit = config.rollout.max_prompt_tokens
    first = DataOrder(len(task), config.run.seed).indices(0, MAX_PASSED_OVER)
    if not any(len(inputs.encode(task[int(i)], config.task)) <= limit for i in first):
        raise ValueError(
            f"the first {len(first)} prompts of the data order are longer than "
            f"Rollout.max_prompt_tokens={limit}: raise the limit"
        )
    _check_reuse(config, len(task))
    return dataclasses.replace(inputs, left_out=None)


def _check_reuse(config: TrainConfig, num_examples: int) -> None:
    phases = 1 + (config.algorithm.resolved.max_extra_phases or 0)
    prompts = phases * config.rollout.prompts_per_step
    size = config.rollout.group_size
    # in a pipeline the phases of two steps alternate
    is_pipeline = config.sched.mode == "pipeline"
    scattered = is_pipeline and phases > 1 and 2 * prompts > num_examples
    check_coupling(config.reuse, num_examples, prompts, size, max_times=2 + scattered)
    check_age(config.reuse, num_examples, prompts, is_pipeline=is_pipeline)


def open_policy(
    directory: str, task: TaskConfig | None = None, lora: LoraShape | None = None
) -> tuple[Path, ModelConfig, Tokenizer]:
    """Return the folder, shape and tokenizer of a policy; the shape names an end token.

    `task` may name another chat template, and the date that the template prints. Raises ValueError
    or FileNotFoundError if files are missing or do not fit together.
    """
    policy = resolve_path(directory)
    model = hf.check(policy)
    tokenizer = tokenizers.load(policy)
    # chats and tokenizer may have different end tokens, named in different files of the folder
    model = tokenizers.fitted(model, tokenizer)
    if not model.eos_token_ids:
        raise ValueError(
            f"neither the config of {policy} nor its tokenizer names an end token: no response "
            "could end; set eos_token_id in config.json"
        )
    tokenizer = dataclasses.replace(tokenizer, eos_token_ids=model.eos_token_ids)
    model = dataclasses.replace(model, lora=lora)
    if task is not None and task.date:
        tokenizer = dataclasses.replace(tokenizer, day=datetime.date.fromisoformat(task.date))
    if task is not None and task.chat_template:
        try:
            template = tokenizers.read_template(resolve_path(task.chat_template))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"Task.chat_template: expected a file with a template: {error}"
            ) from error
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    return policy, model, tokenizer


def remarks(config: TrainConfig, inputs: Inputs) -> list[str]:
    """Return notes to show at the start of a run; notes are not errors."""
    result = []
    if not config.speculation.enabled:
        result.append(
            'speculation: off in this configuration; Speculation.budget = "goodput" drafts where '
            "measured seconds say that it pays"
        )
    if config.trainer.minibatches > (groups := config.rollout.prompts_per_step):
        result.append(
            f"Trainer.minibatches={config.trainer.minibatches} becomes {groups}: a minibatch holds "
            "whole groups, and a step has Rollout.prompts_per_step of them"
        )
    for spec in config.task.specs:
        if len(paths := data_files(spec)) > 1:
            result.append(f"{spec}: {len(paths)} files, {paths[0]} … {paths[-1].name}")
        elif paths and str(paths[0]) not in spec:
            result.append(f"{spec}: the file {paths[0]}")
    template = inputs.tokenizer.chat_template
    for name, _ in config.task.chat_template_kwargs:
        if not re.search(rf"\b{name}\b", template):
            has = "does not mention it" if template else "does not exist: the tokenizer has none"
            result.append(
                f"Task.chat_template_kwargs sets {name}, and the policy's chat template {has}; "
                "it changes nothing"
            )
    if is_rendered(inputs.tokenizer, inputs.task[0], config.task):
        result.append(
            "the first prompt is a text in the chat template already; such texts are encoded as "
            "they are"
        )
    result += _shown_answers(inputs.task)
    if inputs.left_out:
        result.append(f"{inputs.left_out} examples are left out: prompt too long")
    if inputs.left_out is None:
        result.append(
            f"{len(inputs.task):,} examples, above Task.stream_above_examples: they are read, "
            "checked and tokenized as they come"
        )
    return result + inputs.evals.remarks()


def _shown_answers(task: Task) -> list[str]:
    """Return a note if nearly all of the first prompts end with their answers."""
    first = [task[i] for i in range(min(len(task), _DIGESTED))]
    shown_in = [example for example in first if _ends_with_answer(example)]
    if len(first) < _MIN_COMPARED or len(shown_in) < 0.9 * len(first):
        return []
    return [
        f"{len(shown_in)} of the first {len(first)} prompts end with their expected answers, such "
        f"as {shown_in[0].example_id}: the policy is shown them; name another column with ?prompt="
    ]


def _ends_with_answer(example: Example) -> bool:
    prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    answer = (example.answer or "").strip(_AROUND)
    return bool(answer) and prompt.rstrip(_AROUND).endswith(answer)
