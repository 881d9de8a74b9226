"""Actors beside the workers of a run, on CPUs alone: scorers and history workers."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.ray_roles.actors import HistoryActor, RayChannel, ScoringActor
from rl.ray_roles.session import CONCURRENT, HEARING, RayProblem
from rl.runtime.waits import POLL_S


class _CpuActors:
    """Starts actors, each with `cpus` CPUs; Ray takes nodes without accelerators first."""

    def __init__(self, what: str, count: int, cpus: int, start_s: float) -> None:
        """Raises RayProblem where the cluster has not that many to spare within `start_s`."""
        self._cpus = cpus
        self._hearing = ThreadPoolExecutor(HEARING, thread_name_prefix="answers of services")
        _wait_for_cpus(what, count * cpus, start_s)

    def _started(self, actor: type, *given: str, name: str | None = None) -> RayChannel:
        import ray

        options: dict[str, Any] = {"num_cpus": self._cpus, "max_concurrency": CONCURRENT}
        options |= {"max_restarts": 0, "max_task_retries": 0, "name": name}
        started: Any = ray.remote(actor).options(**options).remote(*given)
        return RayChannel(started, lambda message: message, self._hearing)

    def close(self) -> None:
        """Hear no answers any more; the actors are ended by those who ask them."""
        self._hearing.shutdown(wait=False, cancel_futures=True)


class ScorerActors(_CpuActors):
    """Starts scorers, each with as many CPUs as reward workers."""

    def __init__(self, config_text: str, count: int, cpus: int, *, start_s: float) -> None:
        super().__init__(f"Cluster.scorers={count} of Reward.workers={cpus}", count, cpus, start_s)
        self._config_text = config_text

    def connect(self, number: int) -> RayChannel:
        """Start a scorer; several threads may."""
        return self._started(ScoringActor, self._config_text, os.getcwd())


class HistoryActors(_CpuActors):
    """Starts history workers, each with one CPU."""

    def __init__(self, config_text: str, count: int, *, start_s: float) -> None:
        super().__init__(f"Cluster.history_workers={count}", count, 1, start_s)
        self._config_text = config_text

    def connect(self, number: int, name: str) -> RayChannel:
        """Start one that rollout workers find by its name, which no other has or had."""
        return self._started(HistoryActor, self._config_text, name=name)


def _wait_for_cpus(what: str, cpus: int, start_s: float) -> None:
    import ray

    until_s = time.monotonic() + start_s
    while (free := ray.available_resources().get("CPU", 0.0)) < cpus:
        if time.monotonic() > until_s:
            raise RayProblem(
                f"expected {cpus} free CPUs for {what} within {start_s:.0f} s, and Ray has "
                f"{free:g}: ask for fewer, or add nodes"
            )
        time.sleep(POLL_S)
