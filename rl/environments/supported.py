"""The settings of a run that support environments."""

from __future__ import annotations

from typing import Any

from reprise.models.config import ModelConfig
from reprise.rl.rewards.config import ENVIRONMENT
from reprise.sched.episodes import TURN_NAMES


def check_supported(config: Any, model: ModelConfig) -> None:
    """Raise ValueError if settings of a `TrainConfig` do not support episodes of several turns.

    Without an environment, raise ValueError if its reward is named.
    """
    environment = config.environment
    functions = config.reward.functions
    if not environment.enabled:
        if ENVIRONMENT in functions:
            raise ValueError(
                f'Reward.functions has "{ENVIRONMENT}", and no environment gives a reward: set '
                "Environment.factory, or leave it out"
            )
        return
    if functions != (ENVIRONMENT,):
        raise ValueError(
            f'Environment.factory: expected Reward.functions = ("{ENVIRONMENT}",), since the '
            f"environment gives the reward of an episode, got {functions}"
        )
    if config.longest_tokens > model.max_positions:
        raise ValueError(
            f"Rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and the turns of "
            f"Environment make {config.longest_tokens} positions, the policy has "
            f"{model.max_positions}: lower Environment.max_turns or Sampling.max_new_tokens, or "
            "set Environment.max_tokens"
        )
    phases = 1 + (config.algorithm.resolved.max_extra_phases or 0)
    names = phases * config.rollout.num_requests
    wanted = {
        "Sched.mode": (config.sched.mode, config.sched.mode == "sync", '"sync"'),
        "Sched.workers": (config.sched.workers, config.sched.workers == 1, "1"),
        "Cluster.kind": (config.cluster.kind, config.cluster.kind == "local", '"local"'),
        "Reuse.mode": (config.reuse.mode, not config.reuse.enabled, '"off"'),
        "Drafting": (
            "drafting workers",
            not (config.drafting.drafts_apart or config.drafting.helps),
            "none",
        ),
        "Speculation.sources": (
            config.speculation.sources,
            config.speculation.history_source is None,
            "no history, whose texts are of whole responses",
        ),
        "Rollout.prompts_per_step": (names, names <= TURN_NAMES, f"at most {TURN_NAMES:,} samples"),
    }
    for setting, (value, is_supported, expected) in wanted.items():
        if not is_supported:
            raise ValueError(
                f"Environment.factory has episodes of several turns, which {setting} does not "
                f"support: expected {expected}, got {value!r}"
            )
