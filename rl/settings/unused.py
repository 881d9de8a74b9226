"""Settings that differ from their defaults without effect, in a run or in `rl.python.api`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from reprise.rl.gin.grammar import read_override
from reprise.rl.gin.loader import ConfigError
from reprise.rl.settings.config import TrainConfig
from reprise.spec.budget.config import BANDIT, LEARNED, MODEL


def unused_settings(config: TrainConfig) -> list[str]:
    """Return a sentence per setting or section without effect, with the setting that it needs."""
    speculation = config.speculation
    sched = config.sched
    drafting = config.drafting
    # sources also count with the budget off, which compares a run with plain decoding
    drafters = {*speculation.sources, *(drafting.methods if drafting.helps else ())}
    several = sched.workers > 1 or sched.mode != "sync"
    histopipe = sched.policy == "histopipe"
    learned = LEARNED in drafters, '"learned" in Speculation.sources'
    used: dict[str, tuple[bool, str]] = {
        "DraftModel": (MODEL in drafters, '"model" in Speculation.sources'),
        "Drafter": learned,
        "DrafterTraining": learned,
        "DataBuffer": learned,
        "Tuner": (speculation.budget == BANDIT, 'Speculation.budget = "bandit"'),
        "Drafting": (
            drafting.drafts_apart or drafting.helps,
            "Drafting.workers or Drafting.requests_per_helper above 0",
        ),
        "Critic": (config.algorithm.resolved.needs_critic, 'Algorithm.name = "ppo"'),
        "Distill": (config.distill.enabled, "Distill.teacher"),
        "Environment": (config.environment.enabled, "Environment.factory"),
        "Eval": (config.eval.num_prompts > 0, "Eval.num_prompts above 0"),
        "Reuse.fresh_share": (config.reuse.mode != "off", "a Reuse.mode"),
        "Reuse.renew_groups": (config.reuse.mode != "off", "a Reuse.mode"),
        "Reuse.max_age_steps": (
            config.reuse.keeps_old_tokens,
            "a Reuse.mode that keeps older tokens, as lenient does",
        ),
        "Algorithm.kl_estimator": (
            config.algorithm.kl_coefficient > 0,
            "Algorithm.kl_coefficient above 0",
        ),
        "Cluster.rollouts": (config.cluster.kind == "spmd", 'Cluster.kind = "spmd"'),
        **{
            f"Sched.{name}": (several, "Sched.workers above 1, or another Sched.mode than sync")
            for name in ("policy", "chunk_tokens", "kv_tokens", "pool_bytes", "devices_per_worker")
        },
        **{
            f"Sched.{name}": (histopipe, 'Sched.policy = "histopipe"')
            for name in ("ranking_groups", "allocation")
        },
    }
    changed = [name for name in _changed(config) if name != "Eval.num_prompts"]
    notes = []
    for name, (is_used, needs) in used.items():
        fields = [field for field in changed if field == name or field.startswith(f"{name}.")]
        if fields and not is_used:
            notes.append(f"{', '.join(fields)}: no effect in this run, it takes {needs}")
    is_chosen = "last" in speculation.sources and "Speculation.sources" in changed
    if speculation.enabled and is_chosen and not config.reuse.enabled:
        notes.append('"last" in Speculation.sources: no effect without a Reuse.mode')
    return notes


def _changed(config: TrainConfig) -> list[str]:
    """Return the settings that differ from the defaults of their sections, as Section.field."""
    changed = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        name = type(values).__name__.removesuffix("Config")
        for field in dataclasses.fields(values):
            if getattr(values, field.name) != field.default:
                changed.append(f"{name}.{field.name}")
    return changed


# Sections and fields that `rl.python` and `rl.serve` do not read, with a replacement.
_RUN_SETTINGS = {
    "Algorithm": "name a loss at forward_backward",
    "Checkpoint": "call save_state",
    "Cluster": "a policy has the devices of its process",
    "Critic": "name a loss at forward_backward",
    "DataBuffer": "samples have no learned drafter",
    "Distill": "give forward_backward advantages of a teacher's log-probs",
    "DraftModel": "samples have no draft model",
    "Drafter": "samples have no learned drafter",
    "DrafterTraining": "samples have no learned drafter",
    "Drafting": "samples have one engine",
    "Environment": "call the environment between two samples (docs/turns_and_tools.md)",
    "Metrics": "log what the calls return",
    "Optimizer": "give optim_step its Adam",
    "Reuse.renew_groups": "rewards are the caller's",
    "Run": "the loop is the caller's",
    "Sched": "samples have one engine",
    "Rollout.prompts_per_step": "give sample its prompts",
    "Rollout.group_size": "give sample its n",
    "Sampling.by_task": "give sample its sampling",
    "Trainer.inner_updates": "call optim_step as often",
    "Trainer.minibatches": "call optim_step as often",
    "Trainer.on_nonfinite": "forward_backward raises ValueError",
}
_READ = {"Run.seed"}
# Further sections that `rl.serve` does not read.
_NOT_SERVED = {
    "Eval": "sample and score the questions",
    "Reuse": "every response is drawn anew",
    "Reward": "score the samples",
}


def refuse_run_settings(settings: Sequence[str], *, is_served: bool = False) -> None:
    """Raise ConfigError for a setting that `rl.python`, or a server, does not read."""
    unread = _RUN_SETTINGS | (_NOT_SERVED if is_served else {})
    for setting in settings:
        name = read_override(setting).name
        section = name.partition(".")[0]
        instead = unread.get(name) or unread.get(section)
        if instead and name not in _READ:
            raise ConfigError(
                f"{name}: no effect here, only rl.train reads it; fix: leave it out: {instead}"
            )
