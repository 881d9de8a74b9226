"""The prompts of a pipeline step, and its responses, received and scored as they finish.

Groups are numbered over all steps. A group with a response that continues in the next step
(HistoPipe) is held until the group is whole, and then belongs to the next step: rewards are
compared within whole groups.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reprise.rl.assembly.system import System
from reprise.rl.engine.stats import EngineStats, PoolCounts
from reprise.rl.engine.worker_record import WorkerEvent
from reprise.rl.exchange.responses import Responses, Scorer, scored_rewards
from reprise.rl.learner.advantages import informative_groups
from reprise.rl.records.trajectory import (
    FinishReason,
    NonFiniteLogits,
    Request,
    Trajectory,
    check_finite,
)
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.signals import Stopped
from reprise.rl.runtime.waits import POLL_S
from reprise.rl.steps.rollouts import Prompts, Rollouts, groups_to_ask, sampling_metrics
from reprise.rl.workers.messages import Deferred, Result
from reprise.spec.config import SamplingConfig

Scored = tuple[Trajectory, Score, str]  # a response with its reward, and its text
Held = Mapping[int, list[Scored]]  # finished responses of groups that are not whole


@dataclasses.dataclass(eq=False)
class StepPrompts:
    """All prompts of a step, pass by pass; group `first_group + g` answers prompt g."""

    begins: int  # the position of the first prompt in the data order
    first_group: int
    prompts: Prompts
    phases: int = 1
    passed_over: int = 0

    def add(self, begins: int, new: Prompts) -> None:
        """Add another pass, with prompts from the given position of the data order on."""
        self.prompts = self.prompts + new
        self.phases = self.phases + 1
        self.passed_over += new.end - begins - len(new)


@dataclasses.dataclass(frozen=True, eq=False)
class StepResponses:
    """The responses of a step so far; `scored` starts with responses held by the previous step."""

    step_prompts: StepPrompts
    group_size: int
    scored: list[Scored]
    events: list[WorkerEvent] = dataclasses.field(default_factory=list)
    pools: list[PoolCounts] = dataclasses.field(default_factory=list)

    def add(self, found: Responses) -> EngineStats:
        """Add the responses of a pass; return the counts of the step so far."""
        rows = zip(found.trajectories, found.scores, found.texts, strict=True)
        self.scored.extend(rows)
        self.events.extend(found.stats.events)
        self.pools.append(found.stats.pool)
        found.stats.events = list(self.events)
        found.stats.pool = sum(self.pools, PoolCounts())
        return found.stats

    @property
    def carried(self) -> list[int]:
        """Return the groups of the previous step that became whole in this step."""
        groups = {t.group_id for t, _, _ in self.scored}
        return sorted(group for group in groups if group < self.step_prompts.first_group)

    def held(self) -> dict[int, list[Scored]]:
        """Return the finished responses of groups that continue in the next step, by group."""
        first = self.step_prompts.first_group
        groups: dict[int, list[Scored]] = {
            first + g: [] for g in range(len(self.step_prompts.prompts))
        }
        for row in self.scored:
            if row[0].group_id >= first:
                groups[row[0].group_id].append(row)
        return {group: rows for group, rows in groups.items() if len(rows) < self.group_size}

    def whole(self) -> list[Scored]:
        """Return the responses of whole groups."""
        held = self.held()
        return [row for row in self.scored if row[0].group_id not in held]

    def informative(self) -> set[int]:
        """Return the whole groups with rewards that are not all equal, ignoring failed rewards."""
        rows = self.whole()
        trajectories = [t for t, _, _ in rows]
        rewards = scored_rewards(trajectories, [score for _, score, _ in rows])
        return informative_groups(rewards, [t.group_id for t in trajectories])

    def num_to_ask(self, wanted: int) -> int:
        """Return the group count of another pass; continuing groups do not count as missing."""
        num_held = len(self.held())
        num_used = sum(group >= self.step_prompts.first_group for group in self.informative())
        return groups_to_ask(wanted - num_held, len(self.step_prompts.prompts) - num_held, num_used)

    def rollouts(
        self, before: StepPrompts | None, stats: EngineStats, cursor: int, *, dynamic: bool
    ) -> Rollouts:
        """Return the step, with carried groups last; `dynamic` drops uninformative groups."""
        own = self.step_prompts
        carried = self.carried
        first = self.step_prompts.first_group
        prompts = own.prompts
        num_own = len(own.prompts)
        place = {first + g: g for g in range(num_own)}
        place |= {group: num_own + i for i, group in enumerate(carried)}
        used = self.informative() if dynamic else set(place)
        if carried:
            assert before is not None
            prompts = prompts + before.prompts.take([g - before.first_group for g in carried])
        scored = sorted(self.whole(), key=lambda s: (place[s[0].group_id], s[0].sample_index))
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
        )


def _moved(t: Trajectory, group: int) -> Trajectory:
    return dataclasses.replace(t, group_id=group)


class ResultCollector:
    """Receives results in the driver thread, even while an update runs.

    A deferred request is expected in the next step.
    """

    def __init__(self, system: System, scorer: Scorer) -> None:
        self._system = system
        self._scorer = scorer
        self._step_of: dict[int, int] = {}
        self._expected: collections.Counter[int] = collections.Counter()
        self._finished: collections.defaultdict[int, list[Trajectory]] = collections.defaultdict(
            list
        )
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def expect(self, step: int, requests: Iterable[Request]) -> None:
        """Record the requests of a step that will be submitted next."""
        with self._changed:
            ids = [r.request_id for r in requests]
            self._step_of.update(dict.fromkeys(ids, step))
            self._expected[step] += len(ids)

    def take(self, step: int, num_tokens: Callable[[], int]) -> list[Trajectory]:
        """Wait for the responses of a step, except for deferred requests, and return them.

        Raises Stopped, or the error of a worker.
        """
        while True:
            if self._system.is_stop_requested():
                raise Stopped
            with self._changed:
                if self._error is not None:
                    raise self._error
                finished = len(self._finished[step])
                expected = self._expected[step]
                if finished == expected and (result := self._complete(step)) is not None:
                    return result
                self._changed.wait(POLL_S)
            self._system.show.rollout(finished, expected, num_tokens())

    def _complete(self, step: int) -> list[Trajectory] | None:
        """Return the finished responses of a step; None if all wait for their siblings.

        A response that is scored together with a deferred response moves to the next step too.
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
        """Score and store a result; the driver calls this."""
        if isinstance(result, Trajectory):
            try:
                check_finite(result)
            except NonFiniteLogits as error:
                step = self._step_of[result.request_id]
                result = NonFiniteLogits(f"step {step}: {error}")
            else:
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


