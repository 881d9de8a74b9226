"""Training steps on a virtual clock, under the schedulers of real runs (`sched.policies`)."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

from sched.protocol import Defer, Event, Submitted, Trained
from sched.request import RequestSpec
from sched.simulator.cluster import Record, Simulation
from sched.simulator.worker import RunningStart

TRAINER = -1  # its events are in the same heap as the workers'
Steps = Sequence[Sequence[RequestSpec]]


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
        self._begin([spec for requests in steps for spec in requests])
        self._train_s, self._left = train_s, [len(requests) for requests in steps]
        self._step_of = {spec.request_id: spec.step for requests in steps for spec in requests}
        self._steps = list(steps[2:])
        for requests in steps[:2]:
            self._send(Submitted(tuple(requests)), 0.0)
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
        started: list[int] = []
        for action in self._scheduler.handle(event, now_s):
            if isinstance(action, Defer):
                step = self._step_of[action.request_id]
                self._deferred += 1
                self._left[step] -= 1
                self._left[step + 1] += 1
                self._step_of[action.request_id] = step + 1
            else:
                started.append(self._start(action, now_s))
        for worker_id in dict.fromkeys(started):
            self._schedule(self._workers[worker_id])
