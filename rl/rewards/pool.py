"""Scoring in worker processes.

If a scorer raises, hangs, dies or returns nonsense, only its sample loses its reward, by
`RewardConfig.on_failure`; the failure is counted, and the worker is replaced if needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from reprise.rl.rewards.config import ENVIRONMENT, RewardConfig, validate
from reprise.rl.rewards.process import RewardWorkerError, WorkerProcess, WorkerStopped
from reprise.rl.rewards.scores import (
    MARGIN_S,
    MAX_ATTEMPTS,
    Outcomes,
    Rewards,
)

T = TypeVar("T")
STARTUP_S = 120.0  # of a worker, imports included


class RewardPool(Rewards):
    """Worker processes that share a queue, each with a thread. Use as a context manager."""

    def __init__(
        self, config: RewardConfig, tasks: Sequence[str] = (), startup_s: float = STARTUP_S
    ) -> None:
        """Raise the errors of `validate(config)` before any process is started.

        Each worker opens `tasks` (specs) when it starts, within `startup_s`, imports included.
        """
        validate(config)
        super().__init__(config, sample_limit_s(config, startup_s))
        self._tasks = tuple(tasks)
        self._startup_s = startup_s
        # A job, its number of responses, its future, and a function that makes its result.
        self._queue = queue.SimpleQueue[
            tuple[bytes, int, Future[Any], Callable[[list[Outcomes]], Any]] | None
        ]()
        self._workers: dict[int, WorkerProcess] = {}  # by slot
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._closed = False

    def start(self) -> None:
        scores_here = self.config.functions != (ENVIRONMENT,)  # else environments give all rewards
        self._started = [Future() for _ in range(self.config.workers if scores_here else 0)]
        for slot, started in enumerate(self._started):
            thread = threading.Thread(
                target=self._serve, args=(slot, started), name=f"reward-{slot}", daemon=True
            )
            with self._lock:
                if self._closed:
                    return
                thread.start()
                self._threads.append(thread)

    def wait_started(self) -> None:
        try:
            for started in self._started:
                started.result(self._startup_s + MARGIN_S)
        except BaseException as error:
            self.close()
            if not isinstance(error, TimeoutError):
                raise
            limit_s = self._startup_s + MARGIN_S
            text = f"a reward worker did not start within {limit_s:.0f} s"
            raise RewardWorkerError(text) from None

    def outcomes(self, body: bytes, size: int) -> Future[list[Outcomes]]:
        """Queue a `job_body`; another program combines and counts the outcomes."""
        return self._send(body, size, lambda outcomes: outcomes)

    def _send(self, body: bytes, size: int, finish: Callable[[list[Outcomes]], T]) -> Future[T]:
        future = Future[T]()
        with self._lock:
            if self._closed or not self._threads:
                raise RuntimeError("the reward pool is not open: use `with RewardPool(...)`")
            self._queue.put((body, size, future, finish))
        return future

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._queue.get_nowait()) is not None:
                    item[2].cancel()
        for _ in self._threads:
            self._queue.put(None)
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join(MARGIN_S)  # the threads are daemons

    # --- in the thread of a worker ----------------------------------------------------------

    def _serve(self, slot: int, started: Future[None]) -> None:
        """Start, feed and replace the worker of a slot until the pool closes."""
        try:
            self._start(slot)
        except BaseException as error:
            self._stop(slot)
            started.set_exception(error)
            return
        started.set_result(None)
        while (item := self._queue.get()) is not None:
            body, size, future, finish = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = finish(self._score(slot, body, size))
            except BaseException as error:  # for the caller
                future.set_exception(error)
            else:
                future.set_result(result)
            self._answered_s = time.monotonic()
            self._refill(slot)
        self._stop(slot)

    def _start(self, slot: int) -> None:
        worker = WorkerProcess(self.config, self._tasks, self._startup_s)
        with self._lock:
            self._workers[slot] = worker
            if self._closed:
                worker.kill()  # `close` missed this worker
        worker.wait_ready()

    def _stop(self, slot: int) -> None:
        """Stop the worker of a slot. Raises nothing: later samples get the error."""
        with self._lock:
            worker = self._workers.pop(slot, None)
        try:
            if worker is not None:
                worker.dispose()
        except Exception as error:
            self._fail(RewardWorkerError(f"a reward worker could not be ended: {error!r}"))

    def _refill(self, slot: int) -> None:
        """Start a worker in an empty slot. Raises nothing: later samples get the error."""
        if slot in self._workers or self._closed or self._error is not None:
            return
        try:
            self._start(slot)
        except BaseException as error:
            self._stop(slot)
            self._fail(RewardWorkerError(f"a reward worker could not be replaced: {error}"))

    def _fail(self, error: RewardWorkerError) -> RewardWorkerError:
        """Keep the first error, which all later samples raise."""
        with self._lock:
            self._error = self._error or error
        return error

    def _score(self, slot: int, job: bytes, size: int) -> list[Outcomes]:
        stopped: WorkerStopped | None = None
        for _ in range(MAX_ATTEMPTS):
            self._refill(slot)
            if self._closed:
                raise RuntimeError("the reward pool was closed before this sample was scored")
            if self._error is not None:
                raise self._error
            try:
                return self._workers[slot].score(job, size)
            except RewardWorkerError as error:
                raise self._fail(error) from error.__cause__
            except WorkerStopped as error:
                stopped = error
                self._stop(slot)
                if stopped.function is not None and not self._closed:
                    message = stopped.message
                    if stopped.kind == "deadline":
                        limit_s = self.config.deadline_s
                        message = f"no result within Reward.deadline_s={limit_s}; killed"
                    outcomes: Outcomes = [[None, None, None] for _ in self.config.names]
                    outcomes[stopped.function] = [None, stopped.kind, message]
                    return [outcomes] * size
        text = (
            f"{MAX_ATTEMPTS} reward workers ended before they could start on one sample (the "
            f"last: {stopped}): does its task need more than Reward.memory_limit_mib?"
        )
        raise self._fail(RewardWorkerError(text))


def sample_limit_s(config: RewardConfig, startup_s: float = STARTUP_S) -> float:
    """Return the sum of all limits of one sample."""
    return MAX_ATTEMPTS * (2 * startup_s + max(config.deadline_s, MARGIN_S) + MARGIN_S)
