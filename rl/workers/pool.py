"""Places, which run workers and outlive them: `call(commands) → Future[Report]`.

`ThreadPlace` runs a worker in a thread, `rl.ray_workers.place.RayPlace` in an actor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec
from reprise.rl.workers.messages import Command, Report, WorkerLimits
from reprise.rl.workers.worker import RolloutWorker

T = TypeVar("T")
ROUNDS_S = 0.1  # a call without events returns after this time


class IdleWork(Protocol):
    """Work for workers without requests (`rl.drafter_training.spot_trainer`); thread-safe."""

    def rollout_began(self) -> None:
        """Record that requests are assigned, so that workers without requests are idle."""
        ...

    def rollout_ended(self) -> None:
        """Record that no worker is idle any more; return once no unit of work runs."""
        ...

    def joined(self, worker_id: int) -> None: ...

    def lost(self, worker_id: int, *, hangs: bool = False) -> None: ...

    def spare(self, worker_id: int, runner: Engine) -> bool:
        """Do one unit of work on the devices of an idle worker; return False without work."""
        ...

    def busy(self, worker_id: int) -> None:
        """Record that a worker, which may have been idle, has received a request."""
        ...

    def dismiss(self) -> None:
        """Record that the worker threads have stopped."""
        ...


class Place(Protocol):
    """The place of one worker. Futures of a lost worker fail, or never complete."""

    name: str
    may_return: bool  # a lost worker restarts by itself
    hang_limit_s: float  # of a call

    @property
    def where(self) -> str:
        """Return the devices of the worker."""
        ...

    @property
    def is_ready(self) -> bool: ...

    def announce(self, spec: RolloutSpec) -> None:
        """Prepare for a rollout that will be submitted; called by the session owner."""
        ...

    def join(self, limits: WorkerLimits) -> None:
        """Start the worker of a session."""
        ...

    def call(self, commands: Sequence[Command]) -> Future[Report]: ...

    def nudge(self) -> None:
        """Make a running call return after its current round."""
        ...

    def spare(self, work: IdleWork, worker_id: int) -> Future[bool]:
        """Do a unit of idle work on the devices of the worker."""
        ...

    def leave(self, *, abort: bool) -> Future[Any]:
        """Stop the worker of a session."""
        ...

    def abandon(self) -> None:
        """Give up a lost worker, without waiting for it."""
        ...


class DaemonThread:
    """A thread that calls functions in order; a hung call does not block program exit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, work))
        return future

    def end(self) -> None:
        """Stop the thread after the calls so far, without waiting."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del call, future, work  # a result may hold keys and values


class ThreadPlace:
    """A worker in a thread of this process, with the engine `engines[index]`.

    A hung thread cannot be stopped and keeps its engine; a new engine replaces it in `engines`.
    """

    may_return = False
    is_ready = True

    def __init__(self, engines: MutableSequence[Engine], index: int, hang_limit_s: float) -> None:
        self._engines = engines
        self._index = index
        self.hang_limit_s = hang_limit_s
        self.name = f"worker {self.engine.number}"

    @property
    def engine(self) -> Engine:
        return self._engines[self._index]

    @property
    def where(self) -> str:
        return self.engine.where

    def announce(self, spec: RolloutSpec) -> None:
        """Do nothing, since each worker places the weights itself."""

    def join(self, limits: WorkerLimits) -> None:
        self._worker = RolloutWorker(self.engine, limits)
        self._thread = DaemonThread(self.name.replace(" ", "-"))
        self._running: Future[Any] | None = None

    def call(self, commands: Sequence[Command]) -> Future[Report]:
        worker = self._worker
        worker.has_mail = False
        return self._submit(lambda: worker.step(commands, ROUNDS_S))

    def nudge(self) -> None:
        self._worker.has_mail = True

    def spare(self, work: IdleWork, worker_id: int) -> Future[bool]:
        engine = self.engine
        return self._submit(lambda: work.spare(worker_id, engine))

    def leave(self, *, abort: bool) -> Future[None]:
        worker = self._worker
        left = self._submit(lambda: worker.close(abort=abort))
        self._thread.end()
        return left

    def abandon(self) -> None:
        self._thread.end()
        if self._running is not None and not self._running.done():
            self._engines[self._index] = self.engine.abandoned()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        self._running = future = self._thread.submit(work)
        return future
