"""Actors beside the workers of a run, on CPUs alone: scorers."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from rl.ray_roles.actors import RayChannel, ScoringActor
from rl.ray_roles.session import CONCURRENT, HEARING, RayProblem
from rl.runtime.waits import POLL_S


class ScorerActors:
    """Starts scorers, each with `cpus` CPUs; Ray takes nodes without accelerators first.

    Raises RayProblem where the cluster has not that many to spare within `start_s`.
    """

    def __init__(self, config_text: str, count: int, cpus: int, *, start_s: float) -> None:
        self._config_text, self._cpus = config_text, cpus
        self._hearing = ThreadPoolExecutor(HEARING, thread_name_prefix="answers of scorers")
        _wait_for_cpus(count, cpus, start_s)

    def connect(self, number: int) -> RayChannel:
        """Start a scorer; several threads may."""
        import ray

        options = {"num_cpus": self._cpus, "max_concurrency": CONCURRENT}
        scorer = (
            ray.remote(ScoringActor)
            .options(**options, max_restarts=0, max_task_retries=0)
            .remote(self._config_text, os.getcwd())
        )
        return RayChannel(scorer, lambda message: message, self._hearing)

    def close(self) -> None:
        """Hear no answers any more; the scorers are ended by those who ask them."""
        self._hearing.shutdown(wait=False, cancel_futures=True)


def _wait_for_cpus(count: int, cpus: int, start_s: float) -> None:
    import ray

    until_s = time.monotonic() + start_s
    while (free := ray.available_resources().get("CPU", 0.0)) < count * cpus:
        if time.monotonic() > until_s:
            raise RayProblem(
                f"expected {count * cpus} free CPUs for Cluster.scorers={count} of "
                f"Reward.workers={cpus} within {start_s:.0f} s, and Ray has {free:g}: ask for "
                "fewer, or add nodes"
            )
        time.sleep(POLL_S)
