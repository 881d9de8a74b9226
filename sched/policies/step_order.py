"""Training steps in turn, around a scheduler that knows of no steps.

`sync`: a step's rollouts start when the update before is done. `one_step_off`: they start when
the rollouts before are done, with weights that are one update old.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from sched.protocol import Action, Event, Finished, Scheduler, Submitted, Trained

MODES = ("sync", "one_step_off")


class StepOrder:
    """A scheduler that submits a step to `scheduler` once the step before is finished.

    Steps are numbered from 0; more requests of one that has begun are submitted at once.
    """

    def __init__(self, scheduler: Scheduler, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"expected a mode of {', '.join(MODES)}, got {mode!r}")
        self._scheduler, self._behind = scheduler, 1 + (mode == "one_step_off")
        self._waiting: collections.deque[Submitted] = collections.deque()
        self._next = 0
        self._trained = -1

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished + sum(len(s.requests) for s in self._waiting)

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        if isinstance(event, Submitted):
            actions = self._submitted(event, now_s)
        else:
            actions = self._scheduler.handle(event, now_s)
        if isinstance(event, Trained):
            self._trained = max(self._trained, event.step)
        if self._waiting and isinstance(event, (Submitted, Trained, Finished)):
            actions = [*actions, *self._begin_steps(now_s)]
        return actions

    def _begin_steps(self, now_s: float) -> list[Action]:
        """Submit the steps that wait and may begin."""
        actions: list[Action] = []
        while (
            self._waiting
            and not self._scheduler.num_unfinished
            and self._next - self._behind <= self._trained
        ):
            actions += self._scheduler.handle(self._waiting.popleft(), now_s)
            self._next += 1
        return actions

    def _submitted(self, event: Submitted, now_s: float) -> Sequence[Action]:
        step = event.step
        if step < self._next:
            return self._scheduler.handle(event, now_s)
        if step == self._next + len(self._waiting) - 1:  # more of the last one that waits
            event = Submitted((*self._waiting.pop().requests, *event.requests), step)
        self._waiting.append(event)
        return ()
