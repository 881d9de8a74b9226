"""Advantages from rewards, in plain numpy; a group with equal rewards gets exactly 0.

Rewards are equal if they differ only by rounding (`_differ`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from reprise.rl.losses.algorithms import Normalisation
from reprise.rl.runtime.user_files import describe, open_named

STD_FLOOR = 1e-4  # as in TRL; bounds the advantages of nearly equal rewards
# Sums in another order differ by this much: near 1 in float32, relative to their size in float64.
ROUNDING = 1e-7
RELATIVE_ROUNDING = 1e-14


def group_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int], *, normalise: Normalisation = "std"
) -> np.ndarray:
    """Return A_i = r_i − mean(group), over std(group) + 1e-4 if `normalise` is "std"; float32 [n].

    The standard deviation has n − 1 in its denominator. A reward of None (not scored) counts in no
    mean and gets advantage 0; so do equal rewards and groups of one. Source: GRPO, arXiv
    2402.03300; TRL.
    """
    advantages = np.zeros(len(rewards), np.float32)
    for indices, values in _groups(rewards, group_ids).values():
        if _differ(values):
            scale = float(values.std(ddof=1)) + STD_FLOOR if normalise == "std" else 1.0
            advantages[indices] = (values - values.mean()) / scale
    return advantages


class RewardPart(NamedTuple):
    """The values of one reward function, None if it does not apply, and its weight."""

    weight: float
    values: Sequence[float | None]


def advantages_by_reward(
    rewards: Sequence[float | None],
    group_ids: Sequence[int],
    parts: Sequence[RewardPart],
    *,
    normalise: Normalisation = "batch",
) -> np.ndarray:
    """Return A_i = Σ_k weight_k · A_ik, over std(all A) + 1e-4 if `normalise` is "batch".

    A_ik are the `group_advantages` of part k, over the standard deviation of its group, for the
    responses with a reward; float32 [n]. Advantages of a group sum to 0, so the mean of the batch
    needs no subtraction. Source: GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    total = np.zeros(len(rewards))
    for part in parts:
        scored = zip(rewards, part.values, strict=True)
        values = [None if reward is None else value for reward, value in scored]
        total += part.weight * group_advantages(values, group_ids).astype(np.float64)
    among = total[[reward is not None for reward in rewards]]
    if normalise == "batch" and _differ(among):
        total /= float(among.std(ddof=1)) + STD_FLOOR
    return total.astype(np.float32)


def leave_one_out_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[int]
) -> np.ndarray:
    """Return A_i = r_i − mean of the other rewards of its group; float32 [n].

    This equals (r_i − mean) · n / (n − 1). Source: RLOO, arXiv 2402.14740.
    """
    advantages = np.zeros(len(rewards), np.float32)
    for indices, values in _groups(rewards, group_ids).values():
        if _differ(values):
            n = len(values)
            advantages[indices] = (values - values.mean()) * (n / (n - 1))
    return advantages


def response_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[int],
    estimator: str,
    normalise: Normalisation,
    parts: Sequence[RewardPart] = (),
) -> np.ndarray:
    """Return the advantage of each response, float32 [n]; 0 for "gae", which works by token.

    "group_by_reward" compares the `parts` of the rewards.
    """
    if estimator == "gae":
        return np.zeros(len(rewards), np.float32)
    if estimator == "leave_one_out":
        return leave_one_out_advantages(rewards, group_ids)
    if estimator == "group":
        return group_advantages(rewards, group_ids, normalise=normalise)
    if estimator == "group_by_reward":
        return advantages_by_reward(rewards, group_ids, parts, normalise=normalise)
    return user_advantages(estimator, rewards, group_ids)


class Advantages(Protocol):
    """The advantage of each response, float [n]; a reward of None is of a response without one."""

    def __call__(self, rewards: Sequence[float | None], group_ids: Sequence[int]) -> np.ndarray: ...


NO_ADVANTAGES: dict[str, Advantages] = {}


def user_advantages(
    name: str, rewards: Sequence[float | None], group_ids: Sequence[int]
) -> np.ndarray:
    """Return the advantages of a user's `PATH.py:function`, 0 without a reward; float32 [n].

    Raises ValueError, also for errors of the function.
    """
    setting = "Algorithm.advantages"
    estimate = open_named(setting, name, NO_ADVANTAGES, Advantages)
    try:
        found = np.asarray(estimate(list(rewards), list(group_ids)), np.float32)
    except Exception as error:
        raise ValueError(f"{setting}: {name} raised {describe(error)}") from error
    if found.shape != (len(rewards),) or not np.isfinite(found).all():
        raise ValueError(
            f"{setting}: expected {name} to return a finite number for each of {len(rewards)} "
            f"rewards, got shape {found.shape} with {np.isfinite(found).sum()} finite numbers"
        )
    return np.where([reward is None for reward in rewards], 0, found).astype(np.float32)


