"""The trainer processes of a run as actors of Ray, in a placement group of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.ray_roles.actors import RayChannel, TrainerActor
from rl.ray_roles.session import HEARING, accelerators, reserve

CONCURRENT = 4  # messages that an actor answers at once: one of them waits


@contextlib.contextmanager
def open_trainers(count: int, devices: int, start_s: float) -> Iterator[list[RayChannel]]:
    """Start `count` actors with so many devices each; yield the channels to them.

    Ray is open. Raises RayProblem where there is no room within `start_s`.
    """
    import ray
    from ray.util import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": 1.0} | accelerators(devices)
    group = reserve([bundle] * count, f"Cluster.num_processes={count}", start_s)
    hearing = ThreadPoolExecutor(HEARING, thread_name_prefix="answers")
    try:
        options: dict[str, Any] = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "resources": {k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
            "max_concurrency": CONCURRENT,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        channels = []
        for i in range(count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            actor = ray.remote(TrainerActor).options(**options, scheduling_strategy=place).remote()
            channels.append(RayChannel(actor, lambda message: message, hearing))
        yield channels
    finally:
        hearing.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)
