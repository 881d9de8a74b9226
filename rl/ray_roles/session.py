"""The rollout workers and drafting programs of a run on Ray."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.cluster.ray_session import RayProblem
from rl.ray_roles.actors import DraftActor, DraftingActor, RayChannel, WorkerActor

SHARED_BYTES = 2**20  # messages from this size on are put into the store once, for all workers
MOST_SHARED = 2
HEARING = 4  # threads that read what workers answer
CONCURRENT = 8  # messages that an actor answers at once: one of them waits, others are short


class RaySession:
    """The actors of a run, in one placement group: rollout workers and drafting programs, and a
    draft server beside them.

    What a worker asks for is reserved at the start, so that a run that does not fit says so.
    """

    def __init__(
        self, config_text: str, workers: int, devices: int, *, deadline_s: float, start_s: float
    ) -> None:
        self._config_text, self._deadline_s, self._start_s = config_text, deadline_s, start_s
        self._bundle: dict[str, float] = {"CPU": 1.0} | accelerators(devices)
        asked = f"Sched.workers={workers}"
        self._group = reserve([self._bundle] * workers, asked, start_s)
        self._shared: collections.OrderedDict[int, tuple[bytes, Any]] = collections.OrderedDict()
        self._hearing = ThreadPoolExecutor(HEARING, thread_name_prefix="answers")
        self._lock = threading.Lock()
        self._drafts: Any = None

    def connect(self, number: int) -> RayChannel:
        """Start a worker; several threads may."""
        import ray

        with self._lock:
            if self._drafts is None:
                actor = ray.remote(DraftActor)
                self._drafts = actor.options(num_cpus=0, max_concurrency=CONCURRENT).remote()
        given = self._config_text, self._drafts, self._deadline_s
        return self._started(WorkerActor, number, given, max_concurrency=CONCURRENT)

    def connect_drafting(self, number: int, name: str) -> RayChannel:
        """Start a drafting program in a worker's place; rollout workers find it by its name.

        Each of them may wait for an answer at the same time.
        """
        options = {"name": name, "max_concurrency": CONCURRENT + self._group.bundle_count}
        return self._started(DraftingActor, number, (self._config_text,), **options)

    def _started(
        self, actor: type, number: int, given: tuple[Any, ...], **options: Any
    ) -> RayChannel:
        """Start an actor on the devices of a worker's place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number % self._group.bundle_count
        )
        resources = {k: v for k, v in self._bundle.items() if k not in ("CPU", "GPU")}
        options |= {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy}
        options |= {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        remote: Any = ray.remote(actor)
        started = remote.options(resources=resources, **options).remote(*given)
        return RayChannel(started, self._share, self._hearing)

    def close(self) -> None:
        """Give back what was reserved."""
        import ray
        from ray.util import remove_placement_group

        self._hearing.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ray.exceptions.RayError):
            if self._drafts is not None:
                ray.kill(self._drafts)
            remove_placement_group(self._group)

    def _share(self, message: bytes) -> Any:
        """A large message as a reference, so that the store sends it to each host once."""
        import ray

        if len(message) < SHARED_BYTES:
            return message
        with self._lock:
            found = self._shared.get(id(message))
            if found is None or found[0] is not message:
                found = self._shared[id(message)] = message, ray.put(message)
                while len(self._shared) > MOST_SHARED:
                    self._shared.popitem(last=False)
            return found[1]


def reserve(bundles: Sequence[dict[str, float]], asked: str, start_s: float) -> Any:
    """Return a placement group of these bundles; `asked` names the setting that asks for them.

    Raises RayProblem where there is no room within `start_s`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    group = placement_group(list(bundles), strategy="PACK")
    if not group.wait(timeout_seconds=start_s):
        there = {k: v for k, v in ray.cluster_resources().items() if k in bundles[0]}
        remove_placement_group(group)
        needed = {k: v * len(bundles) for k, v in bundles[0].items()}
        raise RayProblem(
            f"expected {needed} for {asked} within {start_s:.0f} s, and Ray has {there} in all: "
            "ask for fewer, or add nodes"
        )
    return group


def accelerators(devices: int) -> dict[str, float]:
    """The accelerators that an actor is placed with, of the kind that the cluster has."""
    import ray

    there = ray.cluster_resources()
    return {kind: float(devices) for kind in ("GPU", "TPU") if there.get(kind)}
