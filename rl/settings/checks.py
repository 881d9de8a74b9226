"""Checks that the sections of a configuration fit together; nothing is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reprise.models.config import ModelConfig
from reprise.models.layout import rollout_tensor
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.cluster import config as cluster_config
from reprise.rl.cluster.config import AUTO
from reprise.rl.data.specs import parse_spec
from reprise.rl.rewards.config import ENVIRONMENT
from reprise.rl.runtime.user_files import did_you_mean
from reprise.rl.settings.config import TrainConfig, drafter_shape, recipe
from reprise.rl.settings.eval_sets import split_names, task_names
from reprise.spec.budget.config import MODEL, OWN
from reprise.spec.config import SamplingConfig


def check_sections(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ValueError if sections do not fit together, or do not fit the shape of the policy."""
    if config.environment.enabled or ENVIRONMENT in config.reward.functions:
        from reprise.rl.environments.supported import check_supported

        check_supported(config, model)
    check_lengths(config, model)
    check_layout(config, model)
    check_sampling(config)
    check_algorithm(config)
    check_age(config)
    check_correct_by(config)
    check_task_names(config)
    check_cluster(config)
    drafter_shape(config, model)
    recipe(config, model)
    check_tuner(config)
    check_drafting(config)


def check_lengths(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ValueError if the longest prompt and response do not fit the policy."""
    if config.longest_tokens > model.max_positions:
        raise ValueError(
            f"Rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and "
            f"Sampling.max_new_tokens={config.sampling.max_any_new_tokens} make "
            f"{config.longest_tokens} positions, the policy has {model.max_positions}: lower one "
            "of them"
        )


def check_layout(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ValueError if Mesh.rollout_tensor does not divide the key/value heads of the policy."""
    wanted = config.mesh.rollout_tensor
    if wanted != "auto":
        rollout_tensor(wanted, wanted, model.num_kv_heads, wanted)  # devices are not known yet


def check_sampling(config: TrainConfig) -> None:
    """Raise ValueError for sampling that training cannot learn from, or for unknown tasks."""
    if any(sampling.temperature == 0 for sampling in config.sampling.variants):
        raise ValueError(
            "Sampling.temperature, or that of a task in Sampling.by_task, is 0: all responses "
            "to a prompt would be the same, and training learns from differences; set it above "
            "0 (evaluations have a temperature of their own)"
        )
    names = [parse_spec(spec).name for spec in config.task.specs]
    config.sampling.check_tasks([*names, *(name for name, _ in split_names(config.eval.sets))])


def check_stops(sampling: SamplingConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ValueError for stop conditions that no response of this policy can meet."""
    for one in sampling.variants:
        # the texts of tokens are decoded only if there are stop strings
        one.check_stops(model.vocab_size, lambda text: tokenizer.token_bytes.min_tokens(text))


def check_algorithm(config: TrainConfig) -> None:
    """Raise ValueError if the algorithm could not learn from the responses of a step."""
    name = config.algorithm.name
    size = config.rollout.group_size
    compares = config.algorithm.resolved.compares_groups and config.distill.needs_rewards
    if size < 2 and compares:
        raise ValueError(
            f"Algorithm.name={name!r} compares the responses to a prompt with one another: "
            f"expected Rollout.group_size of 2 or more, got {size}; raise it, or set "
            'Algorithm.name = "ppo"'
        )
    _check_correction(config)
    for limit in {sampling.max_new_tokens for sampling in config.sampling.variants}:
        if (buffer := config.algorithm.overlong_tokens(limit)) > limit:
            raise ValueError(
                f"expected Algorithm.overlong_buffer_tokens of at most Sampling.max_new_tokens="
                f"{limit}, got {buffer}: lower it"
            )


def check_age(config: TrainConfig) -> None:
    """Raise ValueError if a pipeline would train on tokens of unlimited age."""
    reuse = config.reuse
    if config.sched.mode == "pipeline" and reuse.keeps_old_tokens and reuse.max_age_steps is None:
        raise ValueError(
            f"Reuse.mode={reuse.mode!r} keeps tokens of older policies, epoch after epoch, and "
            'Sched.mode="pipeline" bounds the age of all tokens: expected Reuse.max_age_steps, got '
            "None: set it to a few epochs, in steps"
        )


def ahead_loss(mode: str, trainer: Sequence[Any], workers: Sequence[Any]) -> str | None:
    """Return a warning if prefetching workers slow down the updates on these devices."""
    shared = [d for d in workers if d in trainer or d.platform == "cpu"]
    if mode != "ahead" or not shared:
        return None
    where = "the CPU's cores are" if shared[0].platform == "cpu" else f"{shared[0]} is"
    return (
        f'Sched.mode="ahead" prefetches during updates, and {where} shared with them: on two '
        "cores updates had 0.63 of their speed and steps took longer; unless the trainer has "
        'devices of its own, Sched.mode="sync" is likely to give the same responses sooner'
    )


def check_correct_by(config: TrainConfig) -> None:
    """Raise ValueError unless it is clear which reward function makes a response correct."""
    names = config.reward.names
    named = config.eval.correct_by
    if not config.eval.num_prompts or (named is not None and config.correct_by in names):
        return
    choices = " or ".join(f'"{name}"' for name in names)
    if named is not None:
        hint = did_you_mean(named, names)
        raise ValueError(f"Eval.correct_by: expected {choices}, got {named[:200]!r}{hint}")
    limits = [sampling.max_new_tokens for sampling in config.sampling.variants]
    reasons = {
        "Reward.functions has several": len(names) > 1,
        "Reward.weights is not 1": config.reward.full_weights != (1.0,) * len(names),
        "Algorithm adds a length penalty": any(map(config.algorithm.overlong_tokens, limits)),
    }
    if unclear := " and ".join(reason for reason, holds in reasons.items() if holds):
        raise ValueError(
            "Eval.correct_by: expected the reward function that makes a response correct, for "
            f"pass@k, since {unclear}; got none: set it to {choices} (or Eval.num_prompts = 0)"
        )


def check_task_names(config: TrainConfig) -> None:
    """Raise ValueError if one of several tasks shares its metric name with a reward function."""
    names = [name for name, _ in task_names(config.task)]
    if len(names) > 1 and (shared := sorted({*names} & {*config.reward.names})):
        raise ValueError(
            f"Task.specs: a task and a reward function are both called {shared[0]!r}, and "
            "rewards/NAME/mean could be either: name the task with NAME=SPEC"
        )


def _check_correction(config: TrainConfig) -> None:
    """Raise ValueError if updates would ignore that the policy differs from the sampling policy."""
    algorithm = config.algorithm.resolved
    trainer = config.trainer
    if config.algorithm.importance is not None:
        return
    minibatches = min(trainer.minibatches, config.rollout.prompts_per_step)
    is_reinforce = algorithm.policy_loss == "reinforce"
    fix = 'set Algorithm.correction = "token_tis:2" (or another)'
    if is_reinforce and trainer.inner_updates * minibatches > 1:
        raise ValueError(
            f"Algorithm.name={config.algorithm.name!r} has no ratio, and Trainer.minibatches="
            f"{trainer.minibatches} × inner_updates={trainer.inner_updates} updates of a batch "
            f"move the policy away from it: {fix}, or Trainer.minibatches = inner_updates = 1"
        )
    recomputed = algorithm.old_logprobs == "recomputed"
    if config.sched.mode == "pipeline" and (is_reinforce or recomputed):
        ignores = 'old_logprobs="recomputed"' if recomputed else "a loss without a ratio"
        other = ', or Algorithm.old_logprobs = "rollout"' if recomputed else ""
        raise ValueError(
            f'Sched.mode="pipeline" samples with weights that are one update old, and {ignores} '
            f"(Algorithm.name={config.algorithm.name!r}) ignores the difference: {fix}{other}, or "
            'Sched.mode = "ahead"'
        )


def check_tuner(config: TrainConfig) -> None:
    """Raise ValueError if arms of the bandit are larger or deeper than draft trees get."""
    if config.speculation.budget != "bandit":
        return
    high = config.engine.max_nodes - 1
    tuner = config.tuner
    if max(tuner.verify_tokens) > high:
        raise ValueError(
            f"expected Tuner.verify_tokens of at most Engine.max_nodes − 1 = {high}, got "
            f"{tuner.verify_tokens}: lower them, or raise Engine.max_nodes"
        )
    wanted = {
        "Drafter.max_depth": (config.speculation.learns, config.drafter.max_depth),
        "DraftModel.max_depth": (config.speculation.asks_model, config.draft_model.max_depth),
    }
    for name, (is_asked, deepest) in wanted.items():
        if is_asked and min(tuner.depths) > deepest:
            raise ValueError(
                f"expected one of Tuner.depths to be at most {name}={deepest}, got "
                f"{tuner.depths}: lower it, or raise {name}"
            )


def check_drafting(config: TrainConfig) -> None:
    """Raise ValueError if drafting workers or helpers have no work, or no worker verifies."""
    settings = config.drafting
    further = config.draft_model.directories
    if further and not settings.drafts_apart:
        raise ValueError(
            f"DraftModel.directories={further} are for drafting workers to choose among: expected "
            f"Drafting.workers of 1 or more, got {settings.workers}: set it, or leave directories "
            "out"
        )
    if settings.drafts_apart:
        _check_drafting_workers(config)
    if settings.helps:
        _check_helpers(config)
    window = settings.window
    limit = config.engine.max_nodes - 1
    if window is not None and window > limit:
        raise ValueError(
            f"expected Drafting.window of at most Engine.max_nodes − 1 = {limit}, got {window}: "
            "lower it, or raise Engine.max_nodes"
        )


def _check_drafting_workers(config: TrainConfig) -> None:
    settings = config.drafting
    workers = config.sched.workers
    speculation = config.speculation
    wanted = settings.workers
    if not (speculation.enabled and MODEL in speculation.sources):
        raise ValueError(
            f"Drafting.workers={wanted} draft by a draft model: expected "
            f'"{MODEL}" in Speculation.sources, and a budget, got {speculation.sources} '
            f'with "{speculation.budget}": add it, or set Drafting.workers = 0'
        )
    if (wanted or 1) >= workers:
        raise ValueError(
            f"expected at least one worker that verifies, got Drafting.workers={wanted} of "
            f"Sched.workers={workers}: raise Sched.workers, or lower it"
        )
    if config.cluster.kind != "ray":
        return
    if wanted is None:
        raise ValueError(
            'Cluster.kind="ray" reserves devices for programs before anything is measured: '
            "expected a number of Drafting.workers there, got None, which leaves it to a plan; "
            f'set Drafting.workers = 1 … {workers - 1}, or Cluster.kind = "local"'
        )
    if further := config.draft_model.directories:
        raise ValueError(
            'Cluster.kind="ray" has drafting workers that read one draft model: expected no '
            f"DraftModel.directories there, got {further}: leave them out, or set "
            'Cluster.kind = "local"'
        )


def _check_helpers(config: TrainConfig) -> None:
    settings = config.drafting
    verifying = config.sched.workers - (config.drafting.workers or 0)
    each = settings.requests_per_helper
    if not config.speculation.enabled or verifying < 2:
        raise ValueError(
            f"Drafting.requests_per_helper={each} has idle workers draft for others: expected two "
            f"workers that verify, and a budget, got {verifying} and "
            f'"{config.speculation.budget}": raise Sched.workers and set Speculation.budget, or '
            "requests_per_helper = 0"
        )
    if config.sched.mode == "pipeline":
        raise ValueError(
            f"Drafting.requests_per_helper={each} is for workers that have nothing to do, which in "
            'Sched.mode="pipeline" go on to the next step: set mode = "sync" or "ahead", or '
            "requests_per_helper = 0"
        )
    sources = {OWN, *config.speculation.sources}
    if other := [method for method in settings.methods if method not in sources]:
        raise ValueError(
            f"expected Drafting.methods of {', '.join(sorted(sources))}, which "
            f"Speculation.sources has, got {other[0]!r}: leave it out, or add it to the sources"
        )


def check_cluster(config: TrainConfig) -> None:
    """Raise ValueError for settings that several processes cannot have, or that are missing."""
    count = config.cluster.history_workers
    sources = config.speculation.sources
    if count and config.speculation.history_source is None:
        raise ValueError(
            f"Cluster.history_workers={count} index what history drafts from: expected "
            f'"history" or "histospec" in Speculation.sources, and a budget, got {sources} with '
            f'"{config.speculation.budget}": add one, or leave history_workers out'
        )
    if config.cluster.kind == "ray":
        check_trainers(config)
    if config.cluster.kind != "spmd":
        return
    cluster_config.check(config.cluster)
    mode = config.sched.mode
    workers = config.sched.workers
    if config.cluster.rollouts == "mesh" and (mode != "sync" or workers > 1):
        raise ValueError(
            'Cluster.rollouts="mesh" is one engine on the devices that train: expected '
            f'Sched.mode="sync" and Sched.workers=1 with it, got "{mode}" and {workers}: set '
            'these, or Cluster.rollouts = "local"'
        )


def check_trainers(config: TrainConfig) -> None:
    """Raise ValueError for settings that trainer processes on Ray cannot have."""
    cluster = config.cluster
    if (count := cluster.num_processes) is not None and count < 1:
        raise ValueError(f"expected Cluster.num_processes of 1 or more, got {count}")
    if cluster.coordinator != AUTO or cluster.process_id is not None:
        raise ValueError(
            'with Cluster.kind="ray" one command starts all trainer processes, which find one '
            f"another by themselves, got Cluster.coordinator={cluster.coordinator!r} and "
            f"Cluster.process_id={cluster.process_id}: leave both out"
        )
    if cluster.num_trainers > 1:
        trainer_devices(config)


def trainer_devices(config: TrainConfig) -> int:
    """Return the number of devices per trainer process on Ray. Raises ValueError."""
    mesh = config.mesh
    count = config.cluster.num_trainers
    total = mesh.data * mesh.fsdp * mesh.tensor
    if mesh.data == -1 or total % count:
        got = "Mesh.data = -1" if mesh.data == -1 else f"{total} devices"
        raise ValueError(
            f"expected Mesh to name as many devices for each of Cluster.num_processes={count} "
            f"trainer processes, which Ray reserves, got {got}: set Mesh.data, fsdp and tensor to "
            f"a multiple of {count} in all"
        )
    return total // count
