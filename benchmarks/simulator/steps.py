"""Training steps on a virtual clock, under the schedulers of real runs (`sched.policies`).

`StepSimulation` plays steps whose rollouts the scheduler begins, `AheadSimulation` steps that are
begun ahead of their weights. The number of begun tokens that the new weights draw as well is not
simulated but given: `kept`.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from reprise.sched.protocol import (
    Action,
    ChunkDone,
    Defer,
    Event,
    Recall,
    Recalled,
    Return,
    Submitted,
    Trained,
)
from reprise.sched.request import RequestSpec
from reprise.sched.simulator.cluster import Record, Simulation
from reprise.sched.simulator.roofline import Costs
from reprise.sched.simulator.worker import RoundModel, RoundPlan, RunningStart

TRAINER = -1  # its events are in the same heap as the workers'
AHEAD = 2**40  # added to the numbers of requests that run ahead
Steps = Sequence[Sequence[RequestSpec]]
Kept = Callable[[int, int], int]  # (request, begun tokens) → how many are drawn again


@dataclasses.dataclass(frozen=True, eq=False)
class StepsRecord(Record):
    """The measurements of a run: the end of each step's update, and the number of deferrals."""

    trained_s: Sequence[float] = ()
    deferred: int = 0


class StepSimulation(Simulation):
    """A run of training steps: the rollouts of each, then its update on other devices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._steps: list[Sequence[RequestSpec]] = []  # not submitted yet
        self._train_s: Sequence[float] = ()
        self._step_of: dict[int, int] = {}
        self._left: list[int] = []  # unfinished requests of each step
        self._trained_s: list[float] = []
        self._training = False
        self._deferred = 0

    def run_steps(self, steps: Steps, train_s: Sequence[float]) -> StepsRecord:
        """Play steps with updates of `train_s`.

        The scheduler gets step s when the update of step s − 2 is done, the first two at 0, and
        every update's end; it decides which rollouts may run.
        """
        self._begin_run(steps, train_s)
        self._steps = list(steps[2:])
        for requests in steps[:2]:
            self._send(Submitted(tuple(requests)), 0.0)
        return self._steps_record()

    def _begin_run(self, steps: Steps, train_s: Sequence[float]) -> None:
        self._begin([spec for requests in steps for spec in requests])
        self._train_s, self._left = train_s, [len(requests) for requests in steps]
        self._step_of = {spec.request_id: spec.step for requests in steps for spec in requests}

    def _steps_record(self) -> StepsRecord:
        self._run_to_end()
        done: Any = {"trained_s": self._trained_s, "deferred": self._deferred}
        return StepsRecord(**vars(self._record()), **done)

    def _advance(self, now_s: float, worker_id: int, version: int) -> None:
        if worker_id == TRAINER:
            self._end_update(now_s)
        else:
            super()._advance(now_s, worker_id, version)
        step = len(self._trained_s)
        if not self._training and step < len(self._left) and not self._left[step]:
            self._training = True
            heapq.heappush(self._heap, (now_s + self._train_s[step], TRAINER, step))

    def _end_update(self, now_s: float) -> None:
        self._training = False
        self._trained_s.append(now_s)
        if self._steps:
            self._send(Submitted(tuple(self._steps.pop(0))), now_s)
        step = len(self._trained_s) - 1
        self._send(Trained(step, self._train_s[step]), now_s)

    def _finished(self, job: RunningStart, now_s: float) -> None:
        super()._finished(job, now_s)
        self._left[self._step_of[job.request_id]] -= 1

    def _send(self, event: Event, now_s: float) -> None:
        touched: list[int] = []
        released: list[ChunkDone] = []
        for action in self._scheduler.handle(event, now_s):
            if isinstance(action, Defer):
                step = self._step_of[action.request_id]
                self._deferred += 1
                self._left[step] -= 1
                self._left[step + 1] += 1
                self._step_of[action.request_id] = step + 1
            elif isinstance(action, Recall):
                released += self._release(action.worker_id, now_s)
                touched.append(action.worker_id)
            elif not isinstance(action, Return):  # those stay in `_generated` until their step
                touched.append(self._start(action, now_s))
        for worker_id in dict.fromkeys(touched):
            self._schedule(self._workers[worker_id])
        for report in released:
            self._send(report, now_s)

    def _release(self, worker_id: int, now_s: float) -> list[ChunkDone]:
        """Have a worker release all that it runs; return its reports."""
        jobs = self._workers[worker_id].release(now_s)
        for job in jobs:
            self._ran(job)
        return [
            ChunkDone(j.request_id, worker_id, j.chunk, j.generated_tokens, False) for j in jobs
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class BegunStart:
    """Tokens `first` to `end` of a response that was begun, and a worker's seconds for them."""

    first: int
    end: int
    device_s: float

    def dropped_s(self, kept_tokens: int) -> float:
        """Return the seconds for tokens that are not kept: all, if no token came."""
        tokens = self.end - self.first
        kept = min(max(0, kept_tokens - self.first), tokens)
        return self.device_s * (1 - kept / tokens) if tokens else self.device_s


