"""Scoring in worker processes: `submit` returns at once, and every future is answered.

A future gets a score or an error that names the mend, or is cancelled by `close`. A scorer that
raises, hangs, dies or answers nonsense costs its one sample a reward by `RewardConfig.on_failure`,
is counted, and its worker is replaced where needed. One job is one sample: functions are called
with lists of length one.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rl.rewards.config import RewardConfig, validate
from rl.rewards.process import RewardWorkerError, WorkerProcess, WorkerStopped
from rl.rewards.scores import (
    MARGIN_S,
    MOST_ATTEMPTS,
    Outcomes,
    Rewards,
    Score,
    ScoreJob,
    example_json,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    """A sample in the queue; `finish` makes the future's result of its outcomes."""

    body: bytes
    future: Future[Any]
    finish: Callable[[Outcomes], Any]


class RewardPool(Rewards):
    """Worker processes behind a queue. Use as a context manager."""

    def __init__(
        self, config: RewardConfig, tasks: Sequence[str] = (), startup_s: float = 120.0
    ) -> None:
        """Raises what `validate(config)` raises, before any process is started.

        `tasks` (specs) are opened by each worker when it starts instead of at the first
        sample; `startup_s` limits that, imports included.
        """
        validate(config)
        limits = 2 * startup_s + max(config.deadline_s, MARGIN_S) + MARGIN_S
        super().__init__(config, MOST_ATTEMPTS * limits)
        self._tasks, self._startup_s = tuple(tasks), startup_s
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._workers: dict[int, WorkerProcess] = {}
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._closed = False

    def start(self) -> None:
        """Start the workers without waiting for them; `wait_started` or `close` must follow."""
        self._started = [Future() for _ in range(self.config.workers)]
        for slot, ready in enumerate(self._started):
            thread = threading.Thread(
                target=self._supervise, args=(slot, ready), name=f"reward-{slot}", daemon=True
            )
            with self._lock:  # what is closed meanwhile waits for those that are there
                if self._closed:
                    return
                thread.start()
                self._threads.append(thread)

    def wait_started(self) -> None:
        """Wait for the workers; raises what `__enter__` does, and the pool is closed then."""
        try:
            for ready in self._started:
                ready.result(self._startup_s + MARGIN_S)
        except TimeoutError:
            self.close()
            raise RewardWorkerError(
                f"a reward worker did not start within {self._startup_s + MARGIN_S:.0f} s"
            ) from None
        except BaseException:
            self.close()
            raise

    def submit(self, job: ScoreJob) -> Future[Score]:
        """Queue a sample; returns at once.

        Raises RuntimeError on a closed pool, TypeError for columns that are not JSON.
        The future raises RewardWorkerError where workers can no longer be started.
        """
        return self._put(job, self._to_score)

    def outcomes(self, job: ScoreJob) -> Future[Outcomes]:
        """As `submit`, for a program whose outcomes are combined and counted by another one."""
        return self._put(job, lambda outcomes: outcomes)

    def _put(self, job: ScoreJob, finish: Callable[[Outcomes], T]) -> Future[T]:
        body = _job_body(job)
        future: Future[T] = Future()
        with self._lock:
            if self._closed or not self._threads:
                raise RuntimeError(
                    "the reward pool is not open: use `with RewardPool(...) as pool`"
                )
            self._queue.put(_Waiting(body, future, finish))
        return future

    def close(self) -> None:
        """Kill the workers and cancel queued samples; the ones being scored raise RuntimeError."""
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        self._drain()
        for _ in self._threads:
            self._queue.put(None)
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join(MARGIN_S)  # all of them are daemons

    def _drain(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item.future.cancel()

    def _supervise(self, slot: int, ready: Future[None]) -> None:
        """Start, feed and replace the worker of `slot`, in a thread that only `close` ends."""
        try:
            self._start(slot)
        except BaseException as error:
            self._stop(slot)
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (item := self._queue.get()) is not None:
            if not item.future.set_running_or_notify_cancel():
                continue
            try:
                result = item.finish(self._ask(slot, item.body))
            except BaseException as error:  # for the caller
                item.future.set_exception(error)
            else:
                item.future.set_result(result)
            self._answered_s = time.monotonic()
            self._refill(slot)
        self._stop(slot)

    def _start(self, slot: int) -> None:
        worker = WorkerProcess(self.config, self._tasks, self._startup_s)
        with self._lock:
            self._workers[slot] = worker
            if self._closed:
                worker.kill()  # close() has come and gone
        worker.wait_ready()

    def _stop(self, slot: int) -> None:
        """End the worker of `slot`. Raises nothing: one that cannot be ended is left behind."""
        with self._lock:
            worker = self._workers.pop(slot, None)
        try:
            if worker is not None:
                worker.dispose()
        except Exception as error:
            self._fail(RewardWorkerError(f"a reward worker could not be ended: {error!r}"))

    def _refill(self, slot: int) -> None:
        """Start a worker where there is none. Raises nothing: later samples get the error."""
        if slot in self._workers or self._closed or self._error is not None:
            return
        try:
            self._start(slot)
        except BaseException as error:
            self._stop(slot)
            self._fail(RewardWorkerError(f"a reward worker could not be replaced: {error}"))

    def _fail(self, error: RewardWorkerError) -> None:
        with self._lock:
            self._error = self._error or error

    def _ask(self, slot: int, job: bytes) -> Outcomes:
        stopped: WorkerStopped | None = None
        for _ in range(MOST_ATTEMPTS):
            self._refill(slot)
            if self._closed:
                raise RuntimeError("the reward pool was closed before this sample was scored")
            if self._error is not None:
                raise self._error
            try:
                return self._workers[slot].ask(job)
            except RewardWorkerError as error:
                self._fail(error)
                raise
            except WorkerStopped as error:
                stopped = error
                self._stop(slot)
                if stopped.function is not None and not self._closed:
                    return self._stopped_outcomes(stopped)
        unstartable = RewardWorkerError(
            f"{MOST_ATTEMPTS} reward workers ended before they could start on one sample (the "
            f"last: {stopped}): does opening its task need more memory or time than "
            "Reward.memory_limit_mib allows?"
        )
        self._fail(unstartable)
        raise unstartable

    def _stopped_outcomes(self, stopped: WorkerStopped) -> Outcomes:
        message = stopped.message
        if stopped.kind == "deadline":
            message = f"no result within Reward.deadline_s={self.config.deadline_s}; killed"
        outcomes: Outcomes = [[None, None, None] for _ in self.config.names]
        outcomes[stopped.function or 0] = [None, stopped.kind, message]
        return outcomes


def _job_body(job: ScoreJob) -> bytes:
    example = job.example
    message = {
        "prompt": example.prompt,
        "completion": job.completion,
        "completion_ids": [int(token) for token in job.completion_ids],
        "columns": {**example.columns, "answer": example.answer, "task": example.task},
        "spec": example.spec or example.task,
    }
    return example_json(example, message).encode()
