"""Rewards of a group become advantages: how much better than its siblings each response was.

Plain numpy on the host. Whatever a group holds, the result is finite: a group
without differences teaches nothing and gets advantages of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

Normalisation = Literal["std", "none"]
STD_FLOOR = 1e-4  # TRL's; keeps a group of nearly equal rewards from exploding


def group_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int], *, normalise: Normalisation = "std"
) -> tuple[np.ndarray, dict[str, float]]:
    """A_i = r_i − mean(group), divided by std(group) + 1e-4 where `normalise` is "std".

    The standard deviation has n − 1 in its denominator. A reward of None (a
    response that could not be scored) counts in no mean and gets advantage 0;
    `rl.batching` leaves it out of the loss. Equal rewards and groups of one get 0
    exactly. Groups may lie in any order. Returns (float32 [n], TRL's `reward`,
    `reward_std` and `frac_reward_zero_std`, the last two over groups, plus the
    counts `reward/skipped_samples` and `reward/groups_of_one`).

    Raises ValueError for unequal lengths, a reward that is not finite, and an
    unknown `normalise`. Source: GRPO, arXiv 2402.03300; TRL's GRPOTrainer.
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"expected a group id per reward, got {len(rewards)} and {len(group_ids)}")
    if normalise not in ("std", "none"):
        raise ValueError(f"normalise must be 'std' or 'none', got {normalise!r}")
    members: dict[int, list[int]] = {}
    for i, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ValueError(
                f"reward of sample {i} (group {group_id}) is {reward}: expected a finite number, "
                "or None for a response that could not be scored"
            )
        members.setdefault(int(group_id), []).append(i)

    advantages = np.zeros(len(rewards), np.float32)
    stds = []
    for indices in members.values():
        values = np.array([rewards[i] for i in indices], np.float64)
        if values.min() == values.max():  # the mean of equal numbers may round away from them
            stds.append(0.0)
            continue
        std = float(values.std(ddof=1))
        scale = std + STD_FLOOR if normalise == "std" else 1.0
        advantages[indices] = (values - values.mean()) / scale
        stds.append(std)
    return advantages, _statistics(rewards, members, stds)


def _statistics(
    rewards: Sequence[float | None], members: dict[int, list[int]], stds: list[float]
) -> dict[str, float]:
    """The means are left out where nothing was scored: 0 would be a claim."""
    scored = [r for r in rewards if r is not None]
    stats = {
        "reward/skipped_samples": float(len(rewards) - len(scored)),
        "reward/groups_of_one": float(sum(len(indices) == 1 for indices in members.values())),
    }
    if scored:
        stats["reward"] = float(np.mean(scored))
        stats["reward_std"] = float(np.mean(stds))
        stats["frac_reward_zero_std"] = float(np.mean([std == 0 for std in stds]))
    return stats
