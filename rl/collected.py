"""A pipeline's step: its prompts, and its responses, received and scored as they finish.

Groups are numbered over all steps. Those below the step's first one continued from the step before
(HistoPipe), which has their siblings.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.engine.stats import EngineStats
from rl.engine.worker_record import WorkerEvent
from rl.learner.advantages import informative_groups
from rl.responses import Responses, Scorer
from rl.rewards.scores import Score
from rl.rollouts import Prompts, Rollouts, sampling_metrics
from rl.runtime.signals import Stopped
from rl.runtime.waits import POLL_S
from rl.speculation import reuse
from rl.system import System
from rl.trajectory import FinishReason, Request, Trajectory
from rl.workers.messages import Deferred, Result
from spec.reuse.rollout_cache import RolloutCache

Scored = tuple[Trajectory, Score, str]  # a response with its reward, and its text
Siblings = Mapping[int, Sequence[Trajectory]]  # by group


@dataclasses.dataclass(eq=False)
class StepPrompts:
    """All prompts of a step, pass by pass; group `first_group + g` answers prompt g."""

    begins: int  # the position of the first prompt in the data order
    first_group: int
    prompts: Prompts
    phases: int = 1
    passed_over: int = 0

    def add(self, begins: int, new: Prompts) -> None:
        """Add another pass, whose prompts start at this position of the data order."""
        self.prompts, self.phases = self.prompts + new, self.phases + 1
        self.passed_over += new.end - begins - len(new)


@dataclasses.dataclass(frozen=True, eq=False)
class StepResponses:
    """The responses of a step so far; `siblings` belong to groups that continued in it."""

    step_prompts: StepPrompts
    siblings: Siblings
    scored: list[Scored]
    events: list[WorkerEvent] = dataclasses.field(default_factory=list)

    def add(self, found: Responses) -> EngineStats:
        """Add responses to one of the passes; return the counts of the step so far."""
        rows = zip(found.trajectories, found.scores, found.texts, strict=True)
        self.scored.extend(rows)
        self.events.extend(found.stats.events)
        found.stats.events = list(self.events)
        return found.stats

    @property
    def carried(self) -> list[int]:
        """Return the groups that continued in this step."""
        groups = {t.group_id for t, _, _ in self.scored}
        return sorted(group for group in groups if group < self.step_prompts.first_group)

    def informative(self) -> set[int]:
        """Return the groups whose rewards are not all equal, siblings included."""
        known = [t for t, _, _ in self.scored]
        known += [t for group in self.carried for t in self.siblings.get(group, ())]
        return informative_groups([t.reward for t in known], [t.group_id for t in known])

    def num_missing(self, wanted: int) -> int:
        """Return how many of the step's `wanted` groups are missing."""
        result = sum(group >= self.step_prompts.first_group for group in self.informative())
        return max(0, wanted - result)

    def rollouts(
        self, before: StepPrompts | None, stats: EngineStats, cursor: int, *, dynamic: bool
    ) -> Rollouts:
        """Return the step, earlier groups at the end; `dynamic` drops uninformative groups."""
        own, carried, first = self.step_prompts, self.carried, self.step_prompts.first_group
        prompts, num_own = own.prompts, len(own.prompts)
        place = {first + g: g for g in range(num_own)}
        place |= {group: num_own + i for i, group in enumerate(carried)}
        used = self.informative() if dynamic else set(place)
        if carried:
            assert before is not None
            prompts = prompts + before.prompts.take([g - before.first_group for g in carried])
        scored = sorted(self.scored, key=lambda s: (place[s[0].group_id], s[0].sample_index))
        metrics = {"rollout/carried": float(sum(t.group_id < first for t, _, _ in scored))}
        if dynamic:
            metrics |= sampling_metrics(own.phases, num_own, len(used))
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
        """Return the finished responses of the step's groups that continue in the next one."""
        first = self.step_prompts.first_group
        groups: dict[int, list[Trajectory]] = {
            first + g: [] for g in range(len(self.step_prompts.prompts))
        }
        for t, _, _ in self.scored:
            if t.group_id >= first:
                groups[t.group_id].append(t)
        return {group: ts for group, ts in groups.items() if len(ts) < group_size}


def whole_groups(rollouts: Rollouts, group_size: int) -> list[Trajectory]:
    """Return the responses of complete groups, including ones that ended in the previous step."""
    together = [*rollouts.trajectories, *rollouts.siblings]
    counts = collections.Counter(t.group_id for t in together)
    return [t for t in together if counts[t.group_id] == group_size]


def _moved(t: Trajectory, group: int) -> Trajectory:
    return dataclasses.replace(t, group_id=group)


class ResultCollector:
    """Receives results in the driver's thread, also while an update runs.

    A deferred request is expected in the next step.
    """

    def __init__(self, system: System, scorer: Scorer) -> None:
        self._system, self._scorer = system, scorer
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def expect(self, step: int, requests: Iterable[Request]) -> None:
        """Note requests of a step that are about to be submitted."""
        with self._changed:
            ids = [r.request_id for r in requests]
            self._step_of.update(dict.fromkeys(ids, step))
            self._expected[step] += len(ids)

    def take(self, step: int, num_tokens: Callable[[], int]) -> list[Trajectory]:
        """Wait for the responses of a step, except for deferred requests; return them.

        Raises Stopped, or a worker's error.
        """
        while True:
            if self._system.is_stop_requested():
                raise Stopped
            with self._changed:
                if self._error is not None:
                    raise self._error
                finished, expected = len(self._finished[step]), self._expected[step]
                if finished == expected and (result := self._complete(step)) is not None:
                    return result
                self._changed.wait(POLL_S)
            self._system.show.rollout(finished, expected, num_tokens())

    def _complete(self, step: int) -> list[Trajectory] | None:
        """Return the finished responses of a step; None if all wait for their siblings.

        Responses that are scored together with a deferred one are expected in its step.
        """
        finished = self._finished[step]
        late = [t for t in finished if self._scorer.waits_for(t.group_id)]
        if late and len(late) == len(finished):
            return None
        self._finished[step + 1] += late
        self._expected[step + 1] += len(late)
        del self._expected[step], self._finished[step]
        moved = {t.request_id for t in late}
        return [t for t in finished if t.request_id not in moved]

    def enter(self, result: Result) -> None:
        """Called by the driver."""
        if isinstance(result, Trajectory):
            self._scorer(result)
        with self._changed:
            if isinstance(result, BaseException):
                self._error = result
            elif isinstance(result, Trajectory):
                self._finished[self._step_of.pop(result.request_id)].append(result)
            else:
                assert isinstance(result, Deferred), "nothing runs ahead of its step"
                step = self._step_of.pop(result.request_id)
                self._expected[step] -= 1
                self._expected[step + 1] += 1
                self._step_of[result.request_id] = step + 1
            self._changed.notify_all()


# --- groups whose other requests continue in the next step, in a checkpoint -----------------


def unfinished_state(groups: Mapping[int, Sequence[Trajectory]]) -> dict[str, Any]:
    """Return the finished responses of each group, for `load_unfinished`."""
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
        result = cache.get(str(group)) if rewards else None
        responses = () if result is None else result.responses
        groups[group] = []
        for reward, response in zip(rewards, responses, strict=True):
            scores, tokens = response.scores, response.tokens
            assert result is not None and scores is not None
            groups[group].append(
                Trajectory(
                    request_id=-1,  # it has ended
                    group_id=group,
                    sample_index=response.sample_index,
                    prompt_ids=result.prompt_ids,
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
