"""The coordinator of workers: tells the scheduler what happens, and carries out its actions.

scheduler ← events ← coordinator → starts → inbox of a worker → engine
                                 ↑                              │ chunk ended: resume here, or
                                 └─ finished, chunk done ───────┘ leave to the pool
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from rl.runtime.waits import Hang
from rl.trajectory import PartialRequest, Prefix, Request, Trajectory
from rl.workers.host_kv_pool import KvPool
from rl.workers.messages import (
    LET_GO,
    Aborted,
    Deferred,
    Inbox,
    Result,
    Returned,
    WorkerError,
)
from sched.protocol import (
    Action,
    ChunkDone,
    Copy,
    Defer,
    Drop,
    Event,
    Finished,
    Profiled,
    Recall,
    Recalled,
    Return,
    Scheduler,
    SchedulerDecision,
    Start,
    Submitted,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from sched.request import Kv, RequestSpec, copy_of
from spec.config import SamplingConfig

# A sign of life: when; doing what, None where it waits for a request; the worker whose keys and
# values it waits for. It is replaced as a whole, so that nobody needs the lock for it.
_Sign = tuple[float, str | None, int | None]


@dataclasses.dataclass(eq=False, slots=True)
class _Asked:
    """A request that has not finished: its step, its tokens when last started, and as reported."""

    step: int
    request: Request
    prefix: Prefix | None = None
    generated_tokens: int = 0


@dataclasses.dataclass(eq=False)
class _Present:
    """A worker that has joined: its inbox, its starts in force, and its last sign of life."""

    inbox: Inbox
    sign: _Sign
    step: int = 0  # that its engine runs
    starts: dict[int, Start] = dataclasses.field(default_factory=dict)  # by request
    given_up: bool = False  # the owner has been told that it hangs


class Coordinator:
    """Passes events to the scheduler and its actions to workers; any thread may call it.

    An event, the scheduler's answer and the state here change under one lock: other threads see
    all three or none of them. Reports of a worker that is lost raise Aborted in its thread and
    change nothing; its requests are with other workers by then.

    Beside what the scheduler does, a report takes O(1) and a lost worker O(workers). Signs of
    life take no lock. What is kept is of requests that have not finished and workers that are
    present, and with `keeps_decisions` all decisions. Workers that wait for a request end with
    Hang once the owner has called nothing for `owner_limit_s`.
    """

    make_inbox: Callable[[], Inbox] = queue.SimpleQueue  # workers on a virtual clock have others

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        pool: KvPool,
        keeps_decisions: bool = False,
        owner_limit_s: float = math.inf,
    ) -> None:
        self._keeps_decisions, self._owner_limit_s = keeps_decisions, owner_limit_s
        self._scheduler, self._clock, self._pool = scheduler, clock, pool
        self._lock = threading.Lock()
        self._began_s = self._owner_s = self._all_alive_s = clock()
        self._asked: dict[int, _Asked] = {}
        self._workers: dict[int, _Present] = {}
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.decisions: list[SchedulerDecision] = []
        self._closed = self._aborted = False

    # -- called by the owner -----------------------------------------------------------

    def submit(
        self,
        step: int,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        past_tokens: Mapping[int, tuple[int, ...]],
        *,
        urgent: bool = False,
        ahead: bool = False,
    ) -> None:
        """Submit all requests of a step, or `urgent` ones that an earlier step waits for, or
        those that may begin `ahead` of their step.

        `past_tokens` are the lengths of last epoch's responses, by group.
        """
        asks = tuple(
            RequestSpec(
                r.request_id,
                r.group_id,
                len(r.prompt_ids),
                r.limit(sampling),
                past_tokens=past_tokens.get(r.group_id, ()),
                step=step,
                prefix_tokens=_prefix_tokens(r),
                urgent=urgent,
                ahead=ahead,
            )
            for r in requests
        )
        asked = {r.request_id: _Asked(step, r) for r in requests}
        self._owner_s = self._clock()
        with self._lock:
            self._asked.update(asked)
            self._tell(Submitted(asks, step))

    def trained(self, step: int, train_s: float | None = None) -> None:
        """Tell the scheduler that the update of a step is done, and how long it took."""
        with self._lock:
            self._tell(Trained(step, train_s))

    def profiled(self, acceptance: Mapping[int, float]) -> None:
        """Tell the scheduler the acceptance of requests' draft tokens."""
        with self._lock:
            self._tell(Profiled({r: p for r, p in acceptance.items() if r in self._asked}))

    def recall(self) -> None:
        """Have what was begun ahead returned: each request as a result, whole or `Returned`."""
        with self._lock:
            self._tell(Recalled())

    def returned(self, request_id: int) -> PartialRequest:
        """Remove and return a request that is `Returned`, as far as it has come."""

        def waits_for(worker_id: int) -> bool:
            self._owner_s = self._clock()
            return True

        pooled = self._pool.take(request_id, waits_for)
        with self._lock:
            asked = self._asked.pop(request_id)
        return pooled or PartialRequest(asked.request, asked.prefix)

    def join(self, worker_id: int, kv_tokens: int, max_requests: int) -> Inbox:
        """Add a worker; return the inbox that its starts come into."""
        with self._lock:
            inbox = self.make_inbox()
            self._workers[worker_id] = _Present(inbox, (self._clock(), None, None))
            if self._closed:
                inbox.put(None)
            self._tell(WorkerJoined(worker_id, kv_tokens, max_requests))
        return inbox

    def lose(self, worker_id: int) -> None:
        """Remove a worker; its requests resume elsewhere from their last chunks."""
        with self._lock:
            lost = self._workers.pop(worker_id)
            lost.inbox.put(None)
            for number in (n for n in lost.starts if copy_of(n)[1]):
                del self._asked[number]  # it is not started again; another one may have its number
                self._pool.discard(number)
            self._pool.withdraw_all(worker_id)
            for worker in self._workers.values():
                _, doing, waits_for = worker.sign
                if waits_for == worker_id:  # no longer: its time begins anew
                    worker.sign = self._clock(), doing, waits_for
            self._tell(WorkerLost(worker_id))

    def is_present(self, worker_id: int) -> bool:
        """Return True if a worker has joined and is not lost."""
        return worker_id in self._workers

    def next_result(self, timeout_s: float) -> Result | None:
        """Return the next result of a worker; None if there is none for `timeout_s`."""
        self._owner_s = self._clock()
        try:
            return self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self._owner_s = self._clock()

    def hung(self, limit_s: float, among: Collection[int] | None = None) -> WorkerError | None:
        """Return an error for a worker without a sign of life for `limit_s` while it had work.

        Once for each. After `close` any worker of `among` counts, those whose threads have not
        ended. Workers are looked at only where one of them can have been silent for so long: about
        once in `limit_s`.
        """
        now_s = self._clock()
        if now_s - self._all_alive_s <= limit_s:
            return None
        with self._lock:
            oldest_s = now_s
            for worker_id, worker in self._workers.items():
                alive_s, doing, waits_for = worker.sign
                counts = among is None or worker_id in among
                if worker.given_up or not counts or not (self._closed or doing is not None):
                    continue
                other = None if waits_for is None else self._workers.get(waits_for)
                blames = other is not None and other.sign[1] and other.sign[2] is None
                if now_s - alive_s > limit_s and (self._closed or not blames):
                    worker.given_up = True
                    what = f"no sign of life for {now_s - alive_s:.1f} s, while {doing or 'ending'}"
                    return WorkerError(worker_id, list(worker.starts), Hang(what))
                oldest_s = min(oldest_s, alive_s)
            self._all_alive_s = oldest_s
        return None

    def close(self, *, abort: bool = False) -> None:
        """No more requests will come; with `abort` running ones end too."""
        with self._lock:
            self._closed, self._aborted = True, abort
            for worker in self._workers.values():
                worker.inbox.put(None)
                worker.sign = self._clock(), *worker.sign[1:]  # time to end
                worker.given_up = False

    def forget(self, worker_id: int) -> None:
        """After `close`: ignore a worker that does not end."""
        with self._lock:
            del self._workers[worker_id]
            self._pool.withdraw_all(worker_id)

    # -- called by workers -------------------------------------------------------------

    def alive(self, worker_id: int, doing: str | None = "generating") -> None:
        """Note a sign of life; with `doing` None the worker waits for a request.

        Raises Aborted in a worker's thread once the rollout is aborted, or this worker is lost,
        and Hang where it waits and the owner shows no sign of life itself.
        """
        self._alive(worker_id, doing)
        if doing is None and (silent_s := self._clock() - self._owner_s) > self._owner_limit_s:
            raise Hang(f"worker {worker_id} waits for requests: nothing asked for {silent_s:.1f} s")

    def begin_step(self, worker_id: int, step: int) -> None:
        """Note that a worker's reports are of a rollout of this step from now on."""
        with self._lock:
            self._alive(worker_id, "generating").step = step

    def chunk(self, worker_id: int, start: Start) -> PartialRequest | None:
        """Return the request that a worker is to start; None if it was dropped meanwhile."""
        request_id = start.request_id
        pooled = self._pool.take(request_id, lambda owner: self._waits_for(worker_id, owner, start))
        with self._lock:
            if not self._is_in_force(self._alive(worker_id, "generating"), start):
                return None
            asked = self._asked[request_id]
            if pooled is not None:
                asked.prefix = pooled.prefix
            prefix = asked.prefix
            known_tokens = 0 if prefix is None else len(prefix.response_ids)
            # what a lost worker had reported and not handed over is generated again
            again = asked.generated_tokens - known_tokens
        kv = pooled.kv if pooled is not None and start.kv is Kv.POOL else None
        return PartialRequest(asked.request, prefix, kv, start.max_tokens + again)

    def finished(self, worker_id: int, trajectory: Trajectory) -> None:
        """Report a request's whole trajectory."""
        request_id = trajectory.request_id
        with self._lock:
            worker = self._alive(worker_id, "generating")
            if self._was_dropped(worker, request_id):
                return  # a copy was first
            start = worker.starts.pop(request_id)
            del self._asked[request_id]
            original, number = copy_of(request_id)
            if number:
                trajectory = dataclasses.replace(trajectory, request_id=original)
            # first: whatever becomes of the others, this one is done
            self._results.put(trajectory)
            self._tell(Finished(request_id, worker_id, start.chunk, trajectory.num_tokens))

    def chunk_ended(self, worker_id: int, request_id: int, response_tokens: int) -> int:
        """Return how many more tokens the request may have where it is; at 0 it must leave."""
        with self._lock:
            worker = self._alive(worker_id, "generating")
            if self._was_dropped(worker, request_id):
                return 0
            # before others can be told to take it
            self._pool.promise(request_id, worker_id)
            chunk = worker.starts.pop(request_id).chunk
            self._asked[request_id].generated_tokens = response_tokens
            for action in self._tell(
                ChunkDone(request_id, worker_id, chunk, response_tokens, pooled=True)
            ):
                if isinstance(action, Start) and action.kv is Kv.HELD:
                    self._pool.withdraw(request_id, worker_id)
                    return action.max_tokens
        return 0

    def copied(self, worker_id: int, number: int, partial: PartialRequest | None) -> None:
        """Hand the copy of a request over to whoever is to start it; None: it does not run here."""
        with self._lock:
            is_late = self._is_late(self._alive(worker_id, "handing over requests"), number)
        if partial is None:
            self._pool.give_up(number, worker_id)
        elif not is_late:
            request = dataclasses.replace(partial.request, request_id=number)
            self._pool.put(dataclasses.replace(partial, request=request), worker_id)

    def park(self, worker_id: int, leaving: Sequence[PartialRequest]) -> None:
        """Put requests that leave a worker, with their keys and values, into the pool."""
        self.alive(worker_id, "handing over requests")
        for partial in leaving:
            self._pool.put(partial, worker_id)

    def failed(self, worker_id: int, error: BaseException) -> None:
        """Report that a worker's thread is about to end with `error`."""
        with self._lock:
            if (worker := self._workers.get(worker_id)) is not None:
                self._pool.withdraw_all(worker_id)
                self._results.put(WorkerError(worker_id, list(worker.starts), error))

    # -- inside ---------------------------------------------------------------

    def _alive(self, worker_id: int, doing: str | None) -> _Present:
        worker = self._workers.get(worker_id)
        if self._aborted or worker is None:
            raise Aborted
        worker.sign = self._clock(), doing, None
        return worker

    def _was_dropped(self, worker: _Present, request_id: int) -> bool:
        """Return True if a request that a worker has, or had, was dropped."""
        return request_id not in worker.starts or self._is_late(worker, request_id)

    def _is_late(self, worker: _Present, request_id: int) -> bool:
        """Return True if a later step than the one that a worker runs has this number now."""
        asked = self._asked.get(request_id)
        return asked is not None and asked.step > worker.step

    def _is_in_force(self, worker: _Present, start: Start) -> bool:
        request_id = start.request_id
        return not self._was_dropped(worker, request_id) and worker.starts[request_id] == start

    def _waits_for(self, worker_id: int, owner: int, start: Start) -> bool:
        """Return whether a worker is still to wait for another's copy, as alive as that one.

        A copy's number may have been given again after a drop, to be handed over by this worker.
        """
        with self._lock:
            if self._aborted or worker_id not in self._workers:
                raise Aborted
            worker = self._workers[worker_id]
            if (other := self._workers.get(owner)) is not None:
                alive_s = max(worker.sign[0], other.sign[0])
                what = f"waiting for keys and values from worker {owner}"
                worker.sign = alive_s, what, owner
            return self._is_in_force(worker, start)

    def _tell(self, event: Event) -> Sequence[Action]:
        now_s = self._clock() - self._began_s
        actions = self._scheduler.handle(event, now_s)
        if self._keeps_decisions:
            self.decisions.append(SchedulerDecision(now_s, event, tuple(actions)))
        asked, workers, held = self._asked, self._workers, Kv.HELD
        for action in actions:
            if isinstance(action, Recall):
                workers[action.worker_id].inbox.put(LET_GO)
                continue
            request_id = action.request_id
            if isinstance(action, Defer):
                asked[request_id].step += 1
                self._results.put(Deferred(request_id))
                continue
            if isinstance(action, Return):
                self._results.put(Returned(request_id))
                continue
            worker = workers[action.worker_id]
            if isinstance(action, Copy):
                self._copy(action)
                continue
            if isinstance(action, Drop):
                self._drop(action)
                continue
            worker.starts[request_id] = action
            if action.kv is not held:
                worker.inbox.put((asked[request_id].step, action))
        return actions

    def _copy(self, action: Copy) -> None:
        """Have a worker hand over a copy of a request, and another one start it."""
        asked, start = self._asked[action.request_id], action.start
        request = dataclasses.replace(asked.request, request_id=start.request_id)
        self._asked[start.request_id] = _Asked(asked.step, request)
        self._pool.promise(start.request_id, action.worker_id)
        self._workers[action.worker_id].inbox.put((asked.step, action))
        worker = self._workers[start.worker_id]
        worker.starts[start.request_id] = start
        worker.inbox.put((asked.step, start))

    def _drop(self, action: Drop) -> None:
        """Forget a request, or a copy, and have the worker that runs it end it."""
        worker, asked = self._workers[action.worker_id], self._asked.pop(action.request_id)
        worker.starts.pop(action.request_id, None)
        self._pool.discard(action.request_id)
        worker.inbox.put((asked.step, action))


def _prefix_tokens(request: Request) -> int:
    """Return how many tokens a request's first start may add at once."""
    cached = 0 if request.cached is None else len(request.cached.tokens)
    known = max(cached, len(request.begun))
    return known + 1 if known else 0
