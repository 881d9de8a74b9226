"""One worker's side of a rollout: its limits, its requests, and its work while it has none."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
from collections.abc import Sequence
from typing import Protocol

from rl.engine.engine import Engine
from rl.trajectory import PartialRequest
from rl.workers.coordinator import Coordinator
from rl.workers.messages import LET_GO, Inbox, Message
from sched.protocol import Copy, Drop, Start
from sched.request import Kv

WAKE = (-1, Start(-1, -1, -1, 1, 0, Kv.HELD))  # in an inbox: stop waiting
IDLE_POLL_S = 0.005  # between two looks at whether there is idle work
LOOK_S = 1.0  # between two looks at whether there is anybody to wait for


class IdleWork(Protocol):
    """Work for workers without requests (`rl.drafter_training`); any thread may call it."""

    def rollout_began(self) -> None:
        """Requests are assigned: from now on a worker that has none is idle."""
        ...

    def rollout_ended(self) -> None:
        """No worker is idle any more; return once no unit of work runs."""
        ...

    def joined(self, worker_id: int) -> None: ...

    def lost(self, worker_id: int, *, hangs: bool = False) -> None: ...

    def spare(self, worker_id: int, runner: Engine) -> bool:
        """Do one unit of work on an idle worker's devices; return False if there is none."""
        ...

    def busy(self, worker_id: int) -> None:
        """A request has come for a worker that may have been idle."""
        ...

    def dismiss(self) -> None:
        """The workers' threads have ended."""
        ...


@dataclasses.dataclass(frozen=True)
class WorkerLimits:
    """Bounds of each worker, and whether one that raised or hangs is replaced (`restart`).

    A worker hangs if it has work and shows no sign of life for `hang_limit_s`.
    """

    kv_tokens: int
    max_requests: int
    longest_tokens: int
    pool_bytes: int
    hang_limit_s: float
    restart: bool = False
    keeps_decisions: bool = False  # all of them
    steps_apart: bool = False  # a request runs with the weights of its own step alone


