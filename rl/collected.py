"""The prompts that a step of a pipeline has asked, and the responses that came back.

Groups are numbered over all steps. Those below the step's first one went on from the step before
(HistoPipe), where their siblings ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.engine.stats import EngineStats
from rl.engine.worker_record import WorkerEvent
from rl.exchange import Responses
from rl.learner.advantages import informative_groups
from rl.rewards.scores import Score
from rl.rollouts import Prompts, Rollouts
from rl.speculation import reuse
from rl.trajectory import FinishReason, Trajectory
from spec.reuse.rollout_cache import RolloutCache

Scored = tuple[Trajectory, Score, str]  # a response with its reward, and its text
Siblings = Mapping[int, Sequence[Trajectory]]  # by group


@dataclasses.dataclass(eq=False)
class Asked:
    """The prompts of a step, in all of its passes, of which the first begins at `begins`.

    Group `first_group + g` answers prompt g.
    """

    begins: int
    first_group: int
    prompts: Prompts
    phases: int = 1
    passed_over: int = 0

    def add(self, begins: int, new: Prompts) -> None:
        """Note another pass, whose prompts stand from `begins` on."""
        self.prompts, self.phases = self.prompts + new, self.phases + 1
        self.passed_over += new.end - begins - len(new)


@dataclasses.dataclass(frozen=True, eq=False)
class Collected:
    """The responses of a step so far; `siblings` are those of groups that went on into it."""

    asked: Asked
    siblings: Siblings
    scored: list[Scored]
    events: list[WorkerEvent] = dataclasses.field(default_factory=list)

    def add(self, found: Responses) -> EngineStats:
        """Add responses to one of the passes; return the counts of the whole step, as of now."""
        rows = zip(found.trajectories, found.scores, found.texts, strict=True)
        self.scored.extend(rows)
        self.events.extend(found.stats.events)
        found.stats.events = list(self.events)
        return found.stats

    @property
    def carried(self) -> list[int]:
        """The groups that went on into this step."""
        groups = {t.group_id for t, _, _ in self.scored}
        return sorted(group for group in groups if group < self.asked.first_group)

    def informative(self) -> set[int]:
        """Return the groups whose rewards are not all equal, siblings included."""
        known = [t for t, _, _ in self.scored]
        known += [t for group in self.carried for t in self.siblings.get(group, ())]
        return informative_groups([t.reward for t in known], [t.group_id for t in known])

    def num_missing(self, wanted: int) -> int:
        """Return how many of the `wanted` groups of its own the step has yet to find."""
        found = sum(group >= self.asked.first_group for group in self.informative())
        return max(0, wanted - found)

    def rollouts(
        self, before: Asked | None, stats: EngineStats, cursor: int, *, dynamic: bool
    ) -> Rollouts:
        """Return all of it, groups of the step before at the end; `dynamic` drops alike ones."""
        asked, carried, first = self.asked, self.carried, self.asked.first_group
        prompts, num_asked = asked.prompts, len(asked.prompts)
        place = {first + g: g for g in range(num_asked)}
        place |= {group: num_asked + i for i, group in enumerate(carried)}
        used = self.informative() if dynamic else set(place)
        if carried:
            assert before is not None
            prompts = prompts + before.prompts.take([g - before.first_group for g in carried])
        scored = sorted(self.scored, key=lambda s: (place[s[0].group_id], s[0].sample_index))
        metrics = {"rollout/carried": float(sum(t.group_id < first for t, _, _ in scored))}
        if dynamic:
            metrics |= {
                "dynamic_sampling/phases": float(asked.phases),
                "dynamic_sampling/generated_groups": float(num_asked),
                "dynamic_sampling/used_groups": float(len(used)),
            }
        return Rollouts(
            [_moved(t, place[t.group_id]) for t, _, _ in scored],
            [s for _, s, _ in scored],
            [text for _, _, text in scored],
            stats,
            prompts,
            frozenset(place[group] for group in used),
            metrics,
            cursor=cursor,
            siblings=[_moved(t, place[g]) for g in carried for t in self.siblings.get(g, ())],
        )

    def unfinished(self, group_size: int) -> dict[int, list[Trajectory]]:
        """Return what has ended of its own groups, where others of the group went on."""
        first = self.asked.first_group
        groups: dict[int, list[Trajectory]] = {
            first + g: [] for g in range(len(self.asked.prompts))
        }
        for t, _, _ in self.scored:
            if t.group_id >= first:
                groups[t.group_id].append(t)
        return {group: ts for group, ts in groups.items() if len(ts) < group_size}


def whole_groups(rollouts: Rollouts, group_size: int) -> list[Trajectory]:
    """Return the responses of groups that are whole, with those that ended a step before."""
    together = [*rollouts.trajectories, *rollouts.siblings]
    counts = collections.Counter(t.group_id for t in together)
    return [t for t in together if counts[t.group_id] == group_size]


def _moved(t: Trajectory, group: int) -> Trajectory:
    return dataclasses.replace(t, group_id=group)


# --- groups whose other requests continue in the next step, in a checkpoint -----------------


def unfinished_state(groups: Mapping[int, Sequence[Trajectory]]) -> dict[str, Any]:
    """Return what `load_unfinished` reads: the responses of each group that have ended."""
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


def load_unfinished(state: Mapping[str, Any]) -> dict[int, list[Trajectory]]:
    """Return the groups of `unfinished_state`, with the parts of responses that siblings need."""
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
