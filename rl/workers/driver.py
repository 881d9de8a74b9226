"""The driver of a session's workers, in one thread without locks (`rl.workers.session`).

    event → scheduler.handle → actions → each worker's inbox → call ──┐
      ↑                                                               │
      └── trajectory, end of a chunk, state of a request ←── report ──┘

A lost worker is a call that raised or passed its deadline.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rl.engine.engine import ChunkEnd
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.worker_record import Kind, WorkerEvent
from rl.runtime.waits import Hang, ProgramLost
from rl.trajectory import PartialRequest, Request, Trajectory
from rl.workers.pool import IdleWork, Place
from rl.workers.request_table import LiveRequest, RequestTable
from rl.workers.results import Deferred, Result, Returned, WorkerError
from rl.workers.step_counts import StepCounts
from rl.workers.worker import (
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
from sched import protocol
from sched.protocol import Action, Scheduler, SchedulerDecision, Start
from sched.request import Kv, copy_of

MAX_RESTARTS = 3  # of a place's workers in a session: another one would fail as well
PROFILE_S = 0.25  # between two reports of acceptance to the scheduler
BEAT_S = 2.0  # between two calls of an idle worker outside of this process
SPARE_POLL_S = 0.005  # between two units of idle work, if there was none
LEAVING_S = 5.0  # for workers to end, once a session is aborted


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker that is present: its starts in force, and its call."""

    place: Place
    where: str
    inbox: list[Command] = dataclasses.field(default_factory=list)
    starts: dict[int, Start] = dataclasses.field(default_factory=dict)
    prepared: set[int] = dataclasses.field(default_factory=set)
    call: Future[Any] | None = None
    called_s: float = 0.0
    spare_s: float = 0.0  # when idle work may be looked for again
    doing: str = ""
    is_idle: bool = True
    is_leaving: bool = False
    is_lost: bool = False  # the scheduler is told once another worker is present


