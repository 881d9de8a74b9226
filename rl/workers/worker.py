"""A rollout worker: commands → `step` → events. The same class runs in a thread and in a Ray actor.

Requests run in order of arrival. A request of a later step waits until the engine has no request;
the worker then opens the rollout of that step. A request of an earlier step runs in the open
rollout, unless `WorkerLimits.has_steps_apart` makes it wait for the rollout of its step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.stats import EngineStats
from reprise.rl.records.trajectory import PartialRequest
from reprise.rl.workers.messages import (
    Begin,
    Command,
    Event,
    Extend,
    Fork,
    Left,
    Prepare,
    Release,
    Released,
    Remove,
    Report,
    Take,
    WorkerLimits,
)

MakeSpec = Callable[[Any, contextlib.ExitStack], RolloutSpec]


class RolloutWorker:
    """An engine that runs the requests of a session, called from one thread.

    `make_spec` turns a `Prepare.spec` into a rollout on the devices of the engine.
    """

    def __init__(
        self, engine: Engine, limits: WorkerLimits, make_spec: MakeSpec | None = None
    ) -> None:
        self.engine = engine
        self._limits = limits
        self._make_spec = make_spec or self._placed
        self._specs: dict[int, Any] = {}
        self._queue: collections.deque[Begin] = collections.deque()
        self._rollout = contextlib.ExitStack()
        self._step: int | None = None
        self._stats = EngineStats()
        self.has_mail = False  # set by the driver thread: `step` returns after the current round

    def step(self, commands: Sequence[Command], max_s: float) -> Report:
        """Apply commands, then run rounds until events occur, mail arrives, or `max_s` passes.

        Returns immediately if idle. An exception closes the rollout; the engine stays usable.
        """
        try:
            events = self._apply(commands)
            until_s = self.engine.clock() + max_s
            while not (events or self.has_mail or self._is_idle):
                self._admit()
                events = list(self.engine.step())
                if self.engine.clock() > until_s:
                    break
        except BaseException as error:
            self._rollout.__exit__(type(error), error, error.__traceback__)
            raise
        return self.report(events)

    def report(self, events: Sequence[Event]) -> Report:
        return Report(self._step, events, self._stats, self._is_idle)

    def close(self, *, abort: bool) -> None:
        """Close the open rollout; `abort` drops hidden states that were not delivered."""
        if abort:
            self._rollout.__exit__(RuntimeError, RuntimeError("aborted"), None)
        else:
            self._rollout.close()

    @property
    def _runs(self) -> bool:
        return self._step is not None and self.engine.has_work

    @property
    def _is_idle(self) -> bool:
        return not (self._queue or self._runs)

    def _apply(self, commands: Sequence[Command]) -> list[Event]:
        events = self._take({c.request_id: c.ticket for c in commands if isinstance(c, Take)})
        for command in commands:
            match command:
                case Prepare(step, spec, oldest):
                    needed = {s: known for s, known in self._specs.items() if s >= oldest}
                    self._specs = needed | {step: spec}
                case Begin():
                    self._queue.append(command)
                case Extend(request_id, max_tokens):
                    self.engine.extend(request_id, max_tokens)
                case Fork(request_id, ticket):
                    partial = self.engine.copy(request_id) if self._step is not None else None
                    events.append(Left(ticket, partial))
                case Remove(request_id):
                    self._remove(request_id)
                case Release():
                    events.append(Released(self._release()))
        return events

    def _take(self, tickets: Mapping[int, int]) -> list[Event]:
        """Return requests at the end of a chunk, before another command frees their rows."""
        taken = self.engine.take(list(tickets)) if tickets else ()
        return [Left(tickets[p.request.request_id], p) for some in taken for p in some]

    def _remove(self, request_id: int) -> None:
        others = (b for b in self._queue if b.partial.request.request_id != request_id)
        self._queue = collections.deque(others)
        if self._step is not None:
            self.engine.remove([request_id])

    def _release(self) -> list[PartialRequest]:
        released = self.engine.release() if self._step is not None else []
        queued = [begin.partial.without_kv() for begin in self._queue]
        self._queue.clear()
        return [*released, *queued]

    def _admit(self) -> None:
        """Admit queued requests that may run in the open rollout; open the next rollout if due."""
        if self._queue and not self._fits(self._queue[0].step) and not self._runs:
            self._open(self._queue[0].step)
        admitted = []
        while self._queue and self._fits(self._queue[0].step):
            admitted.append(self._queue.popleft().partial)
        if admitted:
            self.engine.add(admitted)

    def _fits(self, step: int) -> bool:
        if self._step is None or step == self._step:
            return step == self._step
        return step < self._step and not self._limits.has_steps_apart

    def _open(self, step: int) -> None:
        self._rollout.close()
        spec = self._specs[step]
        limits = self._limits
        engine = self.engine
        self._step = step
        self._stats = EngineStats()
        rollout = engine.rollout(
            self._make_spec(spec, self._rollout),
            max_requests=limits.max_requests,
            max_tokens=limits.max_tokens,
            kv_tokens=limits.kv_tokens,
            stats=self._stats,
        )
        self._rollout.enter_context(rollout)

    def _placed(self, spec: RolloutSpec, stack: contextlib.ExitStack) -> RolloutSpec:
        return dataclasses.replace(spec, params=self.engine.place(spec.params))
