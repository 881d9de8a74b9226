"""The driver of the workers of a session, in one thread without locks (`rl.sessions.session`).

    event → scheduler.handle → actions → inboxes of workers → call → report → events

A worker is lost if its call raises or passes its deadline.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from reprise.rl.engine.engine import ChunkEnd
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.records.trajectory import PartialRequest, Request, Trajectory
from reprise.rl.records.worker_record import Kind, WorkerEvent, WorkerPart
from reprise.rl.runtime.waits import Hang, ProgramLost
from reprise.rl.sessions.request_table import LiveRequest, RequestTable
from reprise.rl.sessions.step_counts import StepCounts
from reprise.rl.workers import messages
from reprise.rl.workers.messages import Event, Report, Result, WorkerError, WorkerLimits
from reprise.rl.workers.pool import IdleWork, Place
from reprise.sched import protocol
from reprise.sched.protocol import Scheduler, Start
from reprise.sched.request import Kv, copy_of

MAX_RESTARTS = 3  # of one place in a session; a further restart would fail as well
PROFILE_S = 0.25  # between two reports of acceptance to the scheduler
BEAT_S = 2.0  # between two calls to an idle worker outside this process
SPARE_POLL_S = 0.005  # until idle work is looked for again, if there was none
LEAVING_S = 5.0  # for workers to stop, once a session is aborted


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker: its place and the number of the place, its active starts, and its pending call.

    A worker with an `error` is lost; the scheduler is notified once another worker is present.
    """

    place: Place
    seat: int
    where: str
    inbox: list[messages.Command] = dataclasses.field(default_factory=list)
    starts: dict[int, Start] = dataclasses.field(default_factory=dict)
    prepared: set[int] = dataclasses.field(default_factory=set)
    call: Future[Any] | None = None
    called_s: float = 0.0
    spare_s: float = 0.0  # earliest time to look for idle work again
    doing: str = ""  # for the message after a hang
    is_leaving: bool = False
    is_idle: bool = True
    error: WorkerError | None = None


