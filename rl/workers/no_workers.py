"""The engine of a process for which another one speaks with the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.trajectory import Request, Trajectory
from rl.workers.config import SchedConfig
from rl.workers.multi_engine import MultiEngine
from rl.workers.session import NoSession
from sched.protocol import Scheduler


class NoWorkers(MultiEngine):
    """Answers nothing. It knows the workers' shapes from `engine`, on which nothing runs."""

    def __init__(self, engine: Engine, config: SchedConfig) -> None:
        super().__init__([engine], config)

    def run(
        self, spec: RolloutSpec, requests: Sequence[Request], **options: Any
    ) -> list[Trajectory]:
        """Return the responses to no requests. See `RolloutEngine.run`."""
        assert not requests, "another process has the workers"
        return []

    def session(self, scheduler: Scheduler, max_requests: int, longest_tokens: int) -> NoSession:
        return NoSession()
