"""Scores of responses, and what gives them: the samples go in, failures are counted on the way.

`Rewards` is what a run asks, whether its reward workers belong to this program
(`rl.rewards.pool.RewardPool`) or to others (`rl.remote.scorers.Scorers`).
"""

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
from typing import Any, Self

from rl.data.tasks import Example
from rl.rewards.config import RewardConfig
from rl.rewards.process import RewardWorkerError
from rl.rewards.worker import LARGEST_REWARD

# A worker that dies before a sample's scoring starts is not that sample's fault.
MOST_ATTEMPTS = 3
MARGIN_S = 30.0  # beyond the sum of the limits: starting a process, reaping one
_POLL_S = 0.1
Outcomes = list[list[Any]]  # value, kind of failure and message of each function


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreJob:
    """One response to be scored; `completion_ids` are its token ids."""

    example: Example
    completion: str
    completion_ids: Sequence[int] = ()


def example_json(example: Example, value: Any) -> str:
    """Return what is sent of an example. Raises TypeError where its columns are not JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{example.example_id}: its columns must be JSON values (text, numbers, lists, "
            f"dicts) to reach what scores it: {error}"
        ) from error


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


class Rewards(abc.ABC):
    """Scores samples, elsewhere and in any order. Use as a context manager.

    counters: failures by (function name, kind); kinds are `raised`, `deadline`, `died`,
      `not_a_list`, `length`, `not_a_number`, `not_finite` and `protocol`. Of a sum that is
      not finite the name is `sum`.
    messages: the first message of each kind, for the log.
    """

    def __init__(self, config: RewardConfig, patience_s: float) -> None:
        """`patience_s`: all limits of one sample together."""
        self.config, self._patience_s = config, patience_s
        self.counters: collections.Counter[tuple[str, str]] = collections.Counter()
        self.messages: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._error: RewardWorkerError | None = None
        self._answered_s = 0.0  # on the monotonic clock: when a sample was last finished

    def __enter__(self) -> Self:
        """Start the workers; raises RewardWorkerError where one cannot load its functions."""
        self.start()
        self.wait_started()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abc.abstractmethod
    def start(self) -> None:
        """Start the workers without waiting for them; `wait_started` or `close` must follow."""

    @abc.abstractmethod
    def wait_started(self) -> None:
        """Wait for the workers; raises what `__enter__` does, and all is closed then."""

    @abc.abstractmethod
    def submit(self, job: ScoreJob) -> Future[Score]:
        """Queue a sample; returns at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers and cancel queued samples; the ones being scored raise RuntimeError."""

    def result(self, future: Future[Score], on_wait: Callable[[], None] | None = None) -> Score:
        """Wait for a sample's score; `on_wait` is called meanwhile, and may raise.

        Raises what the future does, and RewardWorkerError where no worker has answered for longer
        than all their limits together.
        """
        began = time.monotonic()
        while not wait([future], _POLL_S).done:
            if on_wait is not None:
                on_wait()
            if time.monotonic() - max(began, self._answered_s) > self._patience_s:
                raise self._error or RewardWorkerError(
                    f"no reward worker has answered for {self._patience_s:.0f} s"
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

    def _to_score(self, outcomes: Outcomes) -> Score:
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
