"""Joining the processes of a run, with a handshake, before any other call of jax.

The processes meet at the address of process 0 (`meet`) before jax connects them. If a process is
missing or starts twice, jax aborts with pages of stack; here, process 0 sends one sentence to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise.models.text import digests
from reprise.rl.cluster.config import AUTO, ClusterConfig, check
from reprise.rl.cluster.processes import ALONE, Processes, ProcessLost
from reprise.rl.runtime.run_files import code_digest

if TYPE_CHECKING:
    from reprise.rl.cluster.relay import Relay

MIN_JAX_S = 30  # for jax to start, once all processes have met, and to notice a loss
POLICY = "contents of Policy.directory"
DRAFT_MODEL = "contents of DraftModel.directory"
TEACHER = "contents of Distill.teacher"
NAME = "reprise"
MAX_BYTES = 2**16  # of a message
HELLO_S = 2.0  # for the first message on a connection
RETRY_S = 0.2


class JobStore:
    """The key-value store of jax's coordination service, which process 0 runs."""

    def __init__(self) -> None:
        from orbax.checkpoint import multihost

        self._client = multihost.get_jax_distributed_client()

    def set(self, key: str, value: bytes) -> None:
        with _translated():
            self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> bytes:
        with _translated():
            return self._client.blocking_key_value_get_bytes(key, max(1, int(timeout_s * 1e3)))

    def entries(self, prefix: str) -> Mapping[str, bytes]:
        with _translated():
            return dict(self._client.key_value_dir_get_bytes(prefix))

    def delete(self, key: str) -> None:
        with _translated():
            self._client.key_value_delete(key)


@contextlib.contextmanager
def _translated() -> Any:
    """Translate errors of jax: TimeoutError after a timeout, else ConnectionError."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        line = str(error).partition("\n")[0]
        kind = TimeoutError if line.startswith("DEADLINE_EXCEEDED") else ConnectionError
        raise kind(line) from error


def join(config: ClusterConfig, identify: Callable[[], Mapping[str, str]]) -> Processes:
    """Wait for all processes of this run, and return them.

    Raises ValueError if the identities (`identity_of`) differ, or if the processes do not find one
    another within `Cluster.deadline_s`.
    """
    if config.kind != "spmd":
        return ALONE
    check(config)
    identity = identify()
    if config.coordinator != AUTO and config.num_processes != 1:
        meet(config)
    relay = _initialize(config)
    import jax

    index = jax.process_index()
    count = jax.process_count()
    if count == 1:
        return ALONE
    processes = Processes(index, count, JobStore(), config.deadline_s)
    if relay is not None:
        relay.watch(processes.lose_first)
    try:
        own = dict(identity) | {"number of devices": str(jax.local_device_count())}
        identities = processes.gather("handshake", json.dumps(own).encode())
    except (ProcessLost, ConnectionError, TimeoutError) as error:
        raise ValueError(f"expected {count} processes: {error}") from error
    if wrong := mismatch([json.loads(text) for text in identities]):
        processes.depart()
        raise ValueError(wrong)
    return processes


def has_joined() -> bool:
    """Return whether this process belongs to a distributed job of jax."""
    import jax

    return jax.distributed.is_initialized()


def leave() -> None:
    """Leave the distributed job, once all processes are done."""
    if has_joined():
        import jax

        jax.distributed.shutdown()


def mismatch(identities: Sequence[Mapping[str, str]], names: Sequence[str] = ()) -> str | None:
    """Describe the first difference from the identity of the first program; None if all agree."""
    names = names or [f"process {i}" for i in range(len(identities))]
    first = identities[0]
    for program, other in zip(names, identities, strict=True):
        for name in dict.fromkeys((*first, *other)):
            expected = first.get(name, "")
            got = other.get(name, "")
            if expected == got:
                continue
            if "\n" in expected:
                lines = set(expected.splitlines()), set(got.splitlines())
                expected = "; ".join(sorted(lines[0] - lines[1])[:2]) or "nothing more"
                got = "; ".join(sorted(lines[1] - lines[0])[:2]) or "nothing more"
            return (
                f"expected the same {name} in all processes, got {got} in {program} and "
                f"{expected} in {names[0]}: start all of them alike"
            )
    return None


def identity_of(config_text: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the facts, by name, that must be the same in all processes of a run.

    `files` are paths by description, such as `POLICY`.
    """
    return {"configuration": config_text} | program_identity(files)


def program_identity(files: Mapping[str, str]) -> dict[str, str]:
    """Return digests of the code and of existing `files`, and package versions, by name."""
    import importlib.metadata

    versions = {
        f"version of {p}": importlib.metadata.version(p) for p in ("jax", "jaxlib", "numpy")
    }
    there = {name: Path(file) for name, file in files.items() if Path(file).exists()}
    contents = {name: digests.combine(digests.digest_policy(path)) for name, path in there.items()}
    return {
        "code of Reprise": code_digest(),
        **versions,
        "version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **contents,
    }


