"""Ray for a run: a local one on loopback, or the cluster that `Cluster.address` names."""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.ray_roles.actors import DraftActor, RayChannel, WorkerActor
from rl.runtime.waits import ROOT, ProgramLost

SHARED_BYTES = 2**20  # messages from this size on are put into the store once, for all workers
MOST_SHARED = 2
HEARING = 4  # threads that read what workers answer
CONCURRENT = 8  # messages that an actor answers at once: one of them waits, others are short


class RayProblem(ProgramLost):
    """Ray is missing, does not answer, or has no room; says what to do."""


class RaySession:
    """The actors of a run, in one placement group: rollout workers, and a draft server beside them.

    What a worker asks for is reserved at the start, so that a run that does not fit says so.
    """

    def __init__(
        self, config_text: str, workers: int, devices: int, *, deadline_s: float, start_s: float
    ) -> None:
        import ray

        self._config_text, self._deadline_s, self._start_s = config_text, deadline_s, start_s
        self._bundle: dict[str, float] = {"CPU": 1.0} | accelerators(devices)
        asked = f"Sched.workers={workers}"
        self._group = reserve([self._bundle] * workers, asked, start_s)
        self._shared: collections.OrderedDict[int, tuple[bytes, Any]] = collections.OrderedDict()
        self._hearing = ThreadPoolExecutor(HEARING, thread_name_prefix="answers")
        self._lock = threading.Lock()
        actor: Any = ray.remote(DraftActor)
        self._drafts = actor.options(num_cpus=0, max_concurrency=CONCURRENT).remote()

    def connect(self, number: int) -> RayChannel:
        """Start a worker; several threads may."""
        given = self._config_text, self._drafts, self._deadline_s
        return self._started(WorkerActor, number, given, max_concurrency=CONCURRENT)

    def publish(self, worker: int, apart: Any) -> bool:
        """Have a rollout worker find its drafting workers."""
        import ray

        ray.get(self._drafts.put_apart.remote(worker, apart), timeout=self._deadline_s)
        return True

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


@contextlib.contextmanager
def open_ray(address: str | None, num_cpus: int, deadline_s: float) -> Iterator[str]:
    """Start Ray on loopback, or join the cluster at `address`; leave it at the end.

    Yields the address at which other programs of the run join it. The handlers of signals stay
    those of before.

    Raises RayProblem where it is not installed, or nobody answers at the address in time.
    """
    options: dict[str, Any] = {"address": address}
    if address is None:
        # not "auto": what RAY_ADDRESS names has not been asked for
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        _alone_on_this_host()
    else:
        _look_for(address, deadline_s)
    try:
        import ray
    except ImportError as error:
        raise RayProblem(
            f'Cluster.kind = "ray" needs Ray, which is not there ({error}): '
            "pip install -e '.[ray]'"
        ) from error
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    with _importable(), _translated(address), _same_handlers():
        ray.init(**quiet, **options)
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Put back how SIGTERM is handled: Ray has it raise SystemExit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Inside, what is started finds this checkout, wherever it is started."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _alone_on_this_host() -> None:
    """Have a Ray that is started listen on loopback, to those who know this run's token.

    Ray reads these when it is imported.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # on Linux too: with it Ray resolves this host to loopback
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _translated(address: str | None) -> Iterator[None]:
    """Raise what Ray raises at its start in one sentence."""
    try:
        yield
    except Exception as error:  # Ray raises bare ones too, as where its own start takes too long
        where = "start on this host" if address is None else f"answer at {address}"
        line = str(error).strip().partition("\n")[0][:300]
        raise RayProblem(f"expected Ray to {where}, and it does not: {line}") from error


def _look_for(address: str, deadline_s: float) -> None:
    """Raise RayProblem where nobody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=deadline_s):
            return
    except OSError as error:
        raise RayProblem(
            f"expected a Ray cluster at Cluster.address={address!r}, and nobody answers within "
            f"{deadline_s:.0f} s ({error}): start one with ray start --head --port={port}, or "
            "leave the address out"
        ) from error


def accelerators(devices: int) -> dict[str, float]:
    """The accelerators that an actor is placed with, of the kind that the cluster has."""
    import ray

    there = ray.cluster_resources()
    return {kind: float(devices) for kind in ("GPU", "TPU") if there.get(kind)}
