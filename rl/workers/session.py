"""The workers that run ahead of a pipeline, as its steps are submitted to them; or none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import EngineStats
from rl.engine.worker_record import WorkerEvent
from rl.trajectory import Request
from rl.workers.worker_group import WorkerGroup


class NoSession:
    """The session of a process for which another one speaks with the workers: nothing comes."""

    def __enter__(self) -> NoSession:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""

    def submit(
        self,
        step: int,
        spec: RolloutSpec,
        requests: Sequence[Request],
        past_tokens: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Begin a step, of which this process has no request."""
        assert not requests, "another process has the workers"

    def add(
        self,
        step: int,
        requests: Sequence[Request],
        past_tokens: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        assert not requests, "another process has the workers"

    def trained(self, step: int, train_s: float | None = None) -> None:
        """Nobody waits for it."""

    def next_result(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def num_tokens(self, step: int) -> int:
        return 0

    def stats(self, step: int) -> EngineStats:
        return EngineStats()

    def new_events(self) -> list[WorkerEvent]:
        return []


Session = WorkerGroup | NoSession
