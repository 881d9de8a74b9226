"""Ray for a run, on loopback or in the cluster at `Cluster.address`, and resources for actors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from reprise.models.hints import install_hint
from reprise.rl.cluster.actors import ActorDied, Host
from reprise.rl.runtime.waits import ROOT, ProgramLost


class RayProblem(ProgramLost):
    """Ray is missing, does not answer, or lacks resources; the message says what to do."""


class RayHandle:
    """A `rl.cluster.actors.Handle` of a Ray actor, which can be sent to other actors."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def submit(self, member: str, *args: Any) -> Future[Any]:
        """Submit a call; Ray completes the future in a thread that must not call Ray."""
        import ray

        answer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, ray.exceptions.RayTaskError):
                answer.set_exception(getattr(error, "cause", None) or error)
            else:
                answer.set_exception(ActorDied(_first_line(error)))

        group = {"concurrency_group": "pings"} if member == "ping" else {}
        sent = getattr(self.actor, member).options(**group).remote(*args)
        sent.future().add_done_callback(settle)
        return answer

    def kill(self) -> None:
        import ray

        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(self.actor, no_restart=True)


@dataclasses.dataclass(frozen=True)
class Room:
    """A reserved placement group of equal bundles, one for each actor."""

    group: Any
    bundle: dict[str, float]
    cpu_only: bool

    def start(self, index: int, concurrency: int, name: str) -> RayHandle:
        """Start an actor in a bundle, as process `ray::name`, with `concurrency` parallel calls."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options: dict[str, Any] = {
            "num_cpus": self.bundle["CPU"],
            "num_gpus": self.bundle.get("GPU", 0),
            "resources": {k: v for k, v in self.bundle.items() if k not in ("CPU", "GPU")},
            "max_concurrency": concurrency,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
        }
        remote: Any = ray.remote
        host = remote(concurrency_groups={"pings": 1})(type(name, (Host,), {}))
        return RayHandle(host.options(**options).remote(self.cpu_only))


@contextlib.contextmanager
def reserve(
    count: int, setting: str, start_s: float, *, cpus: int = 1, devices: int = 0
) -> Iterator[Room]:
    """Reserve resources for `count` actors; `setting` names their setting in the message.

    Raises RayProblem unless resources are free within `start_s`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    total = ray.cluster_resources()
    kinds = [kind for kind in ("GPU", "TPU") if devices and total.get(kind)]
    bundle = {"CPU": float(cpus)} | dict.fromkeys(kinds, float(devices))
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=start_s):
            needed = {k: v * count for k, v in bundle.items()}
            raise RayProblem(
                f"expected {needed} for {setting} within {start_s:.0f} s, and Ray has "
                f"{ {k: total.get(k, 0.0) for k in bundle} } in all: ask for fewer, or add nodes"
            )
        yield Room(group, bundle, cpu_only=not devices)
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)


@contextlib.contextmanager
def open_ray(address: str | None, num_cpus: int, deadline_s: float) -> Iterator[str]:
    """Start Ray on loopback, or join the cluster at `address`; shut down or leave at the exit.

    Yields the address. Raises RayProblem if Ray is not installed, or does not answer in time.
    """
    options: dict[str, Any] = {"address": address}
    if address is None:
        # not "auto", which would join the cluster that RAY_ADDRESS names
        options = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        _alone_on_this_host()
    else:
        _look_for(address, deadline_s)
    try:
        import ray
    except ImportError as error:
        raise RayProblem(
            f'Cluster.kind = "ray" needs Ray, which is not there ({error}): {install_hint("ray")}'
        ) from error
    where = "start on this host" if address is None else f"answer at {address}"
    with _environment():
        try:
            ray.init(log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # Ray also raises bare exceptions if its start takes too long
            raise RayProblem(
                f"expected Ray to {where}, and it does not: {_first_line(error)}"
            ) from error
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Let started programs find this checkout; restore PYTHONPATH and SIGTERM at the exit."""
    handler = signal.getsignal(signal.SIGTERM)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), path]))
    try:
        yield
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _alone_on_this_host() -> None:
    """Make Ray, once imported, listen on loopback, with a token of this run."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # also on Linux, this setting makes Ray resolve this host to loopback
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _look_for(address: str, deadline_s: float) -> None:
    """Raise RayProblem unless a program listens at HOST:PORT."""
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


def node_address() -> str:
    """Return the address of this host in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def share(value: Any) -> Any:
    """Put a value into Ray's store; methods that receive the reference get the value."""
    import ray

    return ray.put(value)


def fetch(references: Sequence[Any], limit_s: float) -> list[Any]:
    """Return the values of references, with a ProgramLost for each lost or late value."""
    import ray

    if not ray.is_initialized():  # else Ray would start by itself
        return [ProgramLost("Ray is closed") for _ in references]
    values = list[Any]()
    all_of = len(references)
    come, _ = ray.wait(list(references), num_returns=all_of, timeout=limit_s, fetch_local=True)
    for reference in references:
        try:
            values.append(ray.get(reference, timeout=limit_s if reference in come else 0))
        except (ray.exceptions.RayError, TimeoutError) as error:
            values.append(ProgramLost(_first_line(error)))
    return values


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0][:300].rstrip(".")
    return f"{type(error).__name__}: {line}"
