"""Joining the processes of a run: before any other call of jax, and with a handshake."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.cluster.config import AUTO, ClusterConfig, check
from rl.cluster.processes import ALONE, Processes, ProcessLost
from rl.cluster.rendezvous import meet

HERE = Path(__file__).resolve().parents[2]
PACKAGES = "models", "spec", "sched", "rl"
LEAST_INITIALIZATION_S = 30  # for jax, once all processes have met
POLICY, DRAFT_MODEL = "contents of Policy.directory", "contents of DraftModel.directory"
SAMPLED_BYTES = 2**20  # of a large file: its first and last ones


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
    """Raise jax's errors as Python's: TimeoutError where time was up, else ConnectionError."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        line = str(error).partition("\n")[0]
        kind = TimeoutError if line.startswith("DEADLINE_EXCEEDED") else ConnectionError
        raise kind(line) from error


def join(config: ClusterConfig, identify: Callable[[], Mapping[str, str]]) -> Processes:
    """Return the processes of this run, once all of them are there.

    Raises ValueError if their identities (`identity_of`) differ, or if they cannot find one another
    within `Cluster.deadline_s`.
    """
    if config.kind != "spmd":
        return ALONE
    check(config)
    identity = identify()
    if config.coordinator != AUTO and config.num_processes != 1:
        meet(config)
    _initialize(config)
    import jax

    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return ALONE
    processes = Processes(index, count, JobStore(), config.deadline_s)
    try:
        own = dict(identity) | {"number of devices": str(jax.local_device_count())}
        given = processes.gather("handshake", json.dumps(own).encode())
    except (ProcessLost, ConnectionError, TimeoutError) as error:
        raise ValueError(f"expected {count} processes: {error}") from error
    if wrong := mismatch([json.loads(text) for text in given]):
        processes.depart()
        raise ValueError(wrong)
    return processes


def leave() -> None:
    """End this process's part in the job, once all are done."""
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def mismatch(identities: Sequence[Mapping[str, str]], names: Sequence[str] = ()) -> str | None:
    """Return a sentence on the first program, by its name, that differs from the first one."""
    names = names or [f"process {i}" for i in range(len(identities))]
    first = identities[0]
    for program, other in zip(names, identities, strict=True):
        for name in dict.fromkeys((*first, *other)):
            here, there = first.get(name, ""), other.get(name, "")
            if here == there:
                continue
            if "\n" in here:
                lines = set(here.splitlines()), set(there.splitlines())
                here = "; ".join(sorted(lines[0] - lines[1])[:2]) or "nothing more"
                there = "; ".join(sorted(lines[1] - lines[0])[:2]) or "nothing more"
            return (
                f"expected the same {name} in all processes, got {there} in {program} and "
                f"{here} in {names[0]}: start all of them alike"
            )
    return None


def identity_of(config_text: str, policy: Path, draft_model: Path | None = None) -> dict[str, str]:
    """Return what the processes of a run must have in common, by name."""
    files = {POLICY: str(policy)}
    if draft_model is not None:
        files[DRAFT_MODEL] = str(draft_model)
    return {"configuration": config_text} | program_identity(files)


def program_identity(files: Mapping[str, str]) -> dict[str, str]:
    """Return the code, the versions, and the contents of the files that this host has, by name."""
    import importlib.metadata

    versions = {
        f"version of {p}": importlib.metadata.version(p) for p in ("jax", "jaxlib", "numpy")
    }
    contents = {k: _folder_digest(Path(x)) for k, x in files.items() if Path(x).exists()}
    return {
        "code of Reprise": _code_digest(HERE),
        **versions,
        "version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **contents,
    }


def _code_digest(root: Path) -> str:
    """Return a digest of the source of our packages."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _folder_digest(folder: Path) -> str:
    """Return a digest of a folder's, or a file's, names and sizes, and of samples of its bytes."""
    found = hashlib.sha256()
    paths = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if p.is_file())
    for path in paths:
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            found.update(file.read(SAMPLED_BYTES))
            if size > SAMPLED_BYTES:
                file.seek(max(SAMPLED_BYTES, size - SAMPLED_BYTES))
                found.update(file.read(SAMPLED_BYTES))
    return found.hexdigest()[:16]


def _initialize(config: ClusterConfig) -> None:
    """Call `jax.distributed.initialize`. Raises ValueError with expected, got and mend."""
    import jax

    # a signal to stop is handled by `rl.runtime.signals`
    jax.config.update("jax_enable_preemption_service", False)
    limit_s = max(1, int(config.deadline_s))
    # ours notices a loss first, and says more
    options: dict[str, Any] = {
        "initialization_timeout": max(limit_s, LEAST_INITIALIZATION_S),
        "heartbeat_timeout_seconds": 4 * limit_s,
        "shutdown_timeout_seconds": limit_s,
    }
    numbers = {"num_processes": config.num_processes, "process_id": config.process_id}
    options |= {name: value for name, value in numbers.items() if value is not None}
    if (address := config.coordinator) != AUTO:
        # by default it would listen on every interface
        options |= {"coordinator_address": address, "coordinator_bind_address": address}
    if "cpu" in (jax.config.jax_platforms or ""):
        # a program that one process loads hangs in collectives with those that others compile
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        jax.distributed.initialize(**options)
    except (ValueError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"Cluster.coordinator={config.coordinator!r}: jax found no processes of one job "
            f"({line}); name Cluster.coordinator, Cluster.num_processes and Cluster.process_id"
        ) from error
