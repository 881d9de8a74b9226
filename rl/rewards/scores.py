"""Scores of responses, and `Rewards`: worker processes (rl.rewards.pool) or actors (scorers)."""

from __future__ import annotations

import abc
import collections
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from reprise.rl.data.tasks import Example
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.worker import LARGEST_REWARD

T = TypeVar("T")
# If a worker dies before it starts to score a sample, the sample is not at fault.
MAX_ATTEMPTS = 3
MARGIN_S = 30.0  # beyond the sum of the limits: to start a process, or reap one
_POLL_S = 0.1
Outcomes = list[list[Any]]  # of a response: value, kind of failure and message of each function


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreJob:
    """One response to be scored; `completion_ids` are its token ids."""

    example: Example
    completion: str
    completion_ids: Sequence[int] = ()


def job_body(jobs: Sequence[ScoreJob]) -> bytes:
    """Return the message with responses to one example that workers read.

    Raises TypeError for columns that are not JSON.
    """
    example = jobs[0].example
    message = {
        "prompt": example.prompt,
        "completions": [job.completion for job in jobs],
        "completion_ids": [[int(token) for token in job.completion_ids] for job in jobs],
        "columns": {**example.columns, "answer": example.answer, "task": example.task},
        "spec": example.spec or example.task,
    }
    return example_json(example, message).encode()


def example_json(example: Example, value: Any) -> str:
    """Return a value of an example as JSON. Raises TypeError for columns that are not JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{example.example_id}: its columns must be JSON values to reach its scorer: {error}"
        raise TypeError(text) from error


@dataclasses.dataclass(frozen=True)
class Score:
    """The rewards of one sample.

    values: by function name; None if the function does not apply or failed.
    total: Σ weight · value over the values that are not None; None leaves the sample out of the
      advantages (no function applies, or a failure under `skip`).
    failure: `function/kind: message` of the first failure, or None.
    """

    values: Mapping[str, float | None]
    total: float | None
    failure: str | None = None


class Rewards(abc.ABC):
    """Scores samples in other processes and in any order. Use as a context manager.

    counters: failures by (function name, kind); for a sum that is not finite the name is `sum`.
    """

    def __init__(self, config: RewardConfig, timeout_s: float) -> None:
        """Store the settings; `timeout_s` is the sum of all limits of one sample."""
        self.config = config
        self._timeout_s = timeout_s
        self.counters: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()
        self._error: RewardWorkerError | None = None
        self._answered_s = 0.0  # time of the last finished sample, on the monotonic clock

    def __enter__(self) -> Self:
        """Start the workers. Raises RewardWorkerError if a worker cannot load its functions."""
        self.start()
        self.wait_started()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abc.abstractmethod
    def start(self) -> None:
        """Start the workers without waiting; `wait_started` or `close` must follow."""

    @abc.abstractmethod
    def wait_started(self) -> None:
        """Wait for the workers. If a worker fails, close, and raise as `__enter__` does."""

    def submit(self, job: ScoreJob) -> Future[Score]:
        """Queue a response, as in `submit_group`."""
        return self._send(job_body([job]), 1, lambda outcomes: self._to_score(outcomes[0]))

    def submit_group(self, jobs: Sequence[ScoreJob]) -> Future[list[Score]]:
        """Queue responses to one example, which each function receives in one call.

        Returns immediately. Raises RuntimeError if closed, TypeError for columns that are not JSON.
        The future raises RewardWorkerError if workers can no longer be started.
        """
        return self._send(job_body(jobs), len(jobs), lambda rows: [*map(self._to_score, rows)])

    @abc.abstractmethod
    def _send(self, body: bytes, size: int, finish: Callable[[list[Outcomes]], T]) -> Future[T]:
        """Queue a `job_body` of `size` responses; `finish` makes the result of the future."""

    @abc.abstractmethod
    def close(self) -> None:
        """Kill the workers; cancel queued samples. Samples being scored raise RuntimeError."""

    def result(self, future: Future[T], on_wait: Callable[[], None] | None = None) -> T:
        """Wait for the scores of a job, calling `on_wait`, which may raise.

        Raises the error of the future, or RewardWorkerError once all limits of one sample have
        passed without an answer.
        """
        start_s = time.monotonic()
        while not wait([future], _POLL_S).done:
            if on_wait is not None:
                on_wait()
            if time.monotonic() - max(start_s, self._answered_s) > self._timeout_s:
                raise self._error or RewardWorkerError(
                    f"no reward worker has answered for {self._timeout_s:.0f} s"
                )
        return future.result()

    def metrics(self) -> dict[str, float]:
        """Return `rewards/{function}/failures` since the start, and an entry per kind seen."""
        with self._lock:
            counts = sorted(self.counters.items())
        metrics = dict.fromkeys((f"rewards/{name}/failures" for name in self.config.names), 0.0)
        for (name, kind), count in counts:
            metrics[f"rewards/{name}/failures/{kind}"] = float(count)
            metrics.setdefault(f"rewards/{name}/failures", 0.0)
            metrics[f"rewards/{name}/failures"] += count
        return metrics

    def _to_score(self, outcomes: Outcomes) -> Score:
        score = combine(self.config, outcomes)
        pairs = zip(self.config.names, outcomes, strict=True)
        failed = [(name, kind) for name, (_, kind, _) in pairs if kind is not None]
        if score.failure is not None and not failed:
            failed = [("sum", "not_finite")]
        with self._lock:
            self.counters.update(failed)
        return score


def combine(config: RewardConfig, outcomes: Sequence[Sequence[Any]]) -> Score:
    """Combine the outcomes (value, failure kind, message) of all functions into a score.

    total = Σ_k w_k · v_k over the v_k that are not None (the rule of TRL). After any failure,
    including a sum above `LARGEST_REWARD`, the total is 0 under `zero` and None under `skip`.
    """
    values = dict[str, Any]()
    failures = list[str]()
    weighted = list[float]()
    for name, weight, (value, kind, message) in zip(
        config.names, config.full_weights, outcomes, strict=True
    ):
        values[name] = value
        if kind is not None:
            failures.append(f"{name}/{kind}: {message}")
        if value is not None:
            weighted.append(weight * value)
    if not all(abs(x) <= LARGEST_REWARD for x in [*weighted, sum(weighted)]):
        failures.append(
            f"sum/not_finite: weights times values are {weighted}, expected at most "
            f"{LARGEST_REWARD:g} in size: lower Reward.weights, or what the functions return"
        )
    if failures:
        return Score(values, 0.0 if config.on_failure == "zero" else None, failures[0])
    return Score(values, math.fsum(weighted) if weighted else None)