def _initialize(config: ClusterConfig) -> Relay | None:
    """Call `jax.distributed.initialize`; return the relay to process 0, or None.

    Raises ValueError, with a hint, if jax finds no job.
    """
    import jax

    # `rl.runtime.signals` handles signals to stop
    jax.config.update("jax_enable_preemption_service", False)
    limit_s = max(1, int(config.deadline_s))
    # the heartbeats of `Processes` notice a loss first, with a better message
    options: dict[str, Any] = {
        "initialization_timeout": max(limit_s, MIN_JAX_S),
        "heartbeat_timeout_seconds": max(4 * limit_s, MIN_JAX_S),
        "shutdown_timeout_seconds": limit_s,
    }
    numbers = {"num_processes": config.num_processes, "process_id": config.process_id}
    options |= {name: value for name, value in numbers.items() if value is not None}
    if (address := config.coordinator) != AUTO:
        # by default, jax would listen on every interface
        options |= {"coordinator_address": address, "coordinator_bind_address": address}
    if "cpu" in (jax.config.jax_platforms or ""):
        # a program that one process loads hangs in collectives if other processes compile it
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        if address == AUTO:
            options |= _found(options)
        if not options.get("process_id") or sys.platform != "linux":
            jax.distributed.initialize(**options)
            return None
        first = dataclasses.replace(config, coordinator=options["coordinator_address"])
        from reprise.rl.cluster.relay import Relay

        with Relay((first.host, first.port), limit_s) as relay:
            jax.distributed.initialize(**options | {"coordinator_address": relay.here})
            return relay
    except (ValueError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r}: jax found no processes of one job "
            f"({line}); name Cluster.coordinator, Cluster.num_processes and Cluster.process_id"
        ) from error


def _found(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that jax finds in the environment; empty if its function has changed."""
    names = "coordinator_address", "num_processes", "process_id"
    given = {"coordinator_address": os.environ.get("JAX_COORDINATOR_ADDRESS"), **options}
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from jax._src.clusters import ClusterEnv

        *found, _ = ClusterEnv.auto_detect_unset_distributed_params(
            *map(given.get, names), None, None, options["initialization_timeout"]
        )
        return {name: x for name, x in zip(names, found, strict=True) if x is not None}
    return {}


# --- the rendezvous ---------------------------------------------------------------------


def meet(config: ClusterConfig) -> None:
    """Wait until all processes have met. Raises ValueError, in all processes if possible."""
    until_s = time.monotonic() + config.deadline_s
    if config.process_id == 0:
        _lead(config, until_s)
    else:
        _follow(config, until_s)


def _lead(config: ClusterConfig, until_s: float) -> None:
    """Wait for the other processes, and send them the outcome."""
    assert config.num_processes is not None
    num = config.num_processes
    numbers = {0}
    wrong = None
    with contextlib.ExitStack() as stack:
        peers: list[socket.socket] = []
        with _listen(config) as listener:
            while wrong is None and len(numbers) < num:
                try:
                    listener.settimeout(_left_s(until_s))
                    peer = stack.enter_context(listener.accept()[0])
                except TimeoutError:
                    wrong = _missing(config, numbers)
                    continue
                try:
                    name, index, count = _receive(peer, HELLO_S)
                    if name != NAME:
                        continue
                except (OSError, ValueError, TypeError):
                    continue  # another program
                peers.append(peer)
                if count != num:
                    wrong = (
                        f"expected the same Cluster.num_processes in all processes, got {count} in "
                        f"process {index} and {num} in process 0"
                    )
                elif index in numbers or not 0 < index < num:
                    wrong = (
                        f"expected one process of each Cluster.process_id from 0 to {num - 1}, got "
                        f"two with {index}: give each its own"
                    )
                numbers.add(index)
        # the listener is closed: from here on, peers connect to jax's service at this address
        for peer in peers:
            with contextlib.suppress(OSError):
                _send(peer, [NAME, wrong])
    if wrong is not None:
        raise ValueError(wrong)


def _follow(config: ClusterConfig, until_s: float) -> None:
    """Send the number of this process, and receive the outcome."""
    where = f"Cluster.coordinator={config.coordinator!r}"
    limit = f"{config.deadline_s:g} s"
    while True:
        try:
            address = config.host, config.port
            lead = socket.create_connection(address, _left_s(until_s))
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise ValueError(
                    f"{where} did not answer within Cluster.deadline_s={limit}: "
                    f"{error.strerror or error}; is process 0 running there?"
                ) from error
        time.sleep(RETRY_S)
    with lead:
        try:
            _send(lead, [NAME, config.process_id, config.num_processes])
            # process 0 may have started later, and waits as long as this process
            name, wrong = _receive(lead, _left_s(until_s) + config.deadline_s)
            if name != NAME:
                raise ValueError("another name")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where} is no process 0 of this run: it did not answer within "
                f"Cluster.deadline_s={limit} ({error}); is the port another program's?"
            ) from error
    if wrong is not None:
        raise ValueError(wrong)


def _missing(config: ClusterConfig, present: set[int]) -> str:
    assert config.num_processes is not None
    absent = [i for i in range(config.num_processes) if i not in present]
    shown = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
    return (
        f"expected {config.num_processes} processes at Cluster.coordinator="
        f"{config.coordinator!r}, got {len(present)} within Cluster.deadline_s="
        f"{config.deadline_s:g} s: process {shown} did not come; is it running, and can it reach "
        "this address?"
    )


def _listen(config: ClusterConfig) -> socket.socket:
    """Listen at the address of process 0 only."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port)[0]
        return socket.create_server(address[:2], family=family, backlog=config.num_processes)
    except OSError as error:
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r}: process 0 cannot listen there: "
            f"{error.strerror or error}; is the port taken, or the host another one?"
        ) from error


def _send(peer: socket.socket, message: list[Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, limit_s: float) -> list[Any]:
    """Return one message. Raises OSError, and ValueError or TypeError for an invalid message."""
    peer.settimeout(limit_s)
    with peer.makefile("rb") as stream:
        return list(json.loads(stream.readline(MAX_BYTES)))


def _left_s(until_s: float) -> float:
    return max(0.01, until_s - time.monotonic())
