"""Groups of a step whose other requests go on in the next one (HistoPipe), in a checkpoint.

A resumed run asks these requests anew, with the weights and the noise that they would have gone on
with: what they had so far is not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.speculation import reuse
from rl.trajectory import FinishReason, Trajectory
from spec.reuse.rollout_cache import RolloutCache


def state_of(groups: Mapping[int, Sequence[Trajectory]]) -> dict[str, Any]:
    """Return what `load` reads: the responses of each group that have ended."""
    cache = RolloutCache()
    responses = [
        dataclasses.replace(t, group_id=g) for g, ts in enumerate(groups.values()) for t in ts
    ]
    reuse.remember(cache, [str(group) for group in groups], responses, scored=True)
    return {
        "groups": list(groups),
        "rewards": [
            [t.reward for t in sorted(ts, key=lambda t: t.sample_index)] for ts in groups.values()
        ],
        "responses": cache.state(),
    }


def load(state: Mapping[str, Any]) -> dict[int, list[Trajectory]]:
    """Return the groups that `state_of` was given; of their responses what siblings need."""
    cache = RolloutCache()
    cache.load_state(state["responses"])
    groups: dict[int, list[Trajectory]] = {}
    for group, rewards in zip(state["groups"], state["rewards"], strict=True):
        found = cache.get(str(group)) if rewards else None
        responses = () if found is None else found.responses
        groups[group] = []
        for reward, response in zip(rewards, responses, strict=True):
            scores, tokens = response.scores, response.tokens
            assert found is not None and scores is not None
            groups[group].append(
                Trajectory(
                    request_id=-1,  # it has ended
                    group_id=group,
                    sample_index=response.sample_index,
                    prompt_ids=found.prompt_ids,
                    response_ids=tokens,
                    logprobs=scores.logprobs,
                    policy_versions=scores.policy_versions,
                    origins=np.zeros(len(tokens), np.uint8),
                    finish_reason=FinishReason.STOP,
                    reward=reward,
                    emission_logprobs=scores.emission_logprobs,
                )
            )
    return groups
