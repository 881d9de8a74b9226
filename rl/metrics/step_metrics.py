"""Metrics and sample rows of one step, with the names that TRL uses if TRL has the metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.tasks import Example
from reprise.rl.metrics.diversity import distinct_1, self_bleu
from reprise.rl.records.stats import EngineStats, speculation_metrics, tail_seconds
from reprise.rl.records.trajectory import Trajectory
from reprise.rl.rewards.scores import Score
from reprise.spec.round_times import RoundTimes


def step_metrics(
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    stats: EngineStats,
    step: int,
    times: RoundTimes | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, Any]:
    """Return lengths, rewards by function and by task, failures, diversity and engine counts.

    `tasks` has the task name of each trajectory, and is empty for a single task. Off-policyness is
    the number of updates between the policy that drew a token and the policy of `step`.
    """
    slot_rounds = sum([slots * count for (slots, _, _), count in stats.rounds.items()])
    metrics: dict[str, Any] = {
        "completions/count": len(trajectories),
        "rollout/rounds": sum(stats.rounds.values()),
        "rollout/fetches": stats.fetches,
        "rollout/prefilled_tokens": stats.prefilled_tokens,
        "rollout/preemptions": stats.preemptions,
        "rollout/slot_use": stats.tokens / slot_rounds if slot_rounds else 0.0,
        "rollout/generated_tokens": stats.tokens - stats.cached.kept_tokens,
        "rollout/tail_s": tail_seconds(stats.timeline),
        "rollout_tokens": sum([len(t.response_ids) for t in trajectories]),
        "rewards/failures": sum([s.failure is not None for s in scores]),
    }
    if metrics["rollout_tokens"]:  # none if all groups continue in the next step
        metrics |= _response_metrics(trajectories, scores, step, tasks)
    if episodes := [t.episode for t in trajectories if t.episode is not None]:
        from reprise.rl.metrics.episode_metrics import episode_metrics

        metrics |= episode_metrics(episodes)
    if stats.parts:
        metrics |= {
            "workers/kv_moved_bytes": stats.pool.moved_bytes,
            "workers/kv_dropped_bytes": stats.pool.dropped_bytes,
            "workers/kv_dropped_tokens": stats.pool.dropped_tokens,
        }
    return metrics | speculation_metrics(stats, times)


def _response_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], step: int, tasks: Sequence[str]
) -> dict[str, Any]:
    staleness = step - 1 - np.concatenate([t.policy_versions for t in trajectories])
    lengths = np.array([len(t.response_ids) for t in trajectories])
    ended = np.array([not t.truncated for t in trajectories])
    metrics: dict[str, Any] = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float(1 - ended.mean()),
        "rollout/off_policyness": float(staleness.mean()),
        "rollout/off_policyness/max": int(staleness.max()),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    rewards = {name: [s.values[name] for s in scores] for name in scores[0].values}
    for name, score in zip(tasks, scores, strict=False):
        rewards.setdefault(name, []).append(score.total)
    for name, values in rewards.items():
        known = np.array([v for v in values if v is not None], np.float64)
        if known.size:
            metrics[f"rewards/{name}/mean"] = float(known.mean())
            metrics[f"rewards/{name}/std"] = float(known.std(ddof=1)) if known.size > 1 else 0.0
    written = [t for t in trajectories if len(t.response_ids)]  # not failed before the first turn
    responses = [t.response_ids for t in written]
    groups = [t.group_id for t in written]
    metrics["diversity/distinct_1"] = distinct_1(responses)
    if not math.isnan(bleu := self_bleu(responses, groups)):
        metrics["diversity/self_bleu"] = bleu
    return metrics


def sample_rows(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    trajectories: Sequence[Trajectory],
    completions: Sequence[str],
    scores: Sequence[Score],
    advantages: np.ndarray | None,
) -> list[dict[str, Any]]:
    """Return a row of samples.jsonl per trajectory; per-token `advantages` are passed as None."""
    known = [None] * len(trajectories) if advantages is None else advantages.tolist()
    rows = zip(trajectories, completions, scores, known, strict=True)
    return [
        {
            "example_id": examples[t.group_id].example_id,
            "sample_index": t.sample_index,
            "prompt": tokenizer.decode(t.prompt_ids.tolist(), skip_ends=False),
            "completion": completion,
            "answer": examples[t.group_id].answer,
            "reward": score.total,
            "rewards": dict(score.values),
            "reward_failure": score.failure,
            "advantage": advantage,
            "logprob": float(t.logprobs.sum()),
            "num_tokens": len(t.response_ids),
            "finish_reason": str(t.finish_reason),
            **({} if t.episode is None else t.episode.row),
        }
        for t, completion, score, advantage in rows
    ]