class Driver:
    """Drives the workers of a session, from one thread, which also runs the calls given to `later`.

    `deliver` receives results.
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
        idle_work: IdleWork | None = None,
        acceptance: Callable[[], Mapping[int, float]] | None = None,
    ) -> None:
        self.places = places
        self._scheduler = scheduler
        self._limits = limits
        self._clock = clock
        self._deliver = deliver
        self._later = later
        self._can_restart = can_restart
        self._idle_work = idle_work
        self._acceptance = acceptance
        self._start_s = self._profiled_s = clock()
        self.requests = RequestTable(pool_bytes)
        self.counts = StepCounts()
        self._workers = dict[int, _Worker]()
        self._num_joined = 0
        self._failures: collections.Counter[int] = collections.Counter()  # by place
        self._specs: dict[int, RolloutSpec] = {}
        self.events: collections.deque[WorkerEvent] = collections.deque()
        self._early: list[Callable[[], None]] = []  # submissions before any worker has joined
        self._rolls = False  # True once requests are submitted: workers may do idle work
        self.ends_s: float | None = None  # when the session was closed
        self._aborts = False
        self.error: BaseException | None = None  # of a worker that failed after `close`

    def end(self) -> None:
        """Dismiss idle work, since no worker runs any more."""
        if self._idle_work is not None:
            self._idle_work.dismiss()

    @property
    def has_ended(self) -> bool:
        return self.ends_s is not None and not self._workers

    def begin_turn(self) -> None:
        """Add workers of ready places and report acceptance, before events are handled."""
        if self.ends_s is None:
            self._seat()
            self._profile()

    def end_turn(self) -> None:
        """Replace hung workers, and call the others."""
        for worker_id, worker in list(self._workers.items()):
            self._look_for_hang(worker_id, worker)
        for worker_id, worker in list(self._workers.items()):
            self._call(worker_id, worker)

    def submit(
        self,
        event: protocol.Submitted,
        spec: RolloutSpec | None,
        requests: Sequence[Request],
        oldest: int,
    ) -> None:
        """Submit requests of a step, with a new `spec` or the `spec` submitted before."""
        if self.places and not self._num_joined:  # schedulers divide a step among workers
            self._early.append(partial(self.submit, event, spec, requests, oldest))
            return
        self._specs = {s: known for s, known in self._specs.items() if s >= oldest}
        if spec is not None:
            self._specs[event.step] = spec
        self.counts.begin(event.step, oldest)
        for request in requests:
            self.requests.add(event.step, request)
        self.handle(event)
        if self._idle_work is not None:
            self._idle_work.rollout_began()
            self._rolls = True

    def handle(self, event: protocol.Event) -> None:
        """Pass an event to the scheduler, and carry out its actions."""
        if not self.places:
            return  # another process has the workers, and all requests
        for action in self._scheduler.handle(event, self._clock() - self._start_s):
            match action:
                case Start():
                    self._start(action)
                case protocol.Recall(worker_id):
                    self._workers[worker_id].inbox.append(messages.Release())
                case protocol.Defer(request_id):
                    self.requests[request_id].step += 1
                    self._deliver(messages.Deferred(request_id))
                case protocol.Return(request_id):
                    self._when_known(request_id, action)
                case protocol.Copy():
                    self._copy(action)
                case protocol.Drop():
                    self._drop(action)

    # -- actions -----------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        worker = self._workers[start.worker_id]
        worker.starts[start.request_id] = start
        if start.kv is Kv.HELD:
            self.requests.withdraw(self.requests[start.request_id])
            worker.inbox.append(messages.Extend(start.request_id, start.max_tokens))
        else:
            self._when_known(start.request_id, start)

    def _when_known(self, request_id: int, action: Start | protocol.Return) -> None:
        """Carry out an action once the state of its request is known."""
        live = self.requests[request_id]
        if live.ticket is not None:
            live.waiting.append(action)
        elif isinstance(action, Start):
            self._begin(live, action)
        else:
            self.requests.remove(request_id)
            self._deliver(messages.Returned(PartialRequest(live.request, live.prefix)))

    def _begin(self, live: LiveRequest, start: Start) -> None:
        worker = self._workers.get(start.worker_id)
        if worker is None or worker.error or worker.starts.get(start.request_id) != start:
            return  # the request was dropped, or starts on another worker
        if live.step not in worker.prepared:
            worker.prepared.add(live.step)
            spec = self._specs[live.step]
            oldest = min(self._specs)
            worker.inbox.append(messages.Prepare(live.step, spec, oldest))
        worker.inbox.append(messages.Begin(live.step, self.requests.start(live, start)))

    def _copy(self, action: protocol.Copy) -> None:
        """Request a copy of a running request, and start the copy on another worker."""
        original = self.requests[action.request_id]
        start = action.start
        request = dataclasses.replace(original.request, request_id=start.request_id)
        self.requests.add(original.step, request)
        ticket = self.requests.promise(start.request_id, action.worker_id)
        self._workers[action.worker_id].inbox.append(messages.Fork(action.request_id, ticket))
        self._start(start)

    def _drop(self, action: protocol.Drop) -> None:
        worker = self._workers[action.worker_id]
        worker.starts.pop(action.request_id, None)
        worker.inbox.append(messages.Remove(action.request_id))
        self.requests.remove(action.request_id)

    # -- reports -----------------------------------------------------------------------------

    def _came(self, worker_id: int, call: Future[Any]) -> None:
        """Handle a completed call of a worker."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.call is not call:
            return  # the worker was lost before the call returned
        worker.call = None
        if (error := call.exception()) is not None:
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
            span = worker.called_s, max(worker.called_s, self._clock())
            part = WorkerPart(worker.place.name, worker.where, spec.policy_version, (span,))
            self.counts.add(report.step, report.stats, part)
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
            case messages.Left(ticket, state):
                for action in self.requests.redeem(ticket, state):
                    self._when_known(action.request_id, action)
            case messages.Released(states):
                for state in states:
                    request_id = state.request.request_id
                    if self._is_in_force(worker, request_id):
                        live = self.requests[request_id]
                        self.requests.keep(live, state)
                        # tokens that a lost worker had reported are generated again later
                        tokens = max(state.num_tokens, live.generated_tokens)
                        self._chunk_done(worker_id, worker, request_id, tokens)

    def _is_in_force(self, worker: _Worker, request_id: int) -> bool:
        """Return False for a dropped request, since its id may have been reused."""
        return request_id in worker.starts and messages.Remove(request_id) not in worker.inbox

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
        ticket = self.requests.promise(request_id, worker_id)
        live = self._chunk_done(worker_id, worker, request_id, tokens)
        if live.ticket == ticket:  # the request does not continue in its row
            worker.inbox.append(messages.Take(request_id, ticket))

    def _chunk_done(
        self, worker_id: int, worker: _Worker, request_id: int, tokens: int
    ) -> LiveRequest:
        live = self.requests[request_id]
        chunk = worker.starts.pop(request_id).chunk
        live.generated_tokens = tokens
        self.handle(protocol.ChunkDone(request_id, worker_id, chunk, tokens, pooled=True))
        return live

    # -- workers -----------------------------------------------------------------------------

    def _seat(self) -> None:
        """Add workers of ready places, then remove lost workers."""
        taken = {worker.seat for worker in self._workers.values() if not worker.error}
        for seat, place in enumerate(self.places):
            if seat not in taken and place.is_ready:
                self._join(seat, place)
        lost = {w: worker.error for w, worker in self._workers.items() if worker.error}
        if len(lost) < len(self._workers):
            for worker_id in lost:
                self._lose(worker_id)
        elif self.places and not any(place.may_return for place in self.places):
            names = ", ".join(place.name for place in self.places)
            gone = ProgramLost(f"no worker is there: {names} is given up")
            raise next(iter(lost.values()), gone)

    def _join(self, seat: int, place: Place) -> None:
        worker_id = self._num_joined
        self._num_joined = self._num_joined + 1
        place.join(self._limits)
        self._workers[worker_id] = worker = _Worker(place, seat, place.where)
        if self._idle_work is not None:
            self._idle_work.joined(worker_id)
        self._note(worker, "joined")
        self.handle(
            protocol.WorkerJoined(worker_id, self._limits.kv_tokens, self._limits.max_requests)
        )
        while self._early:
            self._early.pop(0)()

    def _call(self, worker_id: int, worker: _Worker) -> None:
        """Send a worker its commands, or let it continue, or give it idle work."""
        now_s = self._clock()
        place = worker.place
        if worker.call is not None:
            if worker.inbox:
                place.nudge()
            return
        if worker.error:
            return
        doing = "generating"
        if self.ends_s is not None:
            doing = "ending"
            worker.is_leaving = True
            call: Future[Any] = place.leave(abort=self._aborts)
        elif worker.inbox or not worker.is_idle:
            if self._idle_work is not None:
                self._idle_work.busy(worker_id)
            commands = worker.inbox
            worker.inbox = []
            call = place.call(commands)
        elif self._idle_work is not None and self._rolls and now_s >= worker.spare_s:
            call = place.spare(self._idle_work, worker_id)
            doing = "training the drafter"
        elif place.may_return and now_s - worker.called_s > BEAT_S:
            call = place.call(())
        else:
            return
        worker.call = call
        worker.called_s = now_s
        worker.doing = doing
        call.add_done_callback(lambda ended: self._later(partial(self._came, worker_id, ended)))

    @property
    def has_idle_workers(self) -> bool:
        return self._rolls and any(w.is_idle and w.call is None for w in self._workers.values())

    def _look_for_hang(self, worker_id: int, worker: _Worker) -> None:
        now_s = self._clock()
        limit_s = worker.place.hang_limit_s
        silent_s = now_s - worker.called_s
        if self.ends_s is not None:
            limit_s = min(limit_s, LEAVING_S) if self._aborts else limit_s
            silent_s = min(silent_s, now_s - self.ends_s)
        if worker.call is not None and silent_s > limit_s:
            what = f"no sign of life for {silent_s:.1f} s, while {worker.doing}"
            self._fail(worker_id, Hang(what))

    def _fail(self, worker_id: int, cause: BaseException) -> None:
        """Replace a worker that raised or hangs, or raise its error."""
        worker = self._workers[worker_id]
        hangs = worker.call is not None
        may_return = worker.place.may_return
        returns = isinstance(cause, ProgramLost) or (may_return and isinstance(cause, Hang))
        worker.error = error = WorkerError(worker_id, list(worker.starts), cause)
        worker.call = None
        worker.place.abandon()
        if self.ends_s is not None:
            del self._workers[worker_id]
            if not (returns or (self._can_restart and hangs)):
                self.error = self.error or error
            return
        self._failures[worker.seat] += 1
        if not returns and (not self._can_restart or self._failures[worker.seat] > MAX_RESTARTS):
            raise error
        self._note(worker, error.kind, str(cause), len(worker.starts))
        if self._idle_work is not None:
            self._idle_work.lost(worker_id, hangs=hangs)
        self._seat()  # the replacement joins first, so that requests have a destination

    def _lose(self, worker_id: int) -> None:
        worker = self._workers.pop(worker_id)
        for number in list(worker.starts):
            if copy_of(number)[1]:  # a copy is not restarted, and its id may be reused
                self.requests.remove(number)
        for action in self.requests.lose(worker_id):
            self._when_known(action.request_id, action)
        self.handle(protocol.WorkerLost(worker_id))

    def _profile(self) -> None:
        now_s = self._clock()
        if self._acceptance is not None and now_s - self._profiled_s >= PROFILE_S:
            self._profiled_s = now_s
            known = {r: p for r, p in self._acceptance().items() if r in self.requests}
            self.handle(protocol.Profiled(known))

    def close(self, *, abort: bool) -> None:
        """Accept no more requests; with `abort`, stop running requests without responses."""
        if self.ends_s is not None:
            return
        self.ends_s = self._clock()
        self._aborts = abort
        self._rolls = False
        if self._idle_work is not None:
            self._idle_work.rollout_ended()
        self._workers = {w: worker for w, worker in self._workers.items() if not worker.error}
        for worker in self._workers.values():
            worker.place.nudge()

    def _note(self, worker: _Worker, kind: Kind, why: str = "", requests: int = 0) -> None:
        now_s = self._clock()
        name = worker.place.name
        self.events.append(WorkerEvent(name, worker.where, kind, now_s, why, requests))
