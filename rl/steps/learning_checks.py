"""Checks of the rewards in every step: how many fail, and whether the others teach anything.

A run stops, with its last whole step saved, if too many rewards fail (`Reward.max_failed_share`,
`Reward.max_failing_steps`), or after `Run.no_update_limit_steps` steps in a row that taught the
policy nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reprise.rl.exchange.responses import failures_text
from reprise.rl.losses.advantages import RewardPart, informative_groups
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.rewards.scores import Score
from reprise.rl.settings.config import TrainConfig

WARNING_STEPS = 3  # in a row that taught nothing
FEW = 0.01  # share of failed samples per step that may persist


class NotLearning(RuntimeError):
    """Raised to stop a run with failing rewards, or with steps that teach the policy nothing."""


def check_failures(
    config: TrainConfig, say: Callable[[str], None], scores: Sequence[Score], step: int
) -> None:
    """Report how many samples could not be scored, and why; raise NotLearning for too many."""
    if not (text := failures_text(scores)):
        return
    share = config.reward.max_failed_share
    if sum(s.failure is not None for s in scores) > max(1, share * len(scores)):
        raise NotLearning(
            f"step {step}: {text}; that is more than Reward.max_failed_share={share:g} of the "
            "samples: correct the reward and go on with --resume, or raise the limit"
        )
    say(f"warning: step {step}: {text}")


def compared_groups(config: TrainConfig, trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the group that each response is compared in.

    There is only one group with a critic, or with a user's advantages.
    """
    is_one = not config.algorithm.resolved.compares_groups
    return [0 if is_one else t.group_id for t in trajectories]


ALL_CUT = (
    "all responses are cut off at Sampling.max_new_tokens: raise it, or prompt for shorter answers"
)
ALL_STOPPED = (
    "a limit has stopped all episodes: raise Environment.max_turns, Environment.max_tokens or "
    "Sampling.max_new_tokens"
)


def missing_signal(
    config: TrainConfig,
    trajectories: Sequence[Trajectory],
    group_ids: Sequence[int],
    used: np.ndarray,
    parts: Sequence[RewardPart] = (),
) -> str | None:
    """Return why the rewards of a step teach nothing, with a remedy; None if they teach.

    `group_ids` come from `compared_groups`; `used` marks the responses trained on. `parts` of the
    rewards are compared one by one, if there are any, instead of their sums.
    """
    algorithm = config.algorithm
    scored = [t for t in trajectories if t.reward is not None]
    if not trajectories:
        return None  # all groups continue in the next step
    if config.distill.enabled and any([t.reward is not None for t in trajectories]):
        return None  # a teacher scores every response
    if not scored:
        return (
            "no response has a reward: every function of Reward.functions failed or returned None "
            "(does the data have answers?)"
        )
    rewards = [t.reward if use else None for t, use in zip(trajectories, used, strict=True)]
    differ = set[int]()
    for part_values in [part.values for part in parts if part.weight] or [rewards]:
        pairs = zip(rewards, part_values, strict=True)
        compared = [None if reward is None else value for reward, value in pairs]
        differ |= informative_groups(compared, group_ids)
    masked = [algorithm.mask_truncated and t.truncated for t in trajectories]
    triples = zip(rewards, group_ids, masked, strict=True)
    if any(r is not None and group in differ and not mask for r, group, mask in triples):
        return None
    if all(t.truncated for t in scored):
        return ALL_STOPPED if config.environment.enabled else ALL_CUT
    if differ:
        return "all responses whose rewards differ are cut off, and Algorithm.mask_truncated is on"
    values = {t.reward for t in scored}
    text = f"all rewards are {values.pop():g}" if len(values) == 1 else "no group's rewards differ"
    if algorithm.resolved.max_extra_phases is not None:
        text = f"no group is left to train on, since {text}"
    hint = "does Reward.extract find the answers"
    if config.environment.enabled:
        hint = "does the environment tell good episodes from bad ones"
    return f"{text}: look at samples.jsonl; {hint}, are the questions too easy or too hard?"


class LearningWatch:
    """Counts the latest consecutive steps that taught nothing, or had some failing rewards."""

    def __init__(self, config: TrainConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._num_failing = self._num_idle = self._num_steps = 0
        self._reason = ""

    def after(self, step: int, row: Mapping[str, Any], missing: str | None) -> None:
        """Count a step by its metrics and its `missing_signal`; raise NotLearning at a limit."""
        self._num_steps += 1
        is_failing = row["rewards/failures"] > FEW * row["completions/count"]
        self._num_failing = self._num_failing + 1 if is_failing else 0
        self._num_idle = 0 if missing is None else self._num_idle + 1
        self._reason = missing or ""
        run = self._config.run
        limit = self._config.reward.max_failing_steps
        if self._num_failing == limit:
            raise NotLearning(
                f"step {step}: rewards have failed in each of the last {limit} steps "
                "(Reward.max_failing_steps): correct the reward and go on with --resume"
            )
        text = f"{self._num_idle} steps in a row have taught the policy nothing: {missing}"
        if self._num_idle == run.no_update_limit_steps:
            raise NotLearning(f"step {step}: {text} (Run.no_update_limit_steps)")
        if self._num_idle == WARNING_STEPS:
            self._say(f"warning: step {step}: {text}")

    def end(self) -> None:
        """Warn if no step of this launch taught the policy anything."""
        if self._num_steps and self._num_idle == self._num_steps:
            self._say(f"warning: no step has taught the policy anything: {self._reason}")