class BegunDrafts(RoundModel):
    """Rounds in which a response drafts from its begun tokens after the first difference.

    It drafts `num_drafts` tokens a round, each of which is accepted with the probability `accepted`
    if those before it were; 0 of both: plain rounds.
    """

    num_lanes = 2

    def __init__(self, instance: Costs, num_drafts: int = 0, accepted: float = 0.0) -> None:
        super().__init__(instance)
        self._num_drafts = num_drafts
        self._tokens = sum(accepted**n for n in range(num_drafts + 1))
        self.drafting: set[int] = set()  # requests that have begun tokens left

    def lane(self, request_id: int, finished_siblings: int) -> int:
        return int(request_id in self.drafting)

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> RoundPlan:
        plain, drafting = counts
        nodes = (plain + drafting * (1 + self._num_drafts)) / (plain + drafting)
        cost = self._instance.round_cost(plain + drafting, nodes, self.others(worker_id))
        return RoundPlan(cost, (1.0, self._tokens))


class AheadSimulation(StepSimulation):
    """A run of steps under `sched.policies.steps.Ahead`.

    With `BegunDrafts` for a round model, begun tokens that are not kept are drafts. `begun_tokens`
    were begun ahead of their step, and `kept_tokens` of them kept. `begun_s` and `dropped_s` are
    the workers' seconds for begun tokens, and for those that were not kept, by step.
    """

    def run_ahead(self, steps: Steps, train_s: Sequence[float], kept: Kept) -> StepsRecord:
        """Play steps: rollouts, then an update elsewhere, then the next rollouts.

        Begun tokens are verified in one pass with the prompt; generation continues after the last
        kept one.
        """
        self._all, self._kept = steps, kept
        self._begin_run(steps, train_s)
        ahead = {n + AHEAD: length for n, length in self._lengths.items()}
        self._lengths = {**self._lengths, **ahead}
        self.begun_tokens = self.kept_tokens = 0
        self.begun_s, self.dropped_s = [0.0] * len(steps), [0.0] * len(steps)
        self._begun_starts: dict[int, list[BegunStart]] = collections.defaultdict(list)
        self._drafts_until: dict[int, int] = {}  # the begun tokens of requests that draft from them
        self._verified: dict[int, int] = {}  # begun tokens that are not kept, by request
        self._submit(0, 0.0)
        return self._steps_record()

    def _submit(self, step: int, now_s: float) -> None:
        """Submit a step with its kept tokens, and the one after it ahead of its weights."""
        self._send(Submitted(tuple(self._resumed(spec) for spec in self._all[step])), now_s)
        if step + 1 < len(self._all):
            ahead = [
                dataclasses.replace(x, request_id=x.request_id + AHEAD, ahead=True)
                for x in self._all[step + 1]
            ]
            self._requests.update({spec.request_id: spec for spec in ahead})
            self._send(Submitted(tuple(ahead)), now_s)

    def _resumed(self, spec: RequestSpec) -> RequestSpec:
        request_id = spec.request_id
        begun = self._generated.pop(request_id + AHEAD, 0)
        kept = min(begun, self._kept(request_id, begun), self._lengths[request_id] - 1)
        self.begun_tokens += begun
        self.kept_tokens += kept
        for start in self._begun_starts.pop(request_id + AHEAD, ()):
            self.begun_s[spec.step] += start.device_s
            self.dropped_s[spec.step] += start.dropped_s(kept)
        self._generated[request_id], self._verified[request_id] = kept, begun - kept
        if isinstance(self._round_model, BegunDrafts) and begun > kept + 1:
            self._round_model.drafting.add(request_id)
            self._drafts_until[request_id] = begun
        return dataclasses.replace(spec, prefix_tokens=kept)

    def _end_update(self, now_s: float) -> None:
        super()._end_update(now_s)
        step = len(self._trained_s)
        if step < len(self._all):
            self._send(Recalled(), now_s)
            self._submit(step, now_s)

    def _start(self, action: Action, now_s: float) -> int:
        request_id = action.request_id
        if self._generated.get(request_id, 0) >= self._drafts_until.get(request_id, 2**62):
            self._round_model.drafting.discard(request_id)
        return super()._start(action, now_s)

    def _verified_tokens(self, request_id: int) -> int:
        return self._verified.pop(request_id, 0)

    def _ran(self, job: RunningStart) -> None:
        if job.request_id >= AHEAD:
            first = self._generated.get(job.request_id, 0)
            start = BegunStart(first, job.generated_tokens, job.device_s)
            self._begun_starts[job.request_id].append(start)
        super()._ran(job)

    def _finished(self, job: RunningStart, now_s: float) -> None:
        if job.request_id < AHEAD:
            super()._finished(job, now_s)