class Driver:
    """Drives the workers of a session; one thread calls it.

    `deliver` receives results, `later` calls to make in the thread once a worker's call has ended.
    """

    def __init__(
        self,
        places: Sequence[Place],
        scheduler: Scheduler,
        limits: WorkerLimits,
        clock: Callable[[], float],
        *,
        deliver: Callable[[Result], None],
        later: Callable[[Callable[[], object]], None],
        pool_bytes: int,
        can_restart: bool = False,
        keeps_decisions: bool = False,
        idle_work: IdleWork | None = None,
        acceptance: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        self.places, self._scheduler, self._limits = places, scheduler, limits
        self._clock, self._deliver, self._later = clock, deliver, later
        self._can_restart, self._keeps_decisions = can_restart, keeps_decisions
        self._idle_work, self._acceptance = idle_work, acceptance
        self._began_s = self._profiled_s = clock()
        self.requests, self.counts = RequestTable(pool_bytes), StepCounts()
        self._workers: dict[int, _Worker] = {}
        self._num_joined = 0
        self._failures: collections.Counter[int] = collections.Counter()  # by place
        self._seated: dict[int, int] = {}  # place → worker
        self._lost: dict[int, WorkerError] = {}  # until another worker is present
        self._specs: dict[int, RolloutSpec] = {}
        self.events: collections.deque[WorkerEvent] = collections.deque()
        self._early: list[Callable[[], None]] = []  # submissions before any worker has joined
        self._rolls = False  # requests were submitted: idle workers may do idle work
        self.ends_s: float | None = None  # when the session was closed
        self._aborts = False
        self.error: BaseException | None = None  # of a worker that was to end
        self.decisions: list[SchedulerDecision] = []

    def end(self) -> None:
        """Note that no worker runs any more."""
        if self._idle_work is not None:
            self._idle_work.dismiss()

    @property
    def has_ended(self) -> bool:
        return self.ends_s is not None and not self._workers

    def begin_turn(self) -> None:
        """Let workers of places that are ready join, before events are handled."""
        if self.ends_s is None:
            self._seat()
            self._profile()

    def end_turn(self) -> None:
        """Call the workers, and replace those that hang."""
        self._look_for_hung()
        for worker_id, worker in list(self._workers.items()):
            self._call(worker_id, worker)

    def submit(
        self,
        event: protocol.Submitted,
        spec: RolloutSpec | None,
        requests: Sequence[Request],
        oldest: int,
    ) -> None:
        """Submit requests of a step, which has a new `spec` or one of before."""
        if self.places and not self._num_joined:  # schedulers divide a step among workers
            self._early.append(partial(self.submit, event, spec, requests, oldest))
            return
        step = event.step
        self._specs = {s: known for s, known in self._specs.items() if s >= oldest}
        if spec is not None:
            self._specs[step] = spec
        self.counts.begin(step, oldest)
        for request in requests:
            self.requests.add(step, request)
        self.handle(event)
        if self._idle_work is not None:
            self._idle_work.rollout_began()
            self._rolls = True

    def handle(self, event: protocol.Event) -> Sequence[Action]:
        """Pass an event to the scheduler, and carry out its actions."""
        if not self.places:
            return ()  # another process has the workers, and all requests
        now_s = self._clock() - self._began_s
        actions = self._scheduler.handle(event, now_s)
        if self._keeps_decisions:
            self.decisions.append(SchedulerDecision(now_s, event, tuple(actions)))
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case protocol.Recall(worker_id):
                    self._workers[worker_id].inbox.append(Release())
                case protocol.Defer(request_id):
                    self.requests[request_id].step += 1
                    self._deliver(Deferred(request_id))
                case protocol.Return(request_id):
                    self._when_known(request_id, action)
                case protocol.Copy():
                    self._copy(action)
                case protocol.Drop():
                    self._drop(action)
        return actions

    # -- actions -----------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        worker = self._workers[start.worker_id]
        worker.starts[start.request_id] = start
        if start.kv is Kv.HELD:
            self.requests.withdraw(self.requests[start.request_id])
            worker.inbox.append(Extend(start.request_id, start.max_tokens))
        else:
            self._when_known(start.request_id, start)

    def _when_known(self, request_id: int, action: Start | protocol.Return) -> None:
        """Carry out an action once the state of its request is here."""
        live = self.requests[request_id]
        if live.ticket is not None:
            live.waiting.append(action)
        elif isinstance(action, Start):
            self._begin(live, action)
        else:
            self.requests.remove(request_id)
            self._deliver(Returned(PartialRequest(live.request, live.prefix)))

    def _begin(self, live: LiveRequest, start: Start) -> None:
        worker = self._workers.get(start.worker_id)
        if worker is None or worker.is_lost or worker.starts.get(start.request_id) != start:
            return  # the request was dropped meanwhile, or is started again elsewhere
        kv = self.requests.take_kv(live)
        if live.step not in worker.prepared:
            worker.prepared.add(live.step)
            worker.inbox.append(Prepare(live.step, self._specs[live.step], min(self._specs)))
        begun = live.start(kv if start.kv is Kv.POOL else None, start.max_tokens)
        worker.inbox.append(Begin(live.step, begun))

    def _copy(self, action: protocol.Copy) -> None:
        """Have a worker return a copy of a request, which another one starts."""
        original, start = self.requests[action.request_id], action.start
        request = dataclasses.replace(original.request, request_id=start.request_id)
        self.requests.add(original.step, request)
        ticket = self.requests.promise(start.request_id, action.worker_id)
        self._workers[action.worker_id].inbox.append(Fork(action.request_id, ticket))
        self._start(start)

    def _drop(self, action: protocol.Drop) -> None:
        worker = self._workers[action.worker_id]
        worker.starts.pop(action.request_id, None)
        worker.inbox.append(Remove(action.request_id))
        self.requests.remove(action.request_id)

    def _go_on(self, waiting: Sequence[Start | protocol.Return]) -> None:
        for action in waiting:
            self._when_known(action.request_id, action)

    # -- reports -----------------------------------------------------------------------------

    def _came(self, worker_id: int, call: Future[Any]) -> None:
        """A call of a worker has ended."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.call is not call:
            return  # it was lost before it came back
        worker.call = None
        error = call.exception()
        if error is not None:
            self._fail(worker_id, error)
        elif worker.is_leaving:
            del self._workers[worker_id]
        elif isinstance(report := call.result(), Report):
            self._reported(worker_id, worker, report)
        elif not report:  # there was no idle work
            worker.spare_s = self._clock() + SPARE_POLL_S

    def _reported(self, worker_id: int, worker: _Worker, report: Report) -> None:
        worker.is_idle = report.is_idle
        if report.step is not None and (spec := self._specs.get(report.step)) is not None:
            names, now_s = (worker.place.name, worker.where, spec.policy_version), self._clock()
            self.counts.add(report.step, report.stats, names, worker.called_s, now_s)
        if self._aborts:
            return
        for event in report.events:
            self._happened(worker_id, worker, event)

    def _happened(self, worker_id: int, worker: _Worker, event: Event) -> None:
        match event:
            case Trajectory():
                if self._is_in_force(worker, event.request_id):
                    self._finished(worker_id, worker, event)
            case ChunkEnd(request_id, tokens):
                if self._is_in_force(worker, request_id):
                    self._chunk_ended(worker_id, worker, request_id, tokens)
            case Left(ticket, state):
                self._go_on(self.requests.redeem(ticket, state))
            case Released(states):
                for state in states:
                    request_id = state.request.request_id
                    if self._is_in_force(worker, request_id):
                        live = self.requests[request_id]
                        self.requests.keep(live, state)
                        # what a lost worker had reported is generated again later
                        tokens = max(state.num_tokens, live.generated_tokens)
                        live.generated_tokens = tokens
                        self._chunk_done(worker_id, worker, request_id, tokens)

    def _is_in_force(self, worker: _Worker, request_id: int) -> bool:
        """Return False for a request that was dropped: its number may have been given again."""
        return request_id in worker.starts and Remove(request_id) not in worker.inbox

    def _finished(self, worker_id: int, worker: _Worker, trajectory: Trajectory) -> None:
        request_id = trajectory.request_id
        start = worker.starts.pop(request_id)
        self.requests.remove(request_id)
        original, number = copy_of(request_id)
        if number:
            trajectory = dataclasses.replace(trajectory, request_id=original)
        self._deliver(trajectory)
        self.handle(protocol.Finished(request_id, worker_id, start.chunk, trajectory.num_tokens))

    def _chunk_ended(self, worker_id: int, worker: _Worker, request_id: int, tokens: int) -> None:
        live = self.requests[request_id]
        live.generated_tokens = tokens
        ticket = self.requests.promise(request_id, worker_id)
        self._chunk_done(worker_id, worker, request_id, tokens)
        if live.ticket == ticket:  # it does not continue in its row
            worker.inbox.append(Take(request_id, ticket))

    def _chunk_done(self, worker_id: int, worker: _Worker, request_id: int, tokens: int) -> None:
        chunk = worker.starts.pop(request_id).chunk
        self.handle(protocol.ChunkDone(request_id, worker_id, chunk, tokens, pooled=True))

    # -- workers -----------------------------------------------------------------------------

    def _seat(self) -> None:
        """Join with workers of places that are ready; then lose those that have left theirs."""
        for i, place in enumerate(self.places):
            if i not in self._seated and place.is_ready:
                self._join(i, place)
        if self._seated:
            for worker_id in list(self._lost):
                del self._lost[worker_id]
                self._lose(worker_id)
        elif self.places and not any(place.may_return for place in self.places):
            names = ", ".join(place.name for place in self.places)
            gone = ProgramLost(f"no worker is there: {names} is given up")
            raise next(iter(self._lost.values()), gone)

    def _join(self, i: int, place: Place) -> None:
        worker_id, self._num_joined = self._num_joined, self._num_joined + 1
        place.join(self._limits)
        self._seated[i] = worker_id
        self._workers[worker_id] = worker = _Worker(place, place.where)
        if self._idle_work is not None:
            self._idle_work.joined(worker_id)
        self._note(worker, "joined")
        limits = self._limits
        self.handle(protocol.WorkerJoined(worker_id, limits.kv_tokens, limits.max_requests))
        early, self._early = self._early, []
        for submit in early:
            submit()

    def _call(self, worker_id: int, worker: _Worker) -> None:
        """Send a worker its commands, have it run on, or have it do idle work."""
        now_s, place = self._clock(), worker.place
        if worker.call is not None:
            if worker.inbox:
                place.nudge()
            return
        if worker.is_lost:
            return
        doing = "generating"
        if self.ends_s is not None:
            worker.is_leaving, doing = True, "ending"
            call: Future[Any] = place.leave(abort=self._aborts)
        elif worker.inbox or not worker.is_idle:
            if self._idle_work is not None:
                self._idle_work.busy(worker_id)
            commands, worker.inbox = worker.inbox, []
            call = place.call(commands)
        elif self._idle_work is not None and self._rolls and now_s >= worker.spare_s:
            call, doing = place.spare(self._idle_work, worker_id), "training the drafter"
        elif place.may_return and now_s - worker.called_s > BEAT_S:
            call = place.call(())
        else:
            return
        worker.call, worker.called_s, worker.doing = call, now_s, doing
        call.add_done_callback(lambda ended: self._later(partial(self._came, worker_id, ended)))

    @property
    def has_idle_workers(self) -> bool:
        return self._rolls and any(w.is_idle and w.call is None for w in self._workers.values())

    def _look_for_hung(self) -> None:
        now_s = self._clock()
        for worker_id, worker in list(self._workers.items()):
            limit_s, silent_s = worker.place.hang_limit_s, now_s - worker.called_s
            if self.ends_s is not None:
                limit_s = min(limit_s, LEAVING_S) if self._aborts else limit_s
                silent_s = min(silent_s, now_s - self.ends_s)
            if worker.call is not None and silent_s > limit_s:
                what = f"no sign of life for {silent_s:.1f} s, while {worker.doing}"
                self._fail(worker_id, Hang(what))

    def _fail(self, worker_id: int, cause: BaseException) -> None:
        """Replace a worker that raised or hangs, or raise its error."""
        worker = self._workers[worker_id]
        place, requests, hangs = worker.place, list(worker.starts), worker.call is not None
        error = WorkerError(worker_id, requests, cause)
        worker.call, worker.is_lost = None, True
        place.abandon()
        returns = isinstance(cause, ProgramLost) or (place.may_return and isinstance(cause, Hang))
        if self.ends_s is not None:
            del self._workers[worker_id]
            if not (returns or (self._can_restart and hangs)):
                self.error = self.error or error
            return
        i = next(i for i, seated in self._seated.items() if seated == worker_id)
        self._failures[i] += 1
        if not returns and (not self._can_restart or self._failures[i] > MAX_RESTARTS):
            raise error
        self._note(worker, _how_lost(cause), str(cause), len(requests))
        del self._seated[i]
        if self._idle_work is not None:
            self._idle_work.lost(worker_id, hangs=hangs)
        self._lost[worker_id] = error
        self._seat()  # its successor first, so that its requests have somewhere to go

    def _lose(self, worker_id: int) -> None:
        worker = self._workers.pop(worker_id)
        for number in list(worker.starts):
            if copy_of(number)[1]:  # it is not started again, and its number may be given again
                self.requests.remove(number)
        for waiting in self.requests.lose(worker_id):
            self._go_on(waiting)
        self.handle(protocol.WorkerLost(worker_id))

    def _profile(self) -> None:
        now_s = self._clock()
        if self._acceptance is None or now_s - self._profiled_s < PROFILE_S:
            return
        self._profiled_s = now_s
        known = {r: p for r, p in self._acceptance().items() if r in self.requests}
        self.handle(protocol.Profiled(known))

    def close(self, *, abort: bool) -> None:
        """No more requests will come; with `abort` those that run end without an answer."""
        if self.ends_s is not None:
            return
        self.ends_s, self._aborts, self._rolls = self._clock(), abort, False
        if self._idle_work is not None:
            self._idle_work.rollout_ended()
        self._workers = {w: worker for w, worker in self._workers.items() if not worker.is_lost}
        for worker in self._workers.values():
            worker.place.nudge()

    def _note(self, worker: _Worker, kind: Kind, why: str = "", requests: int = 0) -> None:
        own = worker.place.name, worker.where
        self.events.append(WorkerEvent(*own, kind, self._clock(), why, requests))


def _how_lost(cause: BaseException) -> Kind:
    if isinstance(cause, ProgramLost):
        return "hung" if cause.silent else "killed"
    return "hung" if isinstance(cause, Hang) else "raised"