def informative_groups(rewards: Sequence[float | None], group_ids: Sequence[int]) -> set[int]:
    """Return the groups with rewards that differ (DAPO, arXiv 2503.14476, section 3.2)."""
    return {g for g, (_, values) in _groups(rewards, group_ids).items() if _differ(values)}


def overlong_penalties(
    lengths: Sequence[int], max_new_tokens: int | Sequence[int], buffer_tokens: int | Sequence[int]
) -> np.ndarray:
    """Return 0 up to max_new_tokens − buffer, then linear to −1 at max_new_tokens; float64 [n].

    Limits and buffers are scalars or one per response; a buffer of 0 gives zeros. Source: DAPO,
    arXiv 2503.14476, equation 13.
    """
    buffer = np.asarray(buffer_tokens, np.float64)
    over = np.asarray(lengths, np.float64) - (np.asarray(max_new_tokens) - buffer)
    return np.where(buffer > 0, -np.clip(over, 0, None) / np.maximum(buffer, 1), 0.0)


def gae(
    rewards_BT: np.ndarray,
    values_BT: np.ndarray,
    lengths_B: np.ndarray,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantage and return of each token; float32 [B, T] twice, 0 beyond `lengths_B`.

    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, returns A + V; V and A are 0 after the last
    token. Source: arXiv 1506.02438.
    """
    B, T = values_BT.shape
    advantages_BT = np.zeros((B, T + 1))
    places_T = np.arange(T)
    inside_BT = places_T < lengths_B[:, None]
    values = np.zeros((B, T + 1))
    values[:, :T] = np.where(inside_BT, values_BT, 0.0)
    for t in reversed(range(T)):
        delta_B = rewards_BT[:, t] + gamma * values[:, t + 1] - values[:, t]
        after_B = gamma * gae_lambda * advantages_BT[:, t + 1]
        advantages_BT[:, t] = np.where(inside_BT[:, t], delta_B + after_B, 0.0)
    advantages_BT = advantages_BT[:, :T]
    return advantages_BT.astype(np.float32), (advantages_BT + values[:, :T]).astype(np.float32)


def whiten(values_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """Return (x − mean) / (std + 1e-8) over the mask; float32 [B, T].

    The result is 0 outside the mask, and for equal values.
    """
    inside = values_BT[mask_BT].astype(np.float64)
    result = np.zeros(values_BT.shape, np.float32)
    if _differ(inside):
        result[mask_BT] = (inside - inside.mean()) / (inside.std(ddof=1) + 1e-8)
    return result


def _groups(
    rewards: Sequence[float | None], group_ids: Sequence[int]
) -> dict[int, tuple[list[int], np.ndarray]]:
    """Return group → (indices of its scored samples, their rewards in float64)."""
    if len(rewards) != len(group_ids):
        raise ValueError(f"expected a group id per reward, got {len(rewards)} and {len(group_ids)}")
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
    return {
        g: (indices, np.array([rewards[i] for i in indices], np.float64))
        for g, indices in members.items()
    }


def _differ(values: np.ndarray) -> bool:
    """Return whether values differ by more than rounding."""
    if values.size < 2:
        return False
    limit = max(ROUNDING, RELATIVE_ROUNDING * float(np.abs(values).max()))
    return float(values.max() - values.min()) > limit


def reward_statistics(
    rewards: Sequence[float | None], group_ids: Sequence[int]
) -> dict[str, float]:
    """Return `reward`, `reward_std` and `frac_reward_zero_std`, as in TRL, and counts.

    Means are left out if nothing was scored.
    """
    groups = _groups(rewards, group_ids).values()
    scored = [r for r in rewards if r is not None]
    stds = [float(values.std(ddof=1)) if _differ(values) else 0.0 for _, values in groups]
    stats = {
        "reward/skipped_samples": float(len(rewards) - len(scored)),
        "reward/groups_of_one": float(sum([len(indices) == 1 for indices, _ in groups])),
    }
    if scored:
        stats["reward"] = float(np.mean(scored))
        stats["reward_std"] = float(np.mean(stds))
        stats["frac_reward_zero_std"] = float(np.mean([std == 0 for std in stds]))
    return stats
