"""Scoring in worker processes: `submit` returns at once, and every future is answered.

A future gets a score or an error that names the mend, or is cancelled by `close`. A scorer that
raises, hangs, dies or answers nonsense costs its one sample a reward by `RewardConfig.on_failure`,
is counted, and its worker is replaced where needed. One job is one sample: functions are called
with lists of length one.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from rl.data.tasks import Example
from rl.rewards.config import RewardConfig, validate
from rl.rewards.process import RewardWorkerError, WorkerProcess, WorkerStopped
from rl.rewards.worker import LARGEST_REWARD

# A worker that dies before a sample's scoring starts is not that sample's fault.
_MAX_ATTEMPTS = 3
_MARGIN_S = 30.0  # beyond the sum of the limits: starting a process, reaping one
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreJob:
    """One response to be scored; `completion_ids` are its token ids."""

    example: Example
    completion: str
    completion_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Score:
    """One sample's rewards.

    values: per function name; None where it is not applicable or failed.
    total: Σ weight · value over the values that are not None; None leaves the sample
      out of the advantages (no function applies, or a failure under `skip`).
    failure: `function/kind: message` of the first failure, or None.
    """

    values: Mapping[str, float | None]
    total: float | None
    failure: str | None = None


class RewardPool:
    """Worker processes behind a queue. Use as a context manager.

    counters: failures by (function name, kind); kinds are `raised`, `deadline`, `died`,
      `not_a_list`, `length`, `not_a_number`, `not_finite` and `protocol`. Of a sum that is
      not finite the name is `sum`.
    messages: the first message of each kind, for the log.
    """

    def __init__(
        self, config: RewardConfig, tasks: Sequence[str] = (), startup_s: float = 120.0
    ) -> None:
        """Raises what `validate(config)` raises, before any process is started.

        `tasks` (specs) are opened by each worker when it starts instead of at the first
        sample; `startup_s` limits that, imports included.
        """
        validate(config)
        self.config = config
        self.counters: collections.Counter[tuple[str, str]] = collections.Counter()
        self.messages: dict[tuple[str, str], str] = {}
        self._tasks, self._startup_s = tuple(tasks), startup_s
        self._queue: queue.SimpleQueue[tuple[bytes, Future[Score]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: dict[int, WorkerProcess] = {}
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._error: RewardWorkerError | None = None
        self._closed = False
        self._answered_s = 0.0  # on the monotonic clock: when a sample was last finished

    def __enter__(self) -> RewardPool:
        """Start the workers; raises RewardWorkerError where one cannot load its functions."""
        self.start()
        self.wait_started()
        return self

    def start(self) -> None:
        """Start the workers without waiting for them; `wait_started` or `close` must follow."""
        self._started = [Future() for _ in range(self.config.workers)]
        for slot, ready in enumerate(self._started):
            thread = threading.Thread(
                target=self._supervise, args=(slot, ready), name=f"reward-{slot}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wait_started(self) -> None:
        """Wait for the workers; raises what `__enter__` does, and the pool is closed then."""
        try:
            for ready in self._started:
                ready.result(self._startup_s + _MARGIN_S)
        except TimeoutError:
            self.close()
            raise RewardWorkerError(
                f"a reward worker did not start within {self._startup_s + _MARGIN_S:.0f} s"
            ) from None
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, job: ScoreJob) -> Future[Score]:
        """Queue a sample; returns at once.

        Raises RuntimeError on a closed pool, TypeError for columns that are not JSON.
        The future raises RewardWorkerError where workers can no longer be started.
        """
        body = _job_body(job)
        future: Future[Score] = Future()
        with self._lock:
            if self._closed or not self._threads:
                raise RuntimeError(
                    "the reward pool is not open: use `with RewardPool(...) as pool`"
                )
            self._queue.put((body, future))
        return future

    def result(self, future: Future[Score], on_wait: Callable[[], None] | None = None) -> Score:
        """Wait for a sample's score; `on_wait` is called meanwhile, and may raise.

        Raises what the future does, and RewardWorkerError where no worker has answered for longer
        than all their limits together.
        """
        began = time.monotonic()
        limits = 2 * self._startup_s + max(self.config.deadline_s, _MARGIN_S) + _MARGIN_S
        patience_s = _MAX_ATTEMPTS * limits
        while not wait([future], _POLL_S).done:
            if on_wait is not None:
                on_wait()
            if time.monotonic() - max(began, self._answered_s) > patience_s:
                raise self._error or RewardWorkerError(
                    f"no reward worker has answered for {patience_s:.0f} s"
                )
        return future.result()

    def metrics(self) -> dict[str, float]:
        """Return `rewards/{function}/failures` since the start, and an entry per kind seen."""
        with self._lock:
            counts = dict(self.counters)
        metrics = {f"rewards/{name}/failures": 0.0 for name in self.config.names}
        for (name, kind), count in sorted(counts.items()):
            metrics[f"rewards/{name}/failures"] = (
                metrics.get(f"rewards/{name}/failures", 0.0) + count
            )
            metrics[f"rewards/{name}/failures/{kind}"] = float(count)
        return metrics

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
            thread.join(_MARGIN_S)  # all of them are daemons

    def _drain(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()

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
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                score = self._ask(slot, job)
            except BaseException as error:  # for the caller
                future.set_exception(error)
            else:
                future.set_result(score)
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

    def _ask(self, slot: int, job: bytes) -> Score:
        stopped: WorkerStopped | None = None
        for _ in range(_MAX_ATTEMPTS):
            self._refill(slot)
            if self._closed:
                raise RuntimeError("the reward pool was closed before this sample was scored")
            if self._error is not None:
                raise self._error
            try:
                return self._to_score(self._workers[slot].ask(job))
            except RewardWorkerError as error:
                self._fail(error)
                raise
            except WorkerStopped as error:
                stopped = error
                self._stop(slot)
                if stopped.function is not None and not self._closed:
                    return self._stopped_score(stopped)
        unstartable = RewardWorkerError(
            f"{_MAX_ATTEMPTS} reward workers ended before they could start on one sample (the "
            f"last: {stopped}): does opening its task need more memory or time than "
            "Reward.memory_limit_mib allows?"
        )
        self._fail(unstartable)
        raise unstartable

    def _stopped_score(self, stopped: WorkerStopped) -> Score:
        message = stopped.message
        if stopped.kind == "deadline":
            message = f"no result within Reward.deadline_s={self.config.deadline_s}; killed"
        outcomes: list[list[Any]] = [[None, None, None] for _ in self.config.names]
        outcomes[stopped.function or 0] = [None, stopped.kind, message]
        return self._to_score(outcomes)

    def _to_score(self, outcomes: list[list[Any]]) -> Score:
        score = combine(self.config, outcomes)
        failed = list(zip(self.config.names, outcomes, strict=True))
        if score.failure is not None and not any(kind for _, (_, kind, _) in failed):
            failed.append(("sum", [None, "not_finite", score.failure]))
        with self._lock:
            for name, (_, kind, message) in failed:
                if kind is not None:
                    self.counters[name, kind] += 1
                    self.messages.setdefault((name, kind), message)
        return score


def combine(config: RewardConfig, outcomes: Sequence[Sequence[Any]]) -> Score:
    """Combine the outcomes (value, failure kind, message) of all functions into a score.

    total = Σ_k w_k · v_k over the v_k that are not None (TRL's rule). After any failure
    it is 0 under `zero` and None under `skip`, whatever the other functions say. A sum
    that float32 does not hold is a failure too.
    """
    names = config.names
    values = {name: outcome[0] for name, outcome in zip(names, outcomes, strict=True)}
    failures = [
        f"{name}/{kind}: {message}"
        for name, (_, kind, message) in zip(names, outcomes, strict=True)
        if kind is not None
    ]
    weighted = [
        weight * values[name]
        for name, weight in zip(names, config.full_weights, strict=True)
        if values[name] is not None
    ]
    if not all(abs(x) <= LARGEST_REWARD for x in [*weighted, sum(weighted)]):
        failures.append(
            f"sum/not_finite: weights times values are {weighted}, which float32 cannot add up: "
            "lower Reward.weights, or what the functions return"
        )
    if failures:
        return Score(values, 0.0 if config.on_failure == "zero" else None, failures[0])
    return Score(values, math.fsum(weighted) if weighted else None)


def _job_body(job: ScoreJob) -> bytes:
    example = job.example
    message = {
        "prompt": example.prompt,
        "completion": job.completion,
        "completion_ids": [int(token) for token in job.completion_ids],
        "columns": {**example.columns, "answer": example.answer, "task": example.task},
        "spec": example.spec or example.task,
    }
    try:
        return json.dumps(message).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{example.example_id}: its columns must be JSON values (text, numbers, lists, "
            f"dicts) to reach a reward worker: {error}"
        ) from error