class WorkerSource:
    """A worker's `rl.workers.drive.RequestSource`: its inbox, the coordinator and the pool.

    Its requests are of the step that `next_step` returned last, or of earlier ones, unless the
    limits say that steps are apart: a request of another step waits until that step is begun.
    """

    def __init__(
        self,
        worker_id: int,
        inbox: Inbox,
        coordinator: Coordinator,
        limits: WorkerLimits,
        engine: Engine,
        idle_work: IdleWork | None = None,
    ) -> None:
        self.most_requests, self.longest_tokens = limits.max_requests, limits.longest_tokens
        self.kv_tokens = limits.kv_tokens
        self._engine, self._idle_work = engine, idle_work
        self._worker_id, self._coordinator = worker_id, coordinator
        self._inbox, self._step = inbox, 0
        self._starts: collections.deque[tuple[int, Start | None]] = collections.deque()
        self._copies: list[Copy] = []  # of requests that run here
        self._drops: list[int] = []
        self._steps_apart = limits.steps_apart
        self._closed = self._lets_go = False
        self.wait_limit_s: float | None = None  # of `take`, which then returns no request
        self.has_requests = False  # in another program: without new ones it is not idle

    def wake(self) -> None:
        """Let a `take` that waits return without a request; any thread may call it."""
        self._inbox.put(WAKE)

    def next_step(self) -> int | None:
        """Wait for a start and return its step; None once no more will come."""
        self._lets_go = False
        while not self._starts and not self._closed:  # it may be woken for nothing
            self._receive(wait=True)
            self._nothing_runs()
            while self._starts and self._starts[0] is LET_GO:
                self._starts.popleft()  # all that it had is gone
        if not self._starts:
            return None
        self._step = self._starts[0][0]
        self._coordinator.begin_step(self._worker_id, self._step)
        return self._step

    def _nothing_runs(self) -> None:
        """Between two rollouts of the engine there is nothing to drop, nor to copy."""
        self._drops.clear()
        for _, number in self.copies():
            self.copied(number, None)

    def take(self, *, wait: bool) -> Sequence[PartialRequest] | None:
        """Return the requests to start now; None once no more will come for this step."""
        if self._lets_go:
            return None
        if not (wait or self._starts or self._closed) and self._inbox.empty():
            return ()  # as after most rounds
        self._receive(wait=wait)
        starts = []
        while self._starts and not self._lets_go:
            step, start = self._starts[0]
            if start is None:
                self._lets_go = True
            elif step > self._step or (self._steps_apart and step < self._step):
                break
            else:
                starts.append(start)
            self._starts.popleft()
        if not starts and (self._starts or self._closed or self._lets_go):
            return None
        found = [self._coordinator.chunk(self._worker_id, start) for start in starts]
        return [partial for partial in found if partial is not None]

    @property
    def lets_go(self) -> bool:
        return self._lets_go

    def dropped(self) -> Sequence[int]:
        drops, self._drops = self._drops, []
        return drops

    def copies(self) -> Sequence[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return [(copy.request_id, copy.start.request_id) for copy in copies]

    def copied(self, number: int, partial: PartialRequest | None) -> None:
        self._coordinator.copied(self._worker_id, number, partial)

    def chunk_ended(self, request_id: int, response_tokens: int) -> int:
        return self._coordinator.chunk_ended(self._worker_id, request_id, response_tokens)

    def park(self, leaving: Sequence[PartialRequest]) -> None:
        self._coordinator.park(self._worker_id, leaving)

    def _receive(self, *, wait: bool) -> None:
        """Empty the inbox; with `wait`, wait for a start if there is none."""
        try:
            while not self._closed:
                waits = wait and not self._starts
                if not waits and self._inbox.empty():
                    break
                start = self._next(wait=waits)
                if start is WAKE:
                    break
                if start is None:
                    self._closed = True
                elif isinstance(start[1], Copy):
                    self._copies.append(start[1])
                elif isinstance(start[1], Drop):
                    self._drop(start[1].request_id)
                else:
                    self._starts.append((start[0], start[1]))
                wait = wait and bool(self._starts)  # else the engine is to see to it
        except queue.Empty:
            pass

    def _drop(self, request_id: int) -> None:
        """End a request: one that runs, or its start, which the engine has not heard of."""
        self._drops.append(request_id)
        kept = (s for s in self._starts if s[1] is None or s[1].request_id != request_id)
        self._starts = collections.deque(kept)

    def _next(self, *, wait: bool) -> Message | None:
        """The next start of the inbox; idle work is done while it is empty."""
        idle_work = self._idle_work
        if idle_work is None:
            return self._wait() if wait else self._inbox.get_nowait()
        try:
            if not wait:
                start = self._inbox.get_nowait()
            else:
                start = self._wait() if self.has_requests else self._work_meanwhile(idle_work)
        except queue.Empty:
            raise
        except BaseException:
            idle_work.busy(self._worker_id)
            raise
        if start is not WAKE:  # whoever is woken for something else is as idle as before
            idle_work.busy(self._worker_id)
        return start

    def _work_meanwhile(self, idle_work: IdleWork) -> Message | None:
        """Return the next start; units of idle work are done until then.

        Raises queue.Empty after `wait_limit_s`, and the unit that is under way.
        """
        alive, began_s = self._coordinator.alive, self._engine.clock()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get_nowait()
            alive(self._worker_id, "training the drafter")
            if not idle_work.spare(self._worker_id, self._engine):
                alive(self._worker_id, None)
                with contextlib.suppress(queue.Empty):
                    return self._inbox.get(timeout=IDLE_POLL_S)
            limit_s = self.wait_limit_s
            if limit_s is not None and self._engine.clock() - began_s > limit_s:
                alive(self._worker_id)
                raise queue.Empty

    def _wait(self) -> Message | None:
        """Return the next start, whenever it comes, with signs of life until then.

        Raises queue.Empty after `wait_limit_s`.
        """
        alive = self._coordinator.alive
        while True:
            alive(self._worker_id, None)
            try:
                start = self._inbox.get(timeout=self.wait_limit_s or LOOK_S)
                break
            except queue.Empty:
                if self.wait_limit_s is not None:
                    alive(self._worker_id)
                    raise
        alive(self._worker_id)
        return start