# --- held groups in a checkpoint ----------------------------------------------------------

_ARRAYS = (
    *("prompt_ids", "response_ids", "logprobs", "emission_logprobs", "policy_versions"),
    "origins",
)
_NUMBERS = "request_id", "group_id", "sample_index"


def held_state(held: Held) -> dict[str, Any]:
    """Return the finished responses of held groups, for `load_held`."""
    rows = [
        {name: getattr(t, name) for name in _ARRAYS}
        | {name: int(getattr(t, name)) for name in _NUMBERS}
        | {"finish_reason": str(t.finish_reason), "text": text}
        | {"values": dict(score.values), "total": score.total, "failure": score.failure}
        for scored in held.values()
        for t, score, text in scored
    ]
    return {"groups": list(held), "rows": rows}


def load_held(
    state: Mapping[str, Any], sampling: Callable[[int], SamplingConfig | None]
) -> dict[int, list[Scored]]:
    """Return the groups of `held_state`; `sampling` returns the sampling of a group, or None."""
    held: dict[int, list[Scored]] = {group: [] for group in state["groups"]}
    for row in state["rows"]:
        score = Score(row["values"], row["total"], row["failure"])
        t = Trajectory(
            **{name: row[name] for name in (*_ARRAYS, *_NUMBERS)},
            finish_reason=FinishReason(row["finish_reason"]),
            reward=score.total,
            sampling=sampling(row["group_id"]),
        )
        held[t.group_id].append((t, score, row["text"]))
    return held
